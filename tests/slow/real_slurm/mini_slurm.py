"""A real SLURM for tests: munged, slurmctld and two slurmd on this machine, as the current user, in one folder.

It needs Debian's packages slurmctld, slurmd, slurm-client and munge, but no systemd, no cgroups, no database and no
network besides loopback. Only processes that were started here are ever signalled.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where Debian has the daemons
# The node names are addresses, so that a process group finds its master without any change to /etc/hosts.
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 4  # of each node; they may be more than the machine has
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
{listen}
# cred_expire is also how long a requeued job has to wait, by default two minutes; less than 5 s is not taken.
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PropagateResourceLimits=NONE
ReturnToService=2
FirstJobId={first_job}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
# From SIGTERM to SIGKILL: a checkpoint of the test's model is written in far less.
KillWait=10
CompleteWait=0
JobRequeue=1
SlurmdTimeout=6
# Jobs of "main" evict those of "scavenge". These get SIGTERM at once, and are requeued at the end of GraceTime.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=off
PartitionName=scavenge Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=requeue GraceTime=20
"""


def missing_programs() -> list[str]:
    """What of SLURM is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]


class MiniSlurm:
    """The cluster; `environment` is what its clients need."""

    def __init__(self, folder: Path) -> None:
        assert len(str(folder)) < 80, f"{folder} is too long for the path of a socket"
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SYSTEM_PATH}
        self._daemons: dict[str, subprocess.Popen] = {}

    # --- starting and stopping ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, and wait until both nodes take jobs."""
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755 if name == "munge" else 0o700)
        self.folder.chmod(0o755)  # munged refuses folders that others may write to
        self._start_munge()
        (self.folder / "slurm.conf").write_text(self._configuration())
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        states = ("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        wait_until(lambda: {*self.output(*states, check=False).split()} == {"idle"}, 30, "idle nodes")

    def _configuration(self) -> str:
        ports = _free_ports(3)
        host = socket.gethostname().partition(".")[0]
        # Where the machine's own name is on loopback, the daemons can be told to listen there only.
        local = _address(host).startswith("127.")
        return CONFIGURATION.format(
            folder=self.folder,
            host=host,
            user=subprocess.check_output(["id", "-un"], text=True).strip(),
            listen="CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" if local else "",
            first_job=1000 + secrets.randbelow(50_000_000),
            port=ports[0],
            node_ports=f"{ports[1]}-{ports[2]}",
            cpus=CPUS,
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", *options)
        self._wait_for("munged", (folder / "socket").exists)

    def start_controller(self) -> None:
        """Start slurmctld, with the jobs that it knew when it ended."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait_for("slurmctld", lambda: "is UP" in self.output("scontrol", "ping", check=False))

    def stop_controller(self) -> None:
        """End slurmctld; jobs go on without it."""
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        """Start one slurmd."""
        self._start(f"slurmd.{node}", "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """What a power cut does: slurmd, the jobs' processes and their children, all at once and without a word."""
        doomed = self._steps(node)
        self._end(f"slurmd.{node}", signal.SIGKILL)
        for pid in reversed(doomed):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _steps(self, node: str) -> list[int]:
        """Every process of the node's jobs, and the slurmstepd above them, which has left slurmd's process tree."""
        found = dict.fromkeys(self._with_environment(SLURMD_NODENAME=node))
        for pid in list(found):
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                    found[parent] = None
        return list(found)

    def processes(self, job: str) -> list[int]:
        """The processes of a job's tasks; srun, which starts them, has their command among its arguments, too."""
        found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self._with_environment(SLURM_JOB_ID=job)}
        return [pid for pid, line in found.items() if b"submitit.core._submit" in line and not line.startswith(b"srun")]

    def _with_environment(self, **variables: str) -> list[int]:
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        wanted.add(f"SLURM_CONF={self.folder / 'slurm.conf'}".encode())
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted.issubset((process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
        return found

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        if "slurmctld" in self._daemons:
            jobs = self.output("squeue", "-h", "-o", "%A", check=False).split()
            if jobs:
                self.output("scancel", "--signal=KILL", "--full", *jobs, check=False)
                self.output("scancel", *jobs, check=False)
                with contextlib.suppress(TimeoutError):
                    wait_until(lambda: not self.output("squeue", "-h", check=False).strip(), 15, "end of all jobs")
        for name in sorted(self._daemons, key=lambda name: name == "munged"):
            self._end(name, signal.SIGTERM)

    def _start(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=SYSTEM_PATH)
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait_for(self, name: str, condition: Callable[[], bool]) -> None:
        """Raises `TimeoutError`, with what the daemon said, when the condition does not become true."""
        try:
            wait_until(lambda: condition() or self._daemons[name].poll() is not None, 60, name)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self._said_by(name)}") from None
        if self._daemons[name].poll() is not None:
            raise RuntimeError(f"{name} ended with {self._daemons[name].returncode}: {self._said_by(name)}")

    def _said_by(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")[-2000:]

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._daemons.pop(name)
        process.send_signal(number)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # --- asking -------------------------------------------------------------------------------------------------------

    def output(self, *command: str, check: bool = True) -> str:
        """What a client program says."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=check, timeout=60)
        return done.stdout


def wait_until(condition, seconds: float, what: str) -> None:
    """Raises `TimeoutError` when the condition does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds} s")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Neighbouring ports that are free right now."""
    for first in range(20000, 30000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""
