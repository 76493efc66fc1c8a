"""Programs of ours that are forked from a process which has imported them once.

    python -m tests.forked SOCKET      the process that forks, a child of the one that starts programs

In a process that called `use`, `subprocess.Popen` forks `python -m testbed` and what
`programs.command` names, also after `ssh_servers.in_network_of`. Otherwise each program would spend
one to three seconds of CPU time on imports. A forked program is a child of the process that starts it,
and has its own session, arguments, environment, working directory, standard streams and perhaps network,
which other processes see, too. It also starts programs in this way. Whoever tests the start itself
starts `running.TESTBED` by a process that did not call `use`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import typer.main

import testbed.__main__ as program
from agents.process import exit_now, freeze, without_garbage_collection
from testbed.host import programs
from testbed.plan.agent_configs import THREAD_VARIABLES

_ROOT, _PYTHON = Path(__file__).parent.parent, sys.executable
_PATH = os.environ.get("PYTHONPATH", "")
_MODULES = (
    "testbed.cli.main",
    "testbed.api.launching",
    "testbed.api.run_process",
    "testbed.api.running",
    "testbed.broker.access",
    "testbed.fidelity.table",
    "testbed.host.forkserver",
    "testbed.relay.main",
    "testbed.run.controller",
    "testbed.run.optimum",
    "testbed.runtimes.docker.runtime",
    "testbed.runtimes.process.runtime",
    "testbed.sweeps.worker",
    "testbed.user_code.inspection_process",
    "testbed.virtual.run",
    "testbed.virtual.slices",
    "testbed.watching.live",
    "agents.aggregator.main",
    "agents.client.main",
    "agents.client.training",
    "analysis.load",
    "analysis.summary",
)
"""What most programs import. None of it starts a thread, which a fork would not have, as libraries are
told to use a single one."""
_MESSAGE_BYTES = 2**18
_ROOM = 2**16
"""Bytes for the arguments of a forked program, and for its environment."""
_HIGH = 900
"""File descriptors from here on belong to this module: programs are given lower ones by number."""
_MOST_DESCRIPTORS = 16
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""Number of the system call; None where it is not known here."""
_CLONE_PARENT = 0x8000
_CLONE_NEWNET = 0x40000000
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)
"""Indices in /proc/PID/stat of start and end, counted from the field after the program's name."""


def build_command_line_once() -> None:
    """Keep what Typer makes of the functions of the commands, which takes 0.1 s with each call."""
    mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)).start()


