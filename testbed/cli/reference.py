"""Commands that concern no run: rules, tasks, profiles, this host, the images."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed import console
from testbed.cli import completion
from testbed.cli.app import App
from testbed.cli.arguments import AsJson
from testbed.console import print_json, print_text, remark, table

if TYPE_CHECKING:
    from testbed.cli.catalog import Entry

_EXPLAINED = {"metavar": "[NAME]", "help": "The one to explain (default: list all)."}
Rule = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=completion.rules)]
Task = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=completion.tasks)]
Profile = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=completion.profiles)]
_PANEL = "Reference"


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    for command in (schema, rules, tasks, profiles, calibrate, doctor):
        app.command(rich_help_panel=_PANEL)(command)
    images = App(help="Images for devices and broker.")
    images.command()(build)
    app.add_typer(images, name="images", rich_help_panel=_PANEL)


def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]",
            help="The one whose --json it describes, such as `ps` (default: a topology).",
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a topology, for editors; or of what a command prints with --json."""
    if command:
        from testbed.cli import outputs

        print_json(outputs.schema(" ".join(command)))
        return
    from testbed.topology import json_schema

    print_json(json_schema())


def rules(name: Rule = None, as_json: AsJson = False) -> None:
    """List the aggregation rules, or explain one: paper, equation, parameters."""
    from testbed.cli import catalog

    _show_catalog(catalog.rules(), "rule", name, as_json)


def tasks(name: Task = None, as_json: AsJson = False) -> None:
    """List the learning tasks, or explain one: dataset, parameters."""
    from testbed.cli import catalog

    _show_catalog(catalog.tasks(), "task", name, as_json)


def profiles(name: Profile = None, as_json: AsJson = False) -> None:
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
    from rich.text import Text

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
    console.out().print(shown)


def build(
    force: Annotated[bool, typer.Option("--force", help="Rebuild existing images.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also those for devices with a GPU: gigabytes of CUDA.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build missing images."""
    from testbed import images
    from testbed.host import docker_engine

    def progress(text: str) -> None:
        if not as_json:
            remark(text)

    with closing(docker_engine.connect()) as client:
        built = images.ensure(client, progress, force=force, cuda=gpu)
    if as_json:
        print_json({**asdict(built), "gpu": built.gpu or None})
        return
    print_text("\n".join(filter(None, (built.agent, built.broker, built.gpu))))


def _show_catalog(entries: list[Entry], what: str, name: str | None, as_json: bool) -> None:
    from testbed.cli import catalog

    chosen = entries if name is None else [catalog.find(name, entries, what)]
    if as_json:
        found = [entry.as_dict() for entry in chosen]
        print_json(found if name is None else found[0])
    elif name is None:
        print_text("\n\n".join(map(catalog.brief, chosen)))
        remark(f"\nNext: testbed {what}s NAME explains one.")
    else:
        print_text(catalog.full(chosen[0]))
