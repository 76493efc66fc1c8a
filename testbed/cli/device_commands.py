"""`testbed set`, `kill`, `pause`, `resume`, `restart` and `shell`: commands to the devices of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agents.device_actions import Action, Crash, Pause, Restart, Resume
from testbed.api.handle import RunHandle, changes
from testbed.cli.arguments import DEFAULT_RUNS, Run, Runs
from testbed.run import live_runs

Devices = Annotated[list[str], typer.Argument(help="Devices or device groups.")]
_PANEL = "Control the devices of a running run"
_ACTIONS: dict[str, tuple[Action, str]] = {
    "kill": (Crash(), "Kill devices at once; `restart` starts them again."),
    "restart": (Restart(), "Restart devices that were killed or have crashed."),
    "pause": (Pause(), "Freeze devices; `resume` lets them continue where they were."),
    "resume": (Resume(), "Let paused devices continue."),
}


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    app.command("set", rich_help_panel=_PANEL)(_set)
    # Of options after the device, those of its command are not ours.
    context = {"allow_interspersed_args": False}
    app.command("shell", rich_help_panel=_PANEL, context_settings=context)(_shell)
    for name, (action, help_text) in _ACTIONS.items():
        app.command(name, help=help_text, rich_help_panel=_PANEL)(_command(action))


def _command(action: Action) -> Any:
    def command(run: Run, devices: Devices, runs: Runs = DEFAULT_RUNS) -> None:
        RunHandle(live_runs.located(run, runs)).act(devices, action)

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
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the CPU share or the link of devices during a run."""
    link = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
    actions = changes(cpu, link, mark="--")
    RunHandle(live_runs.located(run, runs)).act(devices, *actions)


def _shell(
    run: Run,
    device: Annotated[str, typer.Argument(help="The device.")],
    command: Annotated[list[str] | None, typer.Argument(help="One command (default: a shell).")] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Get into a device's container, as its client's user.

    What is done there takes the device's CPU, memory and link, and shows in the run's figures.
    """
    from testbed.run import shell

    raise typer.Exit(shell.run(run, device, command or [], runs))
