"""`testbed dashboard`, and the page of `testbed up --dashboard`, which has a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated
from urllib.parse import urlencode

import typer

from testbed.cli.arguments import DEFAULT_RUNS, Runs
from testbed.errors import BadInputError
from testbed.host import die_with_parent
from testbed.run import live_runs
from testbed.rundir.directory import RunDirectory
from testbed.traits import is_simulated

HOST = "127.0.0.1"
"""Of this machine, for this machine."""
_NICE = 10
"""A run in real time goes first, but a page that gets nothing at all on a busy host helps nobody."""
_GOODBYE = 10.0
"""Seconds that the page's process has to show the last of the run."""

Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Dashboard port (0: any free port).")
]


def add_to(app: typer.Typer) -> None:
    """Make the command known."""
    app.command("dashboard")(_dashboard)


def _dashboard(
    runs_to_show: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Run ids or run directories (default: list all)."),
    ] = None,
    port: Port = 0,
    runs: Runs = DEFAULT_RUNS,
    descriptor: Annotated[int | None, typer.Option("--descriptor", hidden=True)] = None,
) -> None:
    """Show runs in the browser, live or finished, alone or side by side; Ctrl-C stops it."""
    if descriptor is not None:
        _serve(descriptor, [RunDirectory(Path(run)) for run in runs_to_show or []], runs)
        return
    named = [live_runs.located(run, runs) for run in runs_to_show or []]
    if not named and not runs.is_dir():
        raise BadInputError(f"there is no folder {runs}: name one with --runs, or name a run")
    with beside(named, port, typer.echo, runs=runs) as page:
        raise typer.Exit(page.wait())


def _serve(descriptor: int, named: Sequence[RunDirectory], runs: Path) -> None:
    if not named or any(map(_emulated, named)):
        give_way()
    from testbed.dashboard import server  # Bokeh and pandas: two seconds

    server.serve(socket.socket(fileno=descriptor), server.Site(named, runs.resolve()))


def _emulated(directory: RunDirectory) -> bool:
    """Whether a busy host could disturb it: virtual time does not mind."""
    return not is_simulated(directory.read_manifest().get("runtime"))


def give_way() -> None:
    """Be the last to get a CPU, in a session of our own: the kernel may share it among sessions first
    (autogroup), and niceness counts among the processes of one."""
    with suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


def bound(port: int, option: str = "--port") -> socket.socket:
    """A socket that listens on `port` of the loopback interface (0: a free one). Raises BadInputError,
    which names the `option`."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise BadInputError(
            f"{option} {port}: {error.strerror}. Choose another one, or 0 for one that is free"
        ) from error
    return listening


def address(listening: socket.socket, runs: Sequence[RunDirectory]) -> str:
    """Where a browser finds these runs; none of them: the list."""
    query = urlencode([("run", directory.run) for directory in runs])
    return f"http://{HOST}:{listening.getsockname()[1]}/" + (f"run?{query}" if query else "")


@contextmanager
def beside(
    named: Sequence[RunDirectory],
    port: int,
    report: Callable[[str], None],
    *,
    runs: Path,
    cpus: str = "",
    log: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, the page of these runs (none: of all in the folder `runs`) is served by a process that
    gives way to runs in real time, on `cpus` (a cpuset; empty: any). It ends with us, however we end,
    and logs errors to `log`, else to our own stderr.

    Raises BadInputError where `port` is taken.
    """
    with bound(port) as listening, ExitStack() as stack:
        report(f"Dashboard: {address(listening, named)}")
        errors = None if log is None else stack.enter_context(log.open("ab"))
        page = _start(named, runs, listening, cpus, errors)
    try:
        yield page
    finally:
        page.terminate()  # it shows the end of the run first
        try:
            page.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()


def _start(
    named: Sequence[RunDirectory],
    runs: Path,
    listening: socket.socket,
    cpus: str,
    errors: IO[bytes] | None,
) -> subprocess.Popen[bytes]:
    descriptor = listening.fileno()
    arguments = [*(str(directory.path) for directory in named), "--runs", str(runs)]
    dashboard = [sys.executable, "-m", "testbed", "dashboard", *arguments]
    return subprocess.Popen(
        [*die_with_parent.prefix(cpus), *dashboard, "--descriptor", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(descriptor,),
        start_new_session=True,  # Ctrl-C is for us, who end it in order
    )
