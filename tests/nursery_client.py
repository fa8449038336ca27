"""Stands for a fork of the nursery where a command is wanted: nursery_client.py SERVER COMMAND PYTHON ARGUMENTS...

The process is made by the server (`tests.nursery_python`) with this one's arguments, environment, folder, input and
outputs. This one hands on signals, and ends as that one does; when it is killed, so is that one.
"""

import json
import os
import signal
import socket
import sys

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    server, command, python, *arguments = sys.argv[1:]
    if not understood(arguments):
        os.execv(python, [python, *arguments])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    environment = {**os.environ, "PYTHON_EXEC": command}  # what torchrun starts ranks with: they are forks, too
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": environment})
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    answer = connection.recv(16)
    if not answer:
        sys.exit("the nursery has ended")
    end_as(json.loads(answer))


def understood(arguments: list[str]) -> bool:
    """Whether a fork can be what these arguments ask for: options of the interpreter itself come too late for it."""
    rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


def end_as(code: int) -> None:
    """Exit with this status, or by this signal if negative."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
