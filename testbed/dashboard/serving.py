"""Processes of the dashboard's page, and Prometheus metrics."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import BadInputError
from testbed.host import programs
from testbed.host.processes import interrupting
from testbed.rundir.directory import RunDirectory
from testbed.traits import is_simulated
from testbed.watching.hosts import HOST

if TYPE_CHECKING:
    from testbed.plan import Plan
    from testbed.run.options import Options

_NICE = 10
"""Below a run in real time, but with some CPU on a busy host."""
_STOP_TIMEOUT_SECONDS = 30.0


def main(descriptor: str, runs: str, *named: str) -> None:
    """Serve `named`, or the folder `runs`, on the inherited socket `descriptor`."""
    directories = [RunDirectory(Path(one)) for one in named]
    # The page must not disturb runs in real time. Virtual time cannot be disturbed.
    if not named or not all(is_simulated(run.read_manifest().get("runtime")) for run in directories):
        lower_priority()
    from testbed.dashboard import first_page

    listening = socket.socket(fileno=int(descriptor))
    visible = first_page.VisibleRuns(directories, Path(runs).resolve())
    with first_page.served(listening, visible):
        from testbed.dashboard import web_server  # importing Bokeh and pandas takes two seconds
    web_server.serve(listening, web_server.Site(visible))


def lower_priority() -> None:
    """The session's priority is lowered, too: the kernel may divide CPU time among sessions first
    (autogroup), and niceness only counts within a session."""
    with suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


def check_ports(options: Options) -> None:
    """Raise BadInputError if a port is in use, before the run directory is created."""
    for port, option in ((options.dashboard, "--port"), (options.metrics, "--metrics-port")):
        if port:
            _listen(port, option).close()


@contextmanager
def serve_run(
    directory: RunDirectory, plan: Plan, options: Options, report: Callable[[str], None]
) -> Iterator[None]:
    """Raises BadInputError if a port is in use."""
    with ExitStack() as stack:
        if options.metrics is not None:
            from testbed.watching import prometheus

            url = stack.enter_context(prometheus.serve_metrics(directory, options.metrics))
            report(f"Metrics for Prometheus: {url}")
        if options.dashboard is not None:
            # Not on the devices' CPUs, because the page would take CPU time from them.
            cpus, log = plan.infrastructure_cpus, directory.logs / "dashboard.log"
            runs = directory.path.parent
            page = serve_page([directory], options.dashboard, report, runs=runs, cpus=cpus, log=log)
            stack.enter_context(page)
        yield


@contextmanager
def serve_page(
    named: Sequence[RunDirectory],
    port: int,
    report: Callable[[str], None],
    *,
    runs: Path,
    cpus: str = "",
    log: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the page of the runs `named`, or of all in the folder `runs` if it is empty.

    The page's process has a lower priority than runs in real time, and ends with this process, even if
    that is killed. `cpus`: cpuset; empty for any CPU. `log`: file for errors; None for this process's
    stderr.

    Raises BadInputError if `port` is in use.
    """
    from urllib.parse import urlencode

    with _listen(port) as listening, ExitStack() as stack:
        query = urlencode([("run", directory.run) for directory in named])
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        report(f"Dashboard: {address}{f'run?{query}' if query else ''}")
        arguments = [str(listening.fileno()), str(runs), *(str(directory.path) for directory in named)]
        command = programs.command("testbed.dashboard.serving", *arguments)
        page = subprocess.Popen(
            [*programs.tied_prefix(cpus), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log is None else stack.enter_context(log.open("ab")),
            pass_fds=(listening.fileno(),),
            start_new_session=True,  # Ctrl-C does not reach the page's process, which ends below
        )
    try:
        yield page
    finally:
        page.terminate()  # the page shows the end of the run before its process ends
        try:
            page.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()


def _listen(port: int, option: str = "--port") -> socket.socket:
    """Listen on the loopback interface, on any free port if `port` is 0. The BadInputError for a port in
    use names `option`."""
    try:
        return socket.create_server((HOST, port), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise BadInputError(
            f"{option} {port}: {reason}. Choose another port, or 0 for any free port"
        ) from error


if __name__ == "__main__":
    with suppress(KeyboardInterrupt), interrupting():
        main(*sys.argv[1:])
