"""Fork server: a process that imports modules once and forks programs.

    testbed.host.forkserver SOCKET VARIABLE MODULE...

A program is the function `main` of a module. It runs as with `programs.py MODULE ARGUMENT`: in its own
session, on its own CPUs, with its own log. It ends when the fork server ends, and the fork server ends
when the controller ends. No module may start a thread when it is imported, because only the forking
thread exists in a fork. Linux only.

`multiprocessing`'s fork server needs twice the memory and three times as long per program, skips modules
that it cannot import, and runs the user's main module in each program.

Other processes find a fork by its environment, like a program that was started in the usual way. The
kernel shows the environment block with which the fork server was started. In that block, the value of
one variable has room for the longest program name, and each fork writes its own name into its copy of
the block.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from agents.process import freeze, without_garbage_collection
from testbed.errors import HostError
from testbed.host import programs
from testbed.host.cpus import cpu_numbers
from testbed.host.processes import last_lines

AVAILABLE = sys.platform == "linux"
NAME = "fork.server"
"""Value of the variable in the fork server itself. In a fork, the value is the name of the fork's
program."""
_CONTINUE_SECONDS = 1.0
"""Seconds without an answer of the fork server after which it is continued."""
_PR_SET_NAME = 15
_MESSAGE_BYTES = 2**16
_ENV_START, _ENV_END = 47, 48
"""Indices in /proc/PID/stat, counted from the field after the program's name."""


