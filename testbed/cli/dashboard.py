"""`testbed dashboard`, and what serves a run of `testbed up`: the same page, and Prometheus metrics."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.cli import completion
from testbed.cli.arguments import DEFAULT_RUNS, Runs, located
from testbed.errors import BadInputError
from testbed.host import die_with_parent, run_module
from testbed.traits import is_simulated
from testbed.watching.hosts import HOST

if TYPE_CHECKING:
    import socket
    import subprocess

    from testbed.plan import Plan
    from testbed.run.up import Options
    from testbed.rundir.directory import RunDirectory

_NICE = 10
"""A run in real time goes first, but a page that gets nothing at all on a busy host helps nobody."""
_STOP_TIMEOUT_SECONDS = 10.0
"""What the page's process has to show the last of the run."""

Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Dashboard port (0: any free port).")
]
# Of `testbed up`:
Page = Annotated[bool, typer.Option("--dashboard", help="Also show the run on a page in the browser.")]
PagePort = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Dashboard port (default: any free port).")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics on this port (0: any free)."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Make the command known."""
    app.command("dashboard")(_dashboard)


def _dashboard(
    runs_to_show: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run ids or run directories (default: list all).",
            autocompletion=completion.runs,
        ),
    ] = None,
    port: Port = 0,
    runs: Runs = DEFAULT_RUNS,
    descriptor: Annotated[int | None, typer.Option("--descriptor", hidden=True)] = None,
) -> None:
    """Show runs in the browser, live or finished, alone or side by side; Ctrl-C stops it."""
    if descriptor is not None:
        from testbed.rundir.directory import RunDirectory

        _serve(descriptor, [RunDirectory(Path(run)) for run in runs_to_show or []], runs)
        return
    named = [located(run, runs) for run in runs_to_show or []]
    if not named and not runs.is_dir():
        raise BadInputError(f"there is no folder {runs}: name one with --runs, or name a run")
    with _page(named, port, typer.echo, runs=runs) as page:
        raise typer.Exit(page.wait())


def _serve(descriptor: int, named: Sequence[RunDirectory], runs: Path) -> None:
    # A busy host could disturb those in real time; virtual time does not mind.
    if not named or not all(is_simulated(run.read_manifest().get("runtime")) for run in named):
        lower_priority()
    import socket

    from testbed.dashboard import server  # Bokeh and pandas: two seconds

    server.serve(socket.socket(fileno=descriptor), server.Site(named, runs.resolve()))


def lower_priority() -> None:
    """Be the last to get a CPU, in a session of our own: the kernel may share it among sessions first
    (autogroup), and niceness counts among the processes of one."""
    with suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


def check_ports(options: Options) -> None:
    """Raises BadInputError where a port is taken: better before there is a run directory."""
    for port, option in ((options.dashboard, "--port"), (options.metrics, "--metrics-port")):
        if port:
            _bound(port, option).close()


@contextmanager
def served(
    directory: RunDirectory, plan: Plan, options: Options, report: Callable[[str], None]
) -> Iterator[None]:
    """Inside, what `options` request of page and metrics is there. Raises BadInputError where a port is
    taken."""
    with ExitStack() as stack:
        if options.metrics is not None:
            from testbed.watching import prometheus

            url = stack.enter_context(prometheus.served(directory, options.metrics))
            report(f"Metrics for Prometheus: {url}")
        if options.dashboard is not None:
            # Not on the devices' CPUs: there a page would take what they were promised.
            cpus, log = plan.infrastructure_cpus, directory.logs / "dashboard.log"
            runs = directory.path.parent
            page = _page([directory], options.dashboard, report, runs=runs, cpus=cpus, log=log)
            stack.enter_context(page)
        yield


@contextmanager
def _page(
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
    import subprocess
    from urllib.parse import urlencode

    with _bound(port) as listening, ExitStack() as stack:
        query = urlencode([("run", directory.run) for directory in named])
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        report(f"Dashboard: {address}{f'run?{query}' if query else ''}")
        arguments = [*(str(directory.path) for directory in named), "--runs", str(runs)]
        dashboard = run_module.command("testbed", "dashboard", *arguments)
        page = subprocess.Popen(
            [*die_with_parent.prefix(cpus), *dashboard, "--descriptor", str(listening.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log is None else stack.enter_context(log.open("ab")),
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C is for us, who end it in order
        )
    try:
        yield page
    finally:
        page.terminate()  # it shows the end of the run first
        try:
            page.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()


def _bound(port: int, option: str = "--port") -> socket.socket:
    """A socket that listens on `port` of the loopback interface (0: a free one). Raises BadInputError,
    which names the `option`."""
    import socket

    try:
        return socket.create_server((HOST, port), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise BadInputError(
            f"{option} {port}: {reason}. Choose another one, or 0 for one that is free"
        ) from error
