"""The server behind `nursery.python()`: forks itself for each command that `tests.nursery_client` asks for.

The fork is then as good as a process that `python ARGUMENTS` has started and that has imported torch and the rest: it
leads a session of its own and runs the script, module or text as `__main__`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import nursery
from tests.job import ROOT


def serve(address: str, alive: Any) -> None:
    """Answer at `address`, until whoever holds the other end of `alive` closes it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        alive.send("listening")
        selector.register(alive, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ, lambda: _accept(listener, selector))
        while True:
            for key, _ in selector.select():
                if key.fileobj is alive:
                    return
                key.data()


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    """Fork for a client, and watch both: the fork for its end, the client for signals and its own."""
    client = listener.accept()[0]
    text, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    request = json.loads(text)
    pid = os.fork()
    if pid == 0:
        _become(request, files)
    for file in files:
        os.close(file)
    process = os.pidfd_open(pid)

    def ended() -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # the client may be gone
            client.send(json.dumps(code).encode())
        for watched in (client, process):
            if watched in selector.get_map():
                selector.unregister(watched)
        client.close()
        os.close(process)

    def spoke() -> None:
        if number := client.recv(1):
            signal.pidfd_send_signal(process, number[0])
        else:
            selector.unregister(client)
            with contextlib.suppress(ProcessLookupError):  # it may have no session of its own yet
                os.killpg(pid, signal.SIGKILL)
            signal.pidfd_send_signal(process, signal.SIGKILL)

    selector.register(process, selectors.EVENT_READ, ended)
    selector.register(client, selectors.EVENT_READ, spoke)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """In the fork: be the process that was asked for, to its end."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    arguments = request["arguments"]
    unbuffered = arguments[0] == "-u"
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  these three are open for the process's life
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=unbuffered)
    sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.chdir(request["folder"])
    nursery.born(request["environment"])
    current_process().daemon = False  # the server is one; this may have children of its own
    code = _status(lambda: _run(arguments[unbuffered:]))
    threading._shutdown()
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        output.flush()
    os._exit(code)  # the interpreter's own end takes all modules down first: more than a second


def _run(arguments: list[str]) -> None:
    first, *rest = arguments
    module = sys.modules["__main__"] = ModuleType("__main__")
    folder = Path(first).parent.absolute() if not first.startswith("-") else Path.cwd()
    own = {str(ROOT), str(ROOT / "launch")}  # pytest's
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(folder), *filter(None, given), *(path for path in sys.path if path not in own)]
    if first == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # runpy warns of what is imported already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = arguments
        module.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), module.__dict__)


def _status(run: Callable[[], None]) -> int:
    """The exit status that the interpreter gives what was run."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0
