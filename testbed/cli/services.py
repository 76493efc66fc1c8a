"""What stands beside a run of `testbed up`: its page, and its figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from testbed.cli import dashboard as dashboard
from testbed.plan import Plan
from testbed.run.up import Options
from testbed.rundir.directory import RunDirectory

Page = Annotated[bool, typer.Option("--dashboard", help="Also show the run on a page in the browser.")]
Port = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Dashboard port (default: any free port).")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics on this port (0: any free)."
    ),
]


def chosen(page: bool, port: int | None) -> int | None:  # noqa: FBT001
    """The port of the page: to name one is to ask for the page."""
    return 0 if page and port is None else port


def check(options: Options) -> None:
    """Raises BadInputError where a port is taken: better before there is a run directory."""
    for port, option in ((options.dashboard, "--port"), (options.metrics, "--metrics-port")):
        if port:
            dashboard.bound(port, option).close()


@contextmanager
def served(
    directory: RunDirectory, plan: Plan, options: Options, report: Callable[[str], None]
) -> Iterator[None]:
    """Inside, what `options` ask for is there. Raises BadInputError where a port is taken."""
    with ExitStack() as stack:
        if options.metrics is not None:
            from testbed.watching import prometheus

            url = stack.enter_context(prometheus.served(directory, options.metrics))
            report(f"Metrics for Prometheus: {url}")
        if options.dashboard is not None:
            # Not on the devices' CPUs: there a page would take what they were promised.
            page = dashboard.beside(
                [directory],
                options.dashboard,
                report,
                runs=directory.path.parent,
                cpus=plan.infrastructure_cpus,
                log=directory.logs / "dashboard.log",
            )
            stack.enter_context(page)
        yield