class ForkServer:
    """Use it only from one thread, which must live as long as the run."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], name: str, room: int):
        """`modules`: to import once. `environment`: of all forks. `name`: environment variable that has
        a different value in each fork. `room`: maximum length of that value in bytes."""
        self.modules = tuple(modules)
        self._codes: dict[int, int] = {}
        self._gone = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = f"{theirs.fileno()}", name, *modules
        with theirs:
            self._process = subprocess.Popen(
                [*programs.tied_prefix(), *programs.command(__name__, *own)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**environment, name: NAME.ljust(room)},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, module: str, argument: str, *, name: str, cpus: str, log: int) -> ForkedProgram:
        """The first call waits until the modules are imported.

        `module`: module of the program. `argument`: its only command-line argument. `name`: value of the
        environment variable whose name was given to `__init__`. `cpus`: cpuset of the fork. `log`: file
        descriptor for the fork's output. Raises HostError if the modules cannot be imported, and OSError
        if no more processes are possible.
        """
        try:
            order = {"module": module, "argument": argument, "name": name, "cpus": cpus}
            socket.send_fds(self._socket, [json.dumps(order).encode()], [log])
            self._await_message()
            while not (answer := self._receive(0)).keys() & {"pid", "error"}:
                self._await_message()
        except (OSError, EOFError) as error:
            self._process.wait()
            raise HostError(
                f"the process that starts the others ended with exit code {self._process.returncode}:\n"
                f"{last_lines(self._log)}"
            ) from error
        if "error" in answer:
            raise OSError(*answer["error"])
        return ForkedProgram(self, answer["pid"])

    def code(self, pid: int) -> int | None:
        """Return the exit code as `subprocess.Popen` does; None while the fork is running."""
        with suppress(BlockingIOError, EOFError):
            while not self._gone:
                self._receive(socket.MSG_DONTWAIT)
        return self._codes.get(pid, -signal.SIGKILL if self._gone else None)

    def wait(self, pid: int) -> int:
        """Return the exit code."""
        while (code := self.code(pid)) is None:
            self._await_message()
        return code

    def _await_message(self) -> None:
        """Continue the fork server if somebody has stopped it: a run could not be removed otherwise."""
        while not select.select([self._socket], [], [], _CONTINUE_SECONDS)[0]:
            self._process.send_signal(signal.SIGCONT)

    def _receive(self, flags: int) -> dict[str, Any]:
        """Raises EOFError if the fork server has ended, and BlockingIOError if no message has arrived
        and `flags` forbid waiting."""
        try:
            data = self._socket.recv(_MESSAGE_BYTES, flags)
        except ConnectionResetError:
            data = b""
        self._gone = not data
        if self._gone:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        if "codes" in message:
            codes = {int(pid): code for pid, code in message["codes"].items()}
            self._codes |= codes
            with suppress(OSError):  # the fork server has ended, so its forks are reaped anyway
                self._socket.send(json.dumps({"reap": [*codes]}).encode())
        return message

    def close(self) -> None:
        """Forks are killed, too. Further calls do nothing."""
        self._process.kill()
        self._process.wait()
        with suppress(EOFError, BlockingIOError):
            while not self._gone:
                self._receive(socket.MSG_DONTWAIT)
        self._gone = True
        self._socket.close()
        self._log.close()


class ForkedProgram(psutil.Process):
    """Has the interface of `psutil.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        super().__init__(pid)  # the process exists, perhaps as a zombie: only the fork server reaps it
        self._server = server

    def poll(self) -> int | None:
        return self._server.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """`timeout` is ignored, because callers end the program before they wait."""
        return self._server.wait(self.pid)

    def send_signal(self, sig: int) -> None:
        """If the program has ended, do nothing, like `Popen`."""
        with suppress(psutil.NoSuchProcess):
            super().send_signal(sig)


def main() -> None:
    """Run the fork server. In a fork, run the fork's program."""
    number, variable, *modules = sys.argv[1:]
    with without_garbage_collection():
        for module in modules:
            importlib.import_module(module)
        gc.collect()
        freeze()  # garbage collection in forks does not write to shared memory
    order = _serve(socket.socket(fileno=int(number)), variable)
    if order is not None:
        importlib.import_module(order["module"]).main()


def _serve(orders: socket.socket, variable: str) -> dict[str, Any] | None:
    """End with the controller, or when SIGTERM was received and all forks have ended. In a fork, return
    the order that the fork has to carry out. In the fork server, return None."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    caught = signal.SIGCHLD, signal.SIGTERM
    for number in caught:
        signal.signal(number, lambda *_: None)
    me, living, ending = os.getpid(), set[int](), False
    while not (ending and not living):
        ready, _, _ = select.select([orders.fileno(), woken], [], [])
        if woken in ready:
            ending |= signal.SIGTERM in os.read(woken, _MESSAGE_BYTES)
            codes = dict(_ended_forks(living))
            living -= codes.keys()
            if codes:
                orders.send(json.dumps({"codes": codes}).encode())
        if orders.fileno() not in ready:
            continue
        data, files, _, _ = socket.recv_fds(orders, _MESSAGE_BYTES, 1)
        if not data:
            return None
        order: dict[str, Any] = json.loads(data)
        for pid in order.get("reap", ()):
            os.waitpid(pid, 0)
        if "module" not in order:
            continue
        begun, begins = os.pipe()
        try:
            pid = os.fork()
            answer: dict[str, Any] = {"pid": pid}
        except OSError as error:
            answer = {"error": error.args}
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in caught:
                    signal.signal(number, signal.SIG_DFL)
                _become(order, files[0], me, variable)
                orders.close()
                for descriptor in (woken, wakes, begun, begins):
                    os.close(descriptor)
                return order
            living.add(pid)
        os.close(begins)
        os.read(begun, 1)  # wait until the fork has its name, and ends with this process
        for descriptor in (begun, *files):
            os.close(descriptor)
        orders.send(json.dumps(answer).encode())
    return None


def _ended_forks(living: set[int]) -> Iterator[tuple[int, int]]:
    """Yield process and exit code. A fork is reaped only when the controller knows that it has ended.
    Until then, no other process can get the fork's id."""
    for pid in living:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            killed = found.si_code != os.CLD_EXITED
            yield pid, -found.si_status if killed else found.si_status


def _become(order: Mapping[str, Any], log: int, parent: int, variable: str) -> None:
    """Set a fork up like a new process: session, CPUs, log, name, random numbers, arguments."""
    os.setsid()
    programs.die_with_parent(parent)
    os.sched_setaffinity(0, cpu_numbers(order["cpus"]) or os.sched_getaffinity(0))
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    _rename(variable, order["name"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python reseeds its own generator after a fork; torch's seed is fixed
    sys.argv = [str(sys.modules[order["module"]].__file__), order["argument"]]


def _rename(variable: str, name: str) -> None:
    """Other processes see the new value, too."""
    os.environ[variable] = name
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    block = b"\0" + ctypes.string_at(start, end - start)
    mark = f"\0{variable}=".encode()
    at = block.index(mark) + len(mark)
    room = block.index(b"\0", at) - at
    ctypes.memmove(start + at - 1, name.encode().ljust(room)[:room], room)


if __name__ == "__main__":
    main()
