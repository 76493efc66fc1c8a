"""What serves runs: the page, by a process of its own, and Prometheus metrics."""

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
from testbed.host import die_with_parent, run_module
from testbed.host.signals import interrupting
from testbed.rundir.directory import RunDirectory
from testbed.traits import is_simulated
from testbed.watching.hosts import HOST

if TYPE_CHECKING:
    from testbed.plan import Plan
    from testbed.run.options import Options

_NICE = 10
"""A run in real time goes first, but a page that gets nothing at all on a busy host helps nobody."""
_STOP_TIMEOUT_SECONDS = 10.0
"""What the page's process has to show the last of the run."""


def main(descriptor: str, runs: str, *named: str) -> None:
    """Serve the runs in the directories `named` (none: all in the folder `runs`) on an inherited socket:
    `python -m testbed.dashboard.serving`."""
    directories = [RunDirectory(Path(one)) for one in named]
    # A busy host could disturb those in real time; virtual time does not mind.
    if not named or not all(is_simulated(run.read_manifest().get("runtime")) for run in directories):
        lower_priority()
    from testbed.dashboard import web_server  # Bokeh and pandas: two seconds

    web_server.serve(
        socket.socket(fileno=int(descriptor)), web_server.Site(directories, Path(runs).resolve())
    )


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
            page = served_page([directory], options.dashboard, report, runs=runs, cpus=cpus, log=log)
            stack.enter_context(page)
        yield


@contextmanager
def served_page(
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
    from urllib.parse import urlencode

    with _bound(port) as listening, ExitStack() as stack:
        query = urlencode([("run", directory.run) for directory in named])
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        report(f"Dashboard: {address}{f'run?{query}' if query else ''}")
        arguments = [str(listening.fileno()), str(runs), *(str(directory.path) for directory in named)]
        command = run_module.command("testbed.dashboard.serving", *arguments)
        page = subprocess.Popen(
            [*die_with_parent.prefix(cpus), *command],
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
    try:
        return socket.create_server((HOST, port), backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise BadInputError(
            f"{option} {port}: {reason}. Choose another one, or 0 for one that is free"
        ) from error


if __name__ == "__main__":
    with suppress(KeyboardInterrupt), interrupting():
        main(*sys.argv[1:])
