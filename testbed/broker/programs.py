"""Broker programs of this host: Mosquitto, or amqtt, a broker in Python.

amqtt and Flower need different versions of the same packages, so one environment cannot have both. The
folder `AMQTT_FOLDER` is a second place for amqtt and what it needs. Only the broker's process imports
from there.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from agents import extras

AMQTT = "amqtt>=0.11.3,<0.13"
"""Requirement in pip's notation. The extra `broker` of pyproject.toml has the same."""
AMQTT_FOLDER = Path(sys.prefix, "share", "edge-fl-testbed", "broker")
INSTALL_MOSQUITTO = "sudo apt-get install mosquitto"


def find_mosquitto() -> str | None:
    """Debian installs Mosquitto into a folder that only root has in PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def has_amqtt() -> bool:
    """Look in this environment and in `AMQTT_FOLDER`."""
    if importlib.util.find_spec("amqtt") is not None:
        return True
    return PathFinder.find_spec("amqtt", [str(AMQTT_FOLDER)]) is not None


def use_amqtt_folder() -> None:
    """Import packages from that folder first, if it exists."""
    if AMQTT_FOLDER.is_dir():
        sys.path.insert(0, str(AMQTT_FOLDER))


def amqtt_command() -> str:
    """Install into this environment, or into `AMQTT_FOLDER` if this environment has Flower."""
    if importlib.util.find_spec("flwr") is None:
        return extras.install_command("amqtt")
    return f"{sys.executable} -m pip install --no-warn-conflicts --target {AMQTT_FOLDER} '{AMQTT}'"


def lack_of_broker() -> str | None:
    """Return the reason why this host has no broker for local processes, with the commands that install
    one."""
    if find_mosquitto() is not None or has_amqtt():
        return None
    return (
        "the process runtime needs an MQTT broker, but neither Mosquitto nor amqtt is installed: run "
        f"{INSTALL_MOSQUITTO}, or {amqtt_command()}"
    )