@contextmanager
def use() -> Iterator[None]:
    """Fork our programs until the context ends, in all threads of this process."""
    with mock.patch.object(subprocess, "Popen", Popen):
        yield


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, by which our programs are forked."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
        env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        order = _order(args, environment)
        if order is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
            )  # fmt: skip
            return
        order |= {
            "folder": str(Path.cwd() if cwd is None else cwd),
            "environment": environment,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        streams = [given if given >= 0 else i for i, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _server().fork(order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _order(args: Any, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what is to be forked; None if the program is not ours, or has to be started as usual."""
    threads = any(environment.get(name, "1") != "1" for name in THREAD_VARIABLES)
    customize = _customization(environment.get("PYTHONPATH"))
    if threads or customize is None or _CLONE is None or not isinstance(args, list):
        return None
    order: dict[str, Any] = {"parent": None, "cpus": None, "network": None, "customize": customize}
    if args[:1] == ["nsenter"] and args[2:3] == ["--net"]:
        order["network"] = int(args[1].removeprefix("--target="))
        args = args[3:]
    if args[:4] == [_PYTHON, "-I", "-S", programs.__file__]:
        order |= {"parent": int(args[4]), "cpus": [*map(int, args[5].split(","))]}
        args = args[7:]
    order["command"] = args
    match args:
        case [python, "-m", "testbed", *arguments] if python == _PYTHON:
            return order | {"module": None, "arguments": arguments}
        case [python, "-P", programs.__file__, module, *arguments] if python == _PYTHON:
            return order | {"module": module, "arguments": arguments}
    return None


def _customization(path: str | None) -> str | None:
    """Return the folder that PYTHONPATH has before those that the tests have; empty for none. A forked
    program runs the `sitecustomize` there, as a new one does. None if PYTHONPATH differs otherwise."""
    if (path or "") == _PATH:
        return ""
    folder, _, rest = (path or "").partition(os.pathsep)
    return folder if rest == _PATH and Path(folder, "sitecustomize.py").is_file() else None


class _Server:
    """The process that forks, as the process that starts programs sees it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lock = end, threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process id of a new program."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError("tests.forked has ended")
        return int(answer)

    def close(self) -> None:
        self._socket.close()


_of_this_process: _Server | None = None


def _server() -> _Server:
    """Return what forks for this process, which starts with the first program of the tests."""
    global _of_this_process
    if _of_this_process is None:
        ours, theirs = _pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), " " * _ROOM],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env={
                    **os.environ,
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    "PYTHONPATH": _PATH,
                    "ROOM": " " * _ROOM,
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _of_this_process = _Server(ours)
        atexit.register(process.wait, 10)
        atexit.register(_of_this_process.close)
    return _of_this_process


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets with file descriptors from `_HIGH` on."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    high = [socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _HIGH)) for end in pair]
    for end in pair:
        end.close()
    return high[0], high[1]


def main() -> NoReturn:
    """Fork on order until the process that starts programs ends. In a fork, be the program."""
    global _of_this_process
    orders = socket.socket(fileno=int(sys.argv[1]))
    with without_garbage_collection():
        for module in _MODULES:
            importlib.import_module(module)
        build_command_line_once()
        typer.main.get_command(sys.modules["testbed.cli.main"].app)
        gc.collect()
        freeze()  # garbage collection in forks does not write to shared memory
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        if pid := _fork_sibling():
            orders.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        orders.close()
        order = json.loads(data)
        if order["network"] is not None:
            _enter_network(order["network"])
        ours, orders = _pair()
        if os.fork() == 0:  # this process forks what the program starts
            ours.close()
            os.closerange(3, _HIGH)
            continue
        orders.close()
        _of_this_process = _Server(ours)
        _become(order, descriptors)


def _fork_sibling() -> int:
    """Fork this process for its parent, whose child the fork is."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return pid


def _enter_network(process: int) -> None:
    """Move this process, whose only thread this is, into the network of `process`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _become(order: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Make this fork like a new process, with Ctrl-C as the shell gives it to a command, and run the
    program."""
    if order["parent"] is not None:
        programs.die_with_parent(order["parent"])
        os.sched_setaffinity(0, order["cpus"])
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH) for one in descriptors]
    os.closerange(0, _HIGH)
    for mine, number in zip(high, order["descriptors"], strict=True):
        os.dup2(mine, number)
        os.close(mine)
    os.environ.clear()
    os.environ.update(order["environment"])
    _show(_ARGUMENTS, order["command"])
    _show(_ENVIRONMENT, [f"{name}={value}" for name, value in order["environment"].items()])
    os.chdir(order["folder"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = _stream(0, "r", unbuffered=False)
    sys.stdout = _stream(1, "w", unbuffered=unbuffered)
    sys.stderr = _stream(2, "w", unbuffered=True, errors="backslashreplace")
    mock.patch.object(subprocess, "Popen", Popen).start()
    try:
        if order["customize"]:
            runpy.run_path(str(Path(order["customize"], "sitecustomize.py")))
        if order["module"] is None:
            sys.path[0] = order["folder"]
            sys.argv = [str(program.__file__), *order["arguments"]]
            program.main()
        else:
            sys.modules.pop(order["module"], None)
            sys.argv = [programs.__file__, order["module"], *order["arguments"]]
            programs.run_module()
        _exit(0)
    except SystemExit as ended:
        _exit(ended.code)
    except BaseException:  # noqa: BLE001  # Python prints what nobody handles
        traceback.print_exc()
        _exit(1)


def _exit(code: str | int | None) -> NoReturn:
    """End this process like `sys.exit`, but do not delete all objects, which takes 0.3 s of CPU time."""
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    exit_now(1 if isinstance(code, str) else code or 0)


def _show(where: tuple[int, int], texts: Sequence[str]) -> None:
    """Have other processes see these arguments, or this environment."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = (int(fields[index]) for index in where)
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)
    if len(data) > end - start:
        raise ValueError(f"{len(data)} bytes, there is room for {end - start}")
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _stream(number: int, mode: str, *, unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    size = 0 if unbuffered else -1
    stream = open(number, f"{mode}b", size, closefd=False)  # noqa: SIM115  # for the whole process
    return io.TextIOWrapper(
        stream, errors=errors, write_through=unbuffered, line_buffering=os.isatty(number)
    )


if __name__ == "__main__":
    main()
