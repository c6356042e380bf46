"""Asks SLURM about jobs, in as few calls as possible, since each is work for a controller that all users share."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.run.errors import RunError

# Ids in one call: a command line has room for some thousands.
_CHUNK = 500
_SECONDS = 120
_LOOK_SECONDS = 30
# What SLURM says of jobs that it has forgotten, or that are about to end.
_ENDED = ("Invalid job id", "already completing or completed")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # 1-02:03:04, 2:03:04, 3:04
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING",
         "STOPPED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD"}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One job as SLURM sees it: its state, the nodes, the time left until its limit, why it waits."""

    state: str
    nodes: str = ""
    left: str = ""
    reason: str = ""

    @property
    def alive(self) -> bool:
        """Whether it may still run."""
        return self.state in ALIVE

    @property
    def seconds_left(self) -> float:
        """The time left until its limit; infinite where there is no limit, or SLURM does not say."""
        if self.left == "INVALID":  # beyond it
            return 0.0
        match = _TIME.fullmatch(self.left)
        if match is None:
            return math.inf
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def queue(jobs: Iterable[str]) -> dict[str, Seen]:
    """The jobs (as 17, or 17_3 of an array) that the controller still remembers: all that wait or run, and those that
    ended a few minutes ago. It is asked for whole arrays.

    Raises:
        RunError: there is no squeue on this machine, or it fails.
    """
    return _seen(sorted({job.partition("_")[0] for job in jobs}), _SECONDS)


def look(job: str) -> Seen | None:
    """One job (17, or 17_3 of an array) as the controller sees it, in a call that is less work for it than `queue`, and
    that does not wait long. None if it has forgotten the job.

    Raises:
        RunError: there is no squeue on this machine, or it fails.
    """
    # The last task of an array has the array's own id as SLURM_JOB_ID: asked for that, squeue would list all tasks.
    return _seen([job], _LOOK_SECONDS).get(job)


def missing_clients() -> list[str]:
    """What a job needs of SLURM's programs to requeue itself, and does not find."""
    return [name for name in ("squeue", "scontrol") if shutil.which(name) is None]


def _seen(jobs: Sequence[str], seconds: float) -> dict[str, Seen]:
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N|%L|%r"]
    seen: dict[str, Seen] = {}
    for part in _chunks(jobs):
        for line in _output([*command, f"--jobs={','.join(part)}"], seconds).splitlines():
            job, state, nodes, left, reason = (*line.strip().split("|"), "", "", "")[:5]
            seen[job] = Seen(state, nodes, left, "" if reason == "None" else reason)
    return seen


def accounting(jobs: Sequence[str]) -> dict[str, Seen]:
    """How jobs ended that the controller has forgotten; empty on a cluster without accounting."""
    if shutil.which("sacct") is None:
        return {}
    command = ["sacct", "-X", "--noheader", "--parsable2", "--format=JobID,State,NodeList"]
    seen: dict[str, Seen] = {}
    for part in _chunks(jobs):
        done = _run([*command, f"--jobs={','.join(part)}"], _SECONDS)
        if done.returncode:
            return {}
        for line in done.stdout.splitlines():
            job, state, nodes = line.split("|")
            seen[job] = Seen(state.partition(" ")[0], nodes)  # "CANCELLED by 1000"
    return seen


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs; those that have ended do not matter. Raises `RunError` as `queue` does."""
    for part in _chunks(jobs):
        _output(["scancel", *part], _SECONDS)


def signal(jobs: Sequence[str], name: str) -> None:
    """Send a signal to the processes of running jobs, but not to their batch scripts. Raises `RunError` as `queue`
    does."""
    for part in _chunks(jobs):
        _output(["scancel", f"--signal={name}", *part], _SECONDS)


def _chunks(jobs: Sequence[str]) -> list[Sequence[str]]:
    return [jobs[first : first + _CHUNK] for first in range(0, len(jobs), _CHUNK)]


def _output(command: Sequence[str], seconds: float) -> str:
    done = _run(command, seconds)
    if done.returncode and not any(message in done.stderr for message in _ENDED):
        raise RunError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise RunError(f"there is no {command[0]} on this machine, and the job is SLURM's") from None
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} did not answer within {seconds} s: is the controller running?") from error
    except OSError as error:
        raise RunError(f"{command[0]} cannot be run: {error.strerror}") from error
