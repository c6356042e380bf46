"""A process that has imported torch and the rest once, and forks the processes of jobs: they begin at once.

To import everything takes longer than the small items of `make reproduce`. The queue of this machine starts one server,
and submitit starts `fork_client.py` in place of Python: the client hands its arguments, environment, folder and output
over, waits, and ends as the forked process does. Whoever kills the client kills the process, too.

Only for jobs without GPUs: a process that is forked from one that has asked CUDA for its devices cannot use them.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.program import begin

CLIENT = Path(__file__).with_name("fork_client.py")
_REQUEST_BYTES = 1 << 20


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
        """What to call in place of Python, for a shell."""
        # Without site-packages: the client is there at once.
        return shlex.join([sys.executable, "-I", "-S", str(CLIENT), self._address])

    def close(self) -> None:
        """Let the server end when its last job has."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass
class _Child:
    """A process, and the client that waits for it; `orphaned` once that has been killed."""

    pid: int
    pidfd: int
    client: socket.socket
    orphaned: bool = False


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each client, until stdin ends and no process is left."""
    for module in modules:
        importlib.import_module(module)
    begin()  # of the processes: Ctrl-C is an exception in them
    gc.collect()
    gc.freeze()  # what is there stays shared with the processes
    running: set[int] = set()
    is_open = True
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, ("stdin", None))
        selector.register(listener, selectors.EVENT_READ, ("client", None))
        while is_open or running:
            for key, _ in selector.select():
                event, child = key.data
                if event == "stdin":
                    selector.unregister(key.fileobj)
                    selector.unregister(listener)
                    is_open = False
                    break  # the listener may be among the events
                if event == "client":
                    child = _fork(listener.accept()[0], [selector, listener])
                    if child is None:
                        continue
                    running.add(child.pid)
                    selector.register(child.pidfd, selectors.EVENT_READ, ("process has ended", child))
                    selector.register(child.client, selectors.EVENT_READ, ("client has ended", child))
                elif event == "process has ended":
                    running.remove(child.pid)
                    selector.unregister(child.pidfd)
                    if not child.orphaned:
                        selector.unregister(child.client)
                    _report_end(child)
                elif child.pid in running:  # a client says nothing after its request: it has been killed
                    child.orphaned = True
                    selector.unregister(child.client)
                    os.kill(child.pid, signal.SIGKILL)


def _fork(client: socket.socket, private: list[Any]) -> _Child | None:
    """Start what the client asks for; None if it has been killed, as one may be while the server imports."""
    descriptors = array.array("i")
    try:
        data = _receive(client, descriptors)
        if data is None:
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            for one in (client, *private):
                one.close()
            _run(json.loads(data), list(descriptors))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    child = _Child(pid, os.pidfd_open(pid), client)
    try:
        client.sendall(f"{pid}\n".encode())
    except OSError:
        os.kill(pid, signal.SIGKILL)  # nobody waits for it
        _report_end(child)
        return None
    return child


def _receive(client: socket.socket, descriptors: array.array[int]) -> bytes | None:
    """The client's request, a line, and the descriptors that come with it; None if the client ends before."""
    try:
        data, ancillary, _, _ = client.recvmsg(_REQUEST_BYTES, socket.CMSG_SPACE(3 * descriptors.itemsize))
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        while not data.endswith(b"\n"):
            more = client.recv(_REQUEST_BYTES)
            if not more:
                return None
            data += more
    except OSError:
        return None
    return data


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the process that was asked for; does not return."""
    code = 1
    try:
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        os.umask(request["umask"])
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


def _report_end(child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pidfd)
    try:
        child.client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    except OSError:
        pass  # the client was killed first
    finally:
        child.client.close()


if __name__ == "__main__":
    number, *wanted = sys.argv[1:]
    with socket.socket(fileno=int(number)) as opened:
        serve(opened, wanted)
