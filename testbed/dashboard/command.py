"""`testbed dashboard`, and the page of `testbed up --dashboard`, which has a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from testbed import fleet, tether
from testbed.arguments import DEFAULT_RUNS, Runs
from testbed.errors import BadInputError
from testbed.rundir import RunDirectory

HOST = "127.0.0.1"
"""Of this machine, for this machine."""
_NICE = 19
"""The run goes first."""
_GOODBYE = 10.0
"""Seconds that the page's process has to show the last of the run."""

Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the page; 0: a free one.")]


def add_to(app: typer.Typer) -> None:
    """Make the command known."""
    app.command("dashboard")(_dashboard)


def _dashboard(
    runs_to_show: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Run ids or run directories; else all of the folder."),
    ] = None,
    port: Port = 0,
    runs: Runs = DEFAULT_RUNS,
    descriptor: Annotated[int | None, typer.Option("--descriptor", hidden=True)] = None,
) -> None:
    """Show runs in the browser, live or over, one or several side by side; Ctrl-C ends it."""
    with suppress(OSError):
        os.nice(_NICE)
    if descriptor is not None:  # beside its controller: there may be no more than the directory yet
        named = [RunDirectory(Path(run)) for run in runs_to_show or []]
        listening = socket.socket(fileno=descriptor)
    else:
        named = [fleet.located(run, runs) for run in runs_to_show or []]
        if not named and not runs.is_dir():
            raise BadInputError(f"there is no folder {runs}: name one with --runs, or name a run")
        listening = bound(port)
        typer.echo(f"Dashboard: {address(listening, named)}  (Ctrl-C ends it)")
    from testbed.dashboard import server  # Bokeh and pandas: two seconds, in which the URL can be read

    server.serve(listening, server.Site(named, runs.resolve()))


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
def beside(directory: RunDirectory, port: int, cpus: str, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the page of the run is served by a process that gives way to all others, on `cpus` (a
    cpuset; empty: any). It ends with us, however we end. Raises BadInputError where `port` is taken."""
    with bound(port) as listening:
        say(f"Dashboard: {address(listening, [directory])}")
        served = _start(directory, listening, cpus)
    try:
        yield
    finally:
        served.terminate()  # it shows the end of the run first
        try:
            served.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            served.kill()
            served.wait()


def _start(directory: RunDirectory, listening: socket.socket, cpus: str) -> subprocess.Popen[bytes]:
    allowed = cpus or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    descriptor = listening.fileno()
    tied = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), allowed, "--"]
    page = [sys.executable, "-m", "testbed", "dashboard", str(directory.path)]
    directory.logs.mkdir(parents=True, exist_ok=True)
    with (directory.logs / "dashboard.log").open("ab") as log:
        return subprocess.Popen(
            [*tied, *page, "--descriptor", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor,),
            start_new_session=True,  # Ctrl-C is the controller's: it ends us when the run is over
        )
