"""Commands that control the devices of a run: `testbed set`, `charge`, `unplug`, `kill`, `pause`,
`resume`, `restart`, `disconnect`, `reconnect` and `shell`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from testbed.cli import app
from testbed.cli.app import DEFAULT_RUNS, AsJson, Run, Runs
from testbed.console import print_json

Devices = Annotated[
    list[str],
    typer.Argument(help="Devices or device groups.", autocompletion=app.devices, metavar="DEVICE"),
]
DevicesOrSegments = Annotated[
    list[str],
    typer.Argument(
        help="Devices, device groups, or segments of the network.",
        autocompletion=app.devices_and_segments,
        metavar="DEVICE",
    ),
]
_PANEL = "Control the devices of a running run"
_ACTIONS: dict[str, tuple[Any, str]] = {
    "kill": (Devices, "Kill devices at once; `restart` starts them again."),
    "restart": (Devices, "Restart devices that were killed or have crashed."),
    "pause": (Devices, "Freeze devices; `resume` lets them continue where they were."),
    "resume": (Devices, "Let paused devices continue."),
    "disconnect": (
        DevicesOrSegments,
        "Cut off devices or segments: no packet passes until `reconnect`.",
    ),
    "reconnect": (DevicesOrSegments, "Let packets pass again after `disconnect`."),
    "unplug": (Devices, "Unplug the chargers of devices; `charge` plugs them in again."),
}
"""Name of a command -> type of its targets, and its help. The command calls the method of `RunHandle`
with the same name."""


def add_to(app: typer.Typer) -> None:
    app.command("set", rich_help_panel=_PANEL)(_set)
    app.command("charge", rich_help_panel=_PANEL)(_charge)
    # Options after the device belong to the command that runs in its container.
    context = {"allow_interspersed_args": False}
    app.command("shell", rich_help_panel=_PANEL, context_settings=context)(_shell)
    for name, (targets, help_text) in _ACTIONS.items():
        app.command(name, help=help_text, rich_help_panel=_PANEL)(_command(name, targets))


def _command(action: str, targets: Any) -> Any:
    """`targets`: type of the command's argument with names."""

    def command(run: Run, devices: Any, as_json: AsJson = False, runs: Runs = DEFAULT_RUNS) -> None:
        from testbed.api.running import attach

        _print_actions(getattr(attach(run, runs=runs), action)(devices), as_json=as_json)

    command.__annotations__["devices"] = targets
    return command


def _set(
    run: Run,
    devices: DevicesOrSegments,
    cpu: Annotated[str | None, typer.Option(help="Share of one host core, such as 0.25 or 25%.")] = None,
    up: Annotated[str | None, typer.Option(help="Uplink rate, such as 1mbit.")] = None,
    down: Annotated[str | None, typer.Option(help="Downlink rate, such as 5mbit.")] = None,
    rtt: Annotated[str | None, typer.Option(help="Round-trip time, such as 80ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Jitter, such as 5ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Packet loss, such as 2%.")] = None,
    battery: Annotated[str | None, typer.Option(help="Level of the battery, such as 20%.")] = None,
    background: Annotated[
        bool | None,
        typer.Option("--background/--no-background", help="Other people's traffic on a segment."),
    ] = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Change the CPU share, the link or the battery's level of devices during a run, or the link or the
    background traffic of a segment."""
    from testbed.api.handle import changes
    from testbed.api.running import attach

    link = {"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss}
    wanted = changes(cpu, link, battery, background=background, prefix="--")
    _print_actions(attach(run, runs=runs).act(devices, *wanted), as_json=as_json)


def _charge(
    run: Run,
    devices: Devices,
    watts: Annotated[
        str | None, typer.Option(help="Constant power, such as 10W (default: the own charger).")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Plug in chargers; `unplug` removes them."""
    from testbed.api.running import attach

    _print_actions(attach(run, runs=runs).charge(devices, watts), as_json=as_json)


def _shell(
    run: Run,
    device: Annotated[
        str,
        typer.Argument(help="A device, or a group with a single device.", autocompletion=app.devices),
    ],
    command: Annotated[list[str] | None, typer.Argument(help="One command (default: a shell).")] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Open a shell in a device's container, or run one command there.

    The shell or command has the rights of the device's client. It uses the device's CPU, memory and
    link, so it affects the run.
    """
    from testbed.api.running import attach

    raise typer.Exit(attach(run, runs=runs).shell(device, command or []))


def _print_actions(sent: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        from testbed.api.outputs import SentAction

        print_json([SentAction(one["device"], one["action"]) for one in sent])
