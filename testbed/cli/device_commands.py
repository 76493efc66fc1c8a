"""`testbed set`, `kill`, `pause`, `resume`, `restart` and `shell`: commands to the devices of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli import completion
from testbed.cli.arguments import DEFAULT_RUNS, AsJson, Run, Runs
from testbed.console import print_json

if TYPE_CHECKING:
    from agents.device_actions import Action

Devices = Annotated[
    list[str],
    typer.Argument(
        help="Devices or device groups.", autocompletion=completion.devices, metavar="DEVICE"
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
    from testbed.api.handle import changes

    link = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
    _send(run, devices, runs, changes(cpu, link, mark="--"), as_json=as_json)


def _shell(
    run: Run,
    device: Annotated[str, typer.Argument(help="The device.", autocompletion=completion.devices)],
    command: Annotated[list[str] | None, typer.Argument(help="One command (default: a shell).")] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Open a shell in a device's container, or run one command there.

    Either has the rights of the device's client, and uses the device's CPU, memory and link: what is
    done there affects the run.
    """
    from testbed.run import shell

    raise typer.Exit(shell.run(run, device, command or [], runs))


def _send(run: str, devices: list[str], runs: Path, actions: Sequence[Action], *, as_json: bool) -> None:
    from testbed.api.running import attach

    sent = attach(run, runs=runs).act(devices, *actions)
    if as_json:
        print_json([{name: one[name] for name in ("device", "action")} for one in sent])
