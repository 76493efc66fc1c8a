"""`testbed set`, `kill`, `pause`, `resume`, `restart` and `shell`: commands to the devices of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli import completion
from testbed.cli.arguments import DEFAULT_RUNS, AsJson, Run, Runs, located
from testbed.console import print_json
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from agents.device_actions import Action
    from testbed.rundir.directory import RunDirectory

Devices = Annotated[
    list[str],
    typer.Argument(
        help="Devices or device groups.", autocompletion=completion.devices, metavar="DEVICE..."
    ),
]
_PANEL = "Control the devices of a running run"
_ACTIONS: dict[str, tuple[str, str]] = {
    "kill": ("Crash", "Kill devices at once; `restart` starts them again."),
    "restart": ("Restart", "Restart devices that were killed or have crashed."),
    "pause": ("Pause", "Freeze devices; `resume` lets them continue where they were."),
    "resume": ("Resume", "Let paused devices continue."),
}


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    app.command("set", rich_help_panel=_PANEL)(_set)
    # Of options after the device, those of its command are not ours.
    context = {"allow_interspersed_args": False}
    app.command("shell", rich_help_panel=_PANEL, context_settings=context)(_shell)
    for name, (action, help_text) in _ACTIONS.items():
        app.command(name, help=help_text, rich_help_panel=_PANEL)(_command(action))


def _command(action: str) -> Any:
    def command(run: Run, devices: Devices, as_json: AsJson = False, runs: Runs = DEFAULT_RUNS) -> None:
        from agents import device_actions

        _send(run, devices, runs, [getattr(device_actions, action)()], as_json=as_json)

    return command


def _set(
    run: Run,
    devices: Devices,
    cpu: Annotated[float | None, typer.Option(help="Share of one host core, such as 0.25.")] = None,
    up: Annotated[str | None, typer.Option(help="Uplink rate, such as 1mbit.")] = None,
    down: Annotated[str | None, typer.Option(help="Downlink rate, such as 5mbit.")] = None,
    rtt: Annotated[str | None, typer.Option(help="Round-trip time, such as 80ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Jitter, such as 5ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Packet loss, such as 2%.")] = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the CPU share or the link of devices during a run."""
    from agents.device_actions import SetCpu, SetLink
    from testbed.topology import units

    read = {"up": units.rate, "down": units.rate, "rtt": units.duration, "jitter": units.duration}
    texts = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
    link: dict[str, float | None] = {}
    for name, text in texts.items():
        if text is not None:
            try:
                link[name] = read.get(name, units.share)(text)
            except ValueError as error:
                raise BadInputError(f"--{name} {text}: {error}") from error
    if cpu is None and not link:
        raise BadInputError("nothing to set: give --cpu, --up, --down, --rtt, --jitter or --loss")
    if cpu is not None and cpu <= 0:
        raise BadInputError(f"--cpu {cpu:g}: expected a positive share of one host core such as 0.25")
    actions: list[Action] = [] if cpu is None else [SetCpu(cpu)]
    actions += [SetLink(link)] if link else []
    _send(run, devices, runs, actions, as_json=as_json)


def _shell(
    run: Run,
    device: Annotated[str, typer.Argument(help="The device.", autocompletion=completion.devices)],
    command: Annotated[list[str] | None, typer.Argument(help="One command (default: a shell).")] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Get into a device's container, as its client's user.

    What is done there takes the device's CPU, memory and link, and shows in the run's figures.
    """
    from testbed.run import shell

    raise typer.Exit(shell.run(run, device, command or [], runs))


def _send(run: str, devices: list[str], runs: Path, actions: Sequence[Action], *, as_json: bool) -> None:
    from agents.device_actions import to_json
    from testbed.rundir import commands

    directory = located(run, runs)
    sent = []
    for action in actions:
        for device in _expanded(directory, devices):
            sent.append({"device": device, **to_json(action)})
            commands.send(directory, sent[-1])
    if as_json:
        print_json([{name: one[name] for name in ("device", "action")} for one in sent])


def _expanded(directory: RunDirectory, names: list[str]) -> Iterator[str]:
    """The devices that `names` stand for. Raises BadInputError."""
    devices: dict[str, dict[str, Any]] = directory.read_manifest().get("devices", {})
    for name in names:
        found = [device for device, facts in devices.items() if name in (device, facts["group"])]
        if not found:
            raise BadInputError(f"{directory.run} has no device {name}; it has {', '.join(devices)}")
        yield from found
