"""Trackers in separate processes, for a live run or a finished one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import RunFailedError
from testbed.host import die_with_parent, run_module

if TYPE_CHECKING:
    from testbed.rundir.directory import RunDirectory

_PATIENCE_SECONDS = 30.0
"""Time of the trackers after the end of the run to send the remaining figures."""


@contextmanager
def tracking_run(
    names: Sequence[str], directory: RunDirectory, cpus: str, report: Callable[[str], None]
) -> Iterator[None]:
    """Send the run while the `with` block runs, by a process per tracker on the cpuset `cpus` (empty:
    any). After the block, all have `_PATIENCE_SECONDS` together. `report` gets the result of each."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name in names:
            output = stack.enter_context(_log(directory, name).open("wb"))
            processes[name] = subprocess.Popen(
                [*die_with_parent.prefix(cpus), *_command(name, directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: it is ended in order below
            )
        try:
            yield
        finally:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            for name, process in processes.items():
                report(
                    f"{name}: {_finish_tracker(name, process, directory, deadline - time.monotonic())}"
                )


def _finish_tracker(
    name: str, process: subprocess.Popen[bytes], directory: RunDirectory, seconds: float
) -> str:
    """Wait at most `seconds`, then end the process. Return a text on its result."""
    from testbed.host import subprocesses
    from testbed.rundir.directory import last_log_lines

    again = f"`testbed export {directory.run} --to {name}` sends the run again"
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return f"not finished within {_PATIENCE_SECONDS:.0f} s of the end of the run; {again}"
    finally:
        subprocesses.end(process)
    log = _log(directory, name)
    last = (last_log_lines(log, 1) or [f"see {log}"])[-1]
    return last if code == 0 else f"{last}; {again}. See {log}"


def send(name: str, directory: RunDirectory, *, model: bool) -> str:
    """Return when the run is over, with a text that says where it is found. Raises RunFailedError."""
    from testbed.rundir.directory import last_log_lines

    command = [*_command(name, directory), *(["model"] if model else [])]
    with _log(directory, name).open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    last = (last_log_lines(_log(directory, name), 1) or [""])[-1]
    if done.returncode:
        raise RunFailedError(f"sending the run to {name} failed: {last}. See {_log(directory, name)}")
    return last


def _command(name: str, directory: RunDirectory) -> list[str]:
    return run_module.command("testbed.tracking", name, str(directory.path))


def _log(directory: RunDirectory, name: str) -> Path:
    return directory.log(f"tracker-{name}")
