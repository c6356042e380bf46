"""A process that has imported torch and the rest once, and forks the processes of jobs: they begin at once.

To import everything takes longer than the small items of `make reproduce`. The queue of this machine starts one server,
and submitit starts `fork_client.py` in place of Python: the client hands its arguments, environment, folder and output
over, waits, and ends as the forked process does. Whoever kills the client kills the process, too.

`multiprocessing`'s fork server does not serve here: it runs the code and the main module of the process that starts it,
not the snapshot's, and it starts functions, where submitit wants a command whose end and signals it controls.

Only for jobs without GPUs: a process that is forked from one that has asked CUDA for its devices cannot use them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).with_name("fork_client.py")


def is_possible() -> bool:
    """Whether this system has what the server needs (Linux 5.3 and later)."""
    return hasattr(os, "pidfd_open")


class ForkServer:
    """The server's process, as the queue sees it. It ends after `close`, or the end of the queue, and its last job."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], directory: str, log: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twell-")  # private; names of sockets must be short
        self._address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
            listener.bind(self._address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slurm.fork_server", str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                cwd=directory,
                start_new_session=True,  # Ctrl-C is for the queue, which decides
            )

    def python(self) -> str:
        """The command that stands in for Python, for a shell."""
        # Without site-packages: the client is there at once.
        return shlex.join([sys.executable, "-I", "-S", str(CLIENT), self._address])

    def close(self) -> None:
        """Let the server end when its last job has."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()


# --- the server -------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork an attendant for each client, until stdin ends and no attendant is left."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is there stays shared with the processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps attendants
    end = sys.stdin.fileno()
    while end not in select.select([end, listener.fileno()], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                attend(client)
            finally:
                os._exit(0)
        client.close()
    listener.close()
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all of them, since SIGCHLD is ignored


def attend(client: socket.socket) -> None:
    """Start the process that a client asks for, and tell the client how it ends; kill it when the client ends first."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, *_ = socket.recv_fds(client, 1, 3)
    with client.makefile("r") as lines:
        request = lines.readline()
    if not request.endswith("\n"):  # the client has been killed
        return
    is_known, make_known = os.pipe()
    pid = os.fork()
    if pid == 0:
        client.close()
        os.close(make_known)
        if not os.read(is_known, 1):  # the attendant has been killed, and the client does not know whom to kill
            os._exit(1)
        os.close(is_known)
        _run(json.loads(request), descriptors)
    for descriptor in (is_known, *descriptors):
        os.close(descriptor)
    process = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # of a client or a process that has been killed meanwhile
        client.sendall(f"{pid}\n".encode())
        os.write(make_known, b"\0")
    if process not in select.select([process, client.fileno()], [], [])[0]:  # a client says nothing after its request
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = request["arguments"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (as Python itself does at the end of a program)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    number, *names = sys.argv[1:]
    with socket.socket(fileno=int(number)) as opened:
        serve(opened, names)
