"""Commands on real devices, by the system's `ssh` with the user's own keys and configuration.

Each command is the same short loader, which reads the program (`agents/remote/program.py`), a request
and files from its standard input, so no secret is in an argument. What a device prints is not trusted:
it is bounded, and control characters are escaped before it is shown.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from agents.texts import make_printable
from testbed import bundle
from testbed.errors import HostError, from_os_error
from testbed.host import programs

OLDEST_PYTHON = (3, 9)
T = TypeVar("T")
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no"),
    *("-o", "ControlMaster=no"),  # else a background process of ssh may hold our pipes open
)
_LOADER = (
    f'import sys; v=sys.version_info[:2]; v<{OLDEST_PYTHON} and sys.exit("old python %d.%d" % v); '
    "s=sys.stdin.buffer; exec(s.read(int(s.readline())))"
)
_PROGRAM = bundle.AGENTS / "remote" / "program.py"
_FIRST_BYTES = 64 * 1024
"""Maximum output of the device's shell before the program answers."""
_END_SECONDS = 5.0
"""Seconds for a command to end after its output."""
_LINE_BYTES = 256 * 1024
"""Maximum length of an answer."""
_SHOWN_CHARACTERS = 2_000
_ADVICE = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: find out why, and if that is "
     "in order, remove the old key with ssh-keygen -R HOST"),
    ("Host key verification failed", "its host key is not known: run ssh {0} once, and compare the key"),
    ("Permission denied", "it accepts none of your keys: run ssh-copy-id {0}, or ssh-add"),
    ("Could not resolve hostname", "its name is unknown: correct it, or add it to ~/.ssh/config"),
    ("Connection refused", "no SSH server listens there: start one, or correct the port"),
    ("timed out", "it does not answer: is it on, and on this network?"),
    ("No route to host", "it does not answer: is it on, and on this network?"),
)  # fmt: skip
"""Texts in ssh's error output, with what they mean and what to do."""


@dataclass(frozen=True, slots=True)
class SshTarget:
    host: str
    python: str = "python3"
    """Python interpreter there, as its shell finds it."""

    @property
    def command(self) -> list[str]:
        return [*ssh_program(), *_OPTIONS, "--", self.host, f"{self.python} -c {shlex.quote(_LOADER)}"]


def ssh_program() -> list[str]:
    """TESTBED_SSH may name another program, with options."""
    return shlex.split(os.environ.get("TESTBED_SSH", "ssh"))


@dataclass(slots=True)
class Channel:
    process: subprocess.Popen[bytes]
    source: IO[bytes]
    sink: IO[bytes]

    def read_answer(self) -> dict[str, Any]:
        """Next line of JSON. Raises HostError if there is none."""
        line = self.source.readline(_LINE_BYTES)
        if not line:
            raise HostError("the connection broke")
        return parse(line)


