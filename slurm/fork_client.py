"""`python fork_client.py SOCKET -u -m MODULE ARGUMENT ...`: as `python -m MODULE ARGUMENT ...`, in a process that the
fork server of this socket forks. Only the standard library is imported: that is what makes it quick."""

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def main(address: str, arguments: list[str]) -> int:
    """The exit code of the process; below 0, the signal that it died of."""
    umask = os.umask(0o077)
    os.umask(umask)
    directory = os.getcwd()  # noqa: PTH109 (without the time that pathlib takes)
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": directory, "umask": umask}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        output = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        data = json.dumps(request).encode() + b"\n"
        sent = server.sendmsg([data], output)
        if rest := data[sent:]:  # a short process may have ended by now, and nobody would listen
            server.sendall(rest)
        with server.makefile("r") as answers:
            first = answers.readline()
            if not first:
                raise SystemExit("the fork server has ended: fork_server.log says why")
            pid = int(first)
            for number in FORWARDED:
                if signal.getsignal(number) != signal.SIG_IGN:  # submitit's processes ignore Ctrl-C
                    signal.signal(number, lambda received, _: os.kill(pid, received))
            return int(answers.readline() or 1)


if __name__ == "__main__":
    place, unbuffered, module_follows, *rest = sys.argv[1:]
    code = main(place, rest)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
