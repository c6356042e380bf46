"""The server that forks the processes of jobs, and the client that replaces Python."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT, wait_for

from slurm import fork_server
from slurm.fork_server import ForkServer

WORK = """
import os, sys, time
import preloaded
print(os.getpid(), preloaded.PID, os.environ.get("COLOUR"), os.getcwd(), sys.argv[1:], flush=True)
match sys.argv[1:]:
    case ["exit", code]:
        sys.exit(int(code))
    case ["message"]:
        sys.exit("what is wrong")
    case ["raise"]:
        raise OSError("broken")
    case ["sleep"]:
        time.sleep(60)
"""
PRELOADED = """
import os, time
PID = os.getpid()
pidfd_open = os.pidfd_open
def slow(pid):  # a busy system: a process could run before its client knows of it
    time.sleep(0.1)
    return pidfd_open(pid)
os.pidfd_open = slow
"""

pytestmark = pytest.mark.skipif(not fork_server.is_possible(), reason="this system has no pidfd_open")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    one = ForkServer(["preloaded"], {"PYTHONPATH": path}, str(tmp_path), tmp_path / "server.log")
    yield one
    one.close()
    one._process.wait(120)


def start(server, *arguments, **options):
    command = [*shlex.split(server.python()), "-u", "-m", "work", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid, server):
    wait_for(lambda: not is_alive(pid), server._process)


def test_a_process_has_its_clients_arguments_environment_folder_and_output(server, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    process = start(server, "a b", "c", env={**os.environ, "COLOUR": "red"}, cwd=tmp_path / "elsewhere")
    output, errors = process.communicate(timeout=120)
    pid, preloading, *rest = output.split(" ", 2)
    assert rest == [f"red {tmp_path / 'elsewhere'} ['a b', 'c']\n"]
    assert pid != preloading == str(server._process.pid), "the server has imported it"
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["exit", "0"], 0, ""), (["exit", "144"], 144, ""), (["message"], 1, "what is wrong"), (["raise"], 1, "OSError")],
)
def test_a_client_ends_as_its_process(server, arguments, code, message):
    process = start(server, *arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert message in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signals_are_forwarded(server, number):
    process = start(server, "sleep")
    pid = int(process.stdout.readline().split()[0])
    process.send_signal(number)
    assert process.wait(120) == -number
    wait_for_end(pid, server)


def test_a_process_that_is_killed_is_reported_with_its_signal_and_what_it_means(server):
    process = start(server, "sleep")
    os.kill(int(process.stdout.readline().split()[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert errors == "ended by signal 9 (SIGKILL); this is usually the system, out of memory (dmesg shows it)\n"


def test_a_process_ends_with_the_attendant_that_reports_its_end(server):
    """As when the system, out of memory, chooses the attendant."""
    process = start(server, "sleep")
    pid = int(process.stdout.readline().split()[0])
    attendant = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(attendant, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, "the fork server was killed" in errors) == (1, True)
    wait_for_end(pid, server)


def test_a_process_ends_with_its_client(server):
    process, other = start(server, "sleep"), start(server, "sleep")
    pid, other_pid = (int(one.stdout.readline().split()[0]) for one in (process, other))
    process.kill()
    wait_for_end(pid, server)
    assert is_alive(other_pid)
    other.kill()


def test_clients_that_are_killed_before_they_have_asked_do_no_harm(server):
    """One says nothing, one half of its request; another one is served as if they had not been."""
    address = shlex.split(server.python())[-1]
    for said in (b"", b'{"arguments": '):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(said)
    process = start(server, "exit", "3")
    process.communicate(timeout=120)
    assert process.returncode == 3


def test_the_server_ends_after_its_last_process(server):
    process = start(server, "sleep")
    pid = int(process.stdout.readline().split()[0])
    server.close()
    time.sleep(0.2)
    assert server._process.poll() is None
    assert is_alive(pid)
    process.kill()
    assert server._process.wait(120) == 0


def test_a_server_that_cannot_start_is_named(tmp_path):
    one = ForkServer(["no_such_module"], {"PYTHONPATH": str(ROOT)}, str(tmp_path), tmp_path / "server.log")
    process = start(one, "exit", "0")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "fork_server.log" in errors or "Connection" in errors
    assert "No module named 'no_such_module'" in (tmp_path / "server.log").read_text()
    assert sys.executable in one.python()
    one.close()