@dataclass(slots=True)
class Connections:
    """All commands of one run or check, so that they can be ended together."""

    cpus: str = ""
    """cpuset of the local processes; empty for the CPUs of this process."""
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def close(self) -> None:
        """End all running commands, and refuse new ones."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def reopen(self) -> None:
        """Allow commands again, as for the removal."""
        self._is_closed = False

    @contextmanager
    def channel(
        self,
        target: SshTarget,
        verb: str,
        request: Mapping[str, Any],
        files: Sequence[tuple[str, Path | bytes]] = (),
        timeout: float | None = 60.0,
    ) -> Iterator[Channel]:
        """Run `verb` of the program, in a context with its pipes. `files`: name and content to send.
        `timeout`: seconds after which the command is killed; None for no limit. Raises HostError that
        names the host, the cause and the mend."""
        sizes = [
            (name, len(one) if isinstance(one, bytes) else one.stat().st_size) for name, one in files
        ]
        token = secrets.token_hex(16)
        head = {**request, "verb": verb, "token": token, "files": sizes}
        program = _PROGRAM.read_bytes()
        with tempfile.TemporaryFile() as errors:
            process = self._spawn(target, errors)
            killer = threading.Timer(timeout or 0.0, process.kill)
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018
            try:
                if timeout is not None:
                    killer.daemon = True
                    killer.start()
                with suppress(BrokenPipeError):  # the reason is in the error output
                    process.stdin.write(
                        b"%d\n%b%b\n" % (len(program), program, json.dumps(head).encode())
                    )
                    for _, content in files:
                        if isinstance(content, bytes):
                            process.stdin.write(content)
                        else:
                            with content.open("rb") as file:
                                while chunk := file.read(2**20):
                                    process.stdin.write(chunk)
                    process.stdin.flush()
                if not _skip_to(token.encode() + b"\n", process.stdout):
                    raise HostError(self._reason(target, process, errors))
                try:
                    yield Channel(process, process.stdout, process.stdin)
                except BrokenPipeError as error:
                    raise HostError(f"{target.host}: the connection broke") from error
            except HostError as error:
                text = str(error)
                raise HostError(
                    text if text.startswith(target.host) else f"{target.host}: {text}"
                ) from None
            finally:
                killer.cancel()
                process.kill()
                with suppress(OSError):
                    process.stdin.close()
                process.stdout.close()
                process.wait()
                with self._lock:
                    self._running.discard(process)

    def call(
        self,
        target: SshTarget,
        verb: str,
        request: Mapping[str, Any],
        files: Sequence[tuple[str, Path | bytes]] = (),
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        """Return the answer to `verb`. Raises HostError."""
        with self.channel(target, verb, request, files, timeout) as channel:
            found = channel.read_answer()
            if "failure" in found:
                raise HostError(f"{target.host}: {shown(str(found['failure']))}")
            return found

    def _spawn(self, target: SshTarget, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise HostError(f"{target.host}: the run is ending")
            process = subprocess.Popen(
                [*programs.tied_prefix(self.cpus), *target.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def _reason(self, target: SshTarget, process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
        """Why the command has not answered, and what to do. Kills it unless it has ended."""
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return (
                f"{target.host}: it prints more than {_FIRST_BYTES // 1024} KiB before the program "
                "answers: look at what its shell prints at login, and at the interpreter"
            )
        errors.seek(0)
        text = errors.read(_FIRST_BYTES).decode("utf-8", "replace").strip()
        for sign, advice in _ADVICE:
            if process.returncode == 255 and sign in text:
                return f"{target.host}: {advice.format(target.host)} (ssh: {shown(text)[-300:]})"
        if process.returncode == 127 or "not found" in text:
            return f"{target.host}: it has no {target.python}: install it, or name another with python"
        if "old python" in text:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            return (
                f"{target.host}: {target.python} is version {shown(text.rpartition('python ')[2])}, "
                f"expected at least {oldest}: name another with python"
            )
        if self._is_closed:
            return f"{target.host}: the run is ending"
        printed = shown(text) or "no output"
        return f"{target.host}: ssh ended with exit code {process.returncode}: {printed}"


def parse(line: bytes) -> dict[str, Any]:
    """Object in a line from a device. Raises HostError."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    raise HostError(f"it answered {shown(line)}")


def _skip_to(token: bytes, source: IO[bytes]) -> bool:
    """Read lines up to `token`, which follows what the device's shell prints at login."""
    left = _FIRST_BYTES
    while left > 0 and (line := source.readline(left)):
        if line == token:
            return True
        left -= len(line)
    return False


def shown(text: str | bytes) -> str:
    """Text from a device, bounded and without control characters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return make_printable(text, _SHOWN_CHARACTERS, keep="\n")


def in_parallel(tasks: Mapping[str, Callable[[], T]]) -> dict[str, T | HostError]:
    """Call `tasks`, by device or host, in parallel, each in a thread of its own. Return their results or
    errors, in the order of the tasks. Any error in a task is one: what it was to do is not done."""
    found: dict[str, T | HostError] = {}

    def run(name: str, task: Callable[[], T]) -> None:
        try:
            found[name] = task()
        except HostError as error:
            found[name] = error
        except OSError as error:
            found[name] = HostError(f"{name}: {from_os_error(error)}")
        except Exception as error:  # noqa: BLE001  (a device may answer anything)
            found[name] = HostError(f"{name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in tasks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in tasks}


def errors_of(found: Mapping[str, object]) -> list[HostError]:
    return [one for one in found.values() if isinstance(one, HostError)]
