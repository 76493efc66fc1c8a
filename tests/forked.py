"""`testbed` commands that are forked from a process which has imported the program once.

    python -m tests.forked SOCKET      the process that forks; the tests start it, and it ends with them

A command that starts in the usual way spends more than a second of CPU time on imports. A forked
command has its own process id, session, arguments, environment, working directory, standard streams and
first folder of `sys.path`. Tests of the start itself use `running.TESTBED`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

import testbed.__main__ as program
from agents.imports import without_garbage_collection

_ROOT = Path(__file__).parent.parent
_MODULES = (
    "testbed.cli.main",
    "testbed.api.launching",
    "testbed.api.running",
    "testbed.broker.identity",
    "testbed.fidelity.table",
    "testbed.relay.main",
    "testbed.run.controller",
    "testbed.run.optimum",
    "testbed.runtimes.docker.runtime",
    "testbed.runtimes.process.runtime",
    "testbed.virtual.run",
    "testbed.watching.live",
    "analysis.load",
    "analysis.summary",
)
"""What most commands import. None of it starts a thread, which a fork would not have, except OpenBLAS,
which then starts it again."""
_MESSAGE_BYTES = 2**18


def build_command_line_once() -> None:
    """Keep what Typer makes of the functions of the commands, which takes 0.1 s with each call."""
    mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)).start()


class _Server:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        """Return the process id of a new fork."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], streams)
            while (pid := self._receive(None)) is None:
                pass
        return pid

    def status(self, pid: int, seconds: float) -> int | None:
        """Return the status of a fork that has ended, as `os.waitpid` does; None if it still runs after
        so many seconds."""
        with self._lock:
            while pid not in self._codes and select.select([self._socket], [], [], seconds)[0]:
                self._receive(seconds)
            return self._codes.get(pid)

    def _receive(self, seconds: float | None) -> int | None:
        """Take the next message; return the process id if it tells of a new fork."""
        message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            raise RuntimeError(f"tests.forked ended with exit code {self._process.wait()}")
        told = json.loads(message)
        self._codes |= {int(pid): status for pid, status in told.get("codes", {}).items()}
        pid: int | None = told.get("pid")
        return pid


_server: _Server | None = None
"""Started with the first command, by each process that runs tests."""


class Command(subprocess.Popen[str]):
    """A forked `testbed` command; its arguments are those after `testbed`."""

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
        env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, *_: Any,
    ) -> None:  # fmt: skip
        global _server
        if _server is None:
            _server = _Server()
        order = {
            "arguments": args,
            "folder": str(Path.cwd() if cwd is None else cwd),
            "environment": dict(os.environ if env is None else env),
        }
        self.pid = _server.fork(order, [p2cread, c2pwrite, errwrite])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and _server is not None:
            status = _server.status(self.pid, 0)
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        assert _server is not None
        status = _server.status(self.pid, 0 if wait_flags else 0.1)
        return (0, 0) if status is None else (self.pid, status)


def main() -> None:
    """Fork on order until the tests end. In a fork, be the command."""
    with without_garbage_collection():
        for module in _MODULES:
            importlib.import_module(module)
        build_command_line_once()
        typer.main.get_command(sys.modules["testbed.cli.main"].app)
        gc.collect()
        gc.freeze()  # garbage collection in forks does not write to shared memory
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        program.main()


def _serve(orders: socket.socket) -> bool:
    """Return True in a fork, False in this process once the tests have ended."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([orders.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, _MESSAGE_BYTES)
            if codes := _ended():
                with suppress(OSError):  # the tests have ended, too
                    orders.send(json.dumps({"codes": codes}).encode())
        if orders.fileno() not in ready:
            continue
        data, streams, _, _ = socket.recv_fds(orders, _MESSAGE_BYTES, 3)
        if not data:
            return False
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os.close(woken)
            os.close(wakes)
            _become(json.loads(data), streams)
            return True
        orders.send(json.dumps({"pid": pid}).encode())
        for stream in streams:
            os.close(stream)


def _ended() -> dict[int, int]:
    """Return the statuses of the forks that have ended."""
    found = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _become(order: dict[str, Any], streams: list[int]) -> None:
    """Make this fork like a new process, with Ctrl-C as the shell gives it to a command."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    sys.argv = [str(program.__file__), *order["arguments"]]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = _stream(0, "r", unbuffered=False)
    sys.stdout = _stream(1, "w", unbuffered=unbuffered)
    sys.stderr = _stream(2, "w", unbuffered=True, errors="backslashreplace")


def _stream(number: int, mode: str, *, unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    size = 0 if unbuffered else -1
    stream = open(number, f"{mode}b", size, closefd=False)  # noqa: SIM115  # for the whole process
    return io.TextIOWrapper(
        stream, errors=errors, write_through=unbuffered, line_buffering=os.isatty(number)
    )


if __name__ == "__main__":
    main()
