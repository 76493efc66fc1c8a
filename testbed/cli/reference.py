"""Commands that concern no run: rules, tasks, profiles, this host, the images."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from testbed.cli.arguments import AsJson
from testbed.console import out, print_json, print_text, table

if TYPE_CHECKING:
    from testbed.cli.catalog import Entry

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="The one to explain (default: list all).")
]
_PANEL = "Reference"


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    for command in (schema, rules, tasks, profiles, calibrate, doctor):
        app.command(rich_help_panel=_PANEL)(command)
    images = typer.Typer(no_args_is_help=True, help="Images for devices and broker.")
    images.command()(build)
    images.command()(prune)
    app.add_typer(images, name="images", rich_help_panel=_PANEL)


def schema() -> None:
    """Print the JSON Schema of a topology, for editors."""
    from testbed.topology import json_schema

    print_json(json_schema())


def rules(name: Name = None, as_json: AsJson = False) -> None:
    """List the aggregation rules, or explain one: paper, equation, parameters."""
    from testbed.cli import catalog

    _show_catalog(catalog.rules(), "rule", name, as_json)


def tasks(name: Name = None, as_json: AsJson = False) -> None:
    """List the learning tasks, or explain one: dataset, parameters."""
    from testbed.cli import catalog

    _show_catalog(catalog.tasks(), "task", name, as_json)


def profiles(name: Name = None, as_json: AsJson = False) -> None:
    """List device profiles and link classes, or explain one: figures and their sources."""
    from testbed.topology import profiles

    known = profiles.load(Path())
    shown = known if name is None else known.only(name)
    if as_json:
        print_json(profiles.rows(shown))
    else:
        print_text(profiles.listing(shown) if name is None else profiles.explained(shown))
        if shown.devices:
            print_text(f"\n{profiles.EMULATED}")


def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of this host's cores, which turns device profiles into CPU shares."""
    from testbed.plan import calibration

    found = calibration.calibrate(refresh=force)
    if as_json:
        print_json(found.as_dict())
    else:
        print_text(found.summary())


def doctor(as_json: AsJson = False) -> None:
    """Check what this host can do, and show commands that fix what it cannot."""
    from testbed.cli.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    shown = table(["", "what", "found", "fix"])
    for finding in findings:
        mark = Text(finding.status, style=colours[finding.status])
        shown.add_row(mark, finding.name, finding.detail, finding.fix or "")
    out.print(shown)


def build(
    force: Annotated[bool, typer.Option("--force", help="Rebuild existing images.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also those for devices with a GPU: gigabytes of CUDA.")
    ] = False,
) -> None:
    """Build missing images."""
    from testbed import images
    from testbed.host import docker_engine

    with closing(docker_engine.connect()) as client:
        built = images.ensure(client, print_text, force=force, cuda=gpu)
    print_text("\n".join(filter(None, (built.agent, built.broker, built.gpu))))


def prune() -> None:
    """Remove images that nothing uses: here old ones, on other nodes of a Swarm all that was copied."""
    from testbed.runtimes import swarm_visit

    swarm_visit.prune_images(print_text)


def _show_catalog(entries: list[Entry], what: str, name: str | None, as_json: bool) -> None:
    from testbed.cli import catalog

    chosen = entries if name is None else [catalog.find(name, entries, what)]
    if as_json:
        found = [entry.as_dict() for entry in chosen]
        print_json(found if name is None else found[0])
    elif name is None:
        print_text("\n\n".join(map(catalog.brief, chosen)))
        print_text(f"\nNext: testbed {what}s NAME explains one.")
    else:
        print_text(catalog.full(chosen[0]))
