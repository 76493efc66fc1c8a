"""Machines that are this host: as it is, or with commands put into an engine's namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.platforms.machine import Completed

CHECKOUT = Path(__file__).parent.parent.parent
ENVIRONMENT = ".venv"
"""Folder of the Python environment that `make` makes."""
_TIMED_OUT = 124


@dataclass(slots=True)
class LocalMachine:
    """This host, which runs the checkout that this module belongs to."""

    prefix: Sequence[str] = ()
    """Command that runs the command after it, elsewhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that replace this process's."""
    python: Path = field(default_factory=lambda: Path(sys.executable))
    """The Python of an environment with the project's dependencies."""
    clone: Path | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    slowness: float = 1.0

    def command(self, command: str) -> list[str]:
        """The arguments of a process that runs `command` (bash) on this machine."""
        return [*self.prefix, "bash", "-c", command]

    def variables(self) -> dict[str, str]:
        """The environment of commands. The checkout comes before the installed packages."""
        path = f"{self.python.parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), **self.environment}

    def run(self, command: str, *, timeout: float) -> Completed:
        """Run `command`; see `Machine.run`. All processes of its session end with it."""
        begin = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                self.command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=CHECKOUT,
                env=self.variables(),
                start_new_session=True,
            )
            try:
                code = process.wait(timeout * self.slowness)
            except subprocess.TimeoutExpired:
                code = _TIMED_OUT
            finally:
                _end(process)
            output.seek(0)
            return Completed(code, output.read().decode(errors="replace"), time.monotonic() - begin)


def set_up(python: str, clone: Path, prefix: Sequence[str] = ()) -> None:
    """Clone the checkout's last commit to `clone` and set it up as `make demo` does, with `python`.

    `prefix` is a command that runs the command after it, elsewhere. Raises RuntimeError, with the last
    lines, if that fails.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PIP_NO_CACHE_DIR"] = "1"  # some builds of PyTorch have gigabytes
    for command in (
        ("git", "clone", "--quiet", str(CHECKOUT), str(clone)),
        (*prefix, "make", "-C", str(clone), f"PYTHON={python}", f"{ENVIRONMENT}/.installed"),
    ):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise RuntimeError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{last}")


def _end(process: subprocess.Popen[bytes], grace: float = 30.0) -> None:
    """End the process group that `process` leads, by SIGTERM, after `grace` seconds by SIGKILL."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
