"""`python fork_client.py SOCKET -u -m MODULE ARGUMENT ...`: as `python -m MODULE ARGUMENT ...`, in a process that the
fork server of this socket forks. Only the standard library is imported: that is what makes it quick."""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
OUT_OF_MEMORY = "; this is usually the system, out of memory (dmesg shows it)"


def main(address: str, arguments: list[str]) -> int:
    """The exit code of the process; below 0, the signal that it died of."""
    directory = os.getcwd()  # noqa: PTH109 (without the time that pathlib takes)
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": directory}
    with socket.socket(socket.AF_UNIX) as server, server.makefile("r") as answers:
        server.connect(address)
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        first = answers.readline()
        if not first:
            raise SystemExit("the fork server has ended: fork_server.log says why")
        pid = int(first)
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # submitit's processes ignore Ctrl-C
                signal.signal(number, lambda received, _: os.kill(pid, received))
        last = answers.readline()
        if not last:
            os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"the fork server was killed{OUT_OF_MEMORY}")
        return int(last)


if __name__ == "__main__":
    place, unbuffered, module_follows, *rest = sys.argv[1:]
    code = main(place, rest)
    if code < 0:
        number = signal.Signals(-code)
        killed = number == signal.SIGKILL
        print(f"ended by signal {-code} ({number.name}){OUT_OF_MEMORY if killed else ''}", file=sys.stderr, flush=True)
        if not killed:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(code)
