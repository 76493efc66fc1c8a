"""MQTT topics of one run (docs/concepts/wire.md). Names are checked once, here."""

from __future__ import annotations

import re
from dataclasses import dataclass

ROOT = "testbed"
NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
"""Pattern of the names of runs, devices and clients."""
_NAME = re.compile(NAME)

AGGREGATOR = "aggregator"
CONTROLLER = "controller"
ROUTER = "router"


def is_name(text: str) -> bool:
    """Whether `text` may name a run, device or client: one MQTT topic level and one host name label."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics under `testbed/<run>/`. `"+"` in place of a name gives the subscription filter."""

    run: str

    def __post_init__(self) -> None:
        if not is_name(self.run):
            raise ValueError(f"{self.run!r} cannot name a run")

    def model(self, client: str) -> str:
        """aggregator -> one client: a dispatch of the global model."""
        return f"{ROOT}/{self.run}/model/{client}"

    @property
    def broadcast(self) -> str:
        """aggregator -> all clients: a dispatch of the global model."""
        return f"{ROOT}/{self.run}/model"

    def update(self, client: str) -> str:
        """client -> aggregator: what local training made."""
        return f"{ROOT}/{self.run}/update/{client}"

    def request(self, client: str) -> str:
        """aggregator -> one client: the FL protocol's own requests (`agents.wire.messages.Request`)."""
        return f"{ROOT}/{self.run}/request/{client}"

    def status(self, client: str) -> str:
        """client -> aggregator and controller, retained, with the last will `offline`."""
        return f"{ROOT}/{self.run}/status/{client}"

    def report(self, client: str) -> str:
        """client -> aggregator: which dispatch it works on (`agents.wire.messages.Report`)."""
        return f"{ROOT}/{self.run}/report/{client}"

    def key(self, client: str) -> str:
        """client -> all clients, retained: its public key, for shares."""
        return f"{ROOT}/{self.run}/key/{client}"

    def share(self, recipient: str, sender: str) -> str:
        """client -> another client: a sealed share of a mask (`agents.pipeline.secure`)."""
        return f"{ROOT}/{self.run}/share/{recipient}/{sender}"

    def sums(self, client: str) -> str:
        """client -> aggregator: a sum of shares of masks (`agents.pipeline.secure`)."""
        return f"{ROOT}/{self.run}/sums/{client}"

    def control(self, device: str) -> str:
        """controller -> one device or the aggregator: orders of the emulation, outside of FL."""
        return f"{ROOT}/{self.run}/control/{device}"

    def telemetry(self, device: str) -> str:
        """device -> controller: what the device used."""
        return f"{ROOT}/{self.run}/telemetry/{device}"

    def failure(self, device: str) -> str:
        """device or router -> controller: an order that could not be done, and why."""
        return f"{ROOT}/{self.run}/failure/{device}"

    def kind_and_name(self, topic: str) -> tuple[str, str]:
        """`status` and `pi-1` of `testbed/<run>/status/pi-1`. Raises ValueError for a topic of another
        form or run."""
        match topic.split("/"):
            case [root, run, kind, name] if (root, run) == (ROOT, self.run) and is_name(name):
                return kind, name
        raise ValueError(f"{topic!r:.200} is no topic of {self.run}")

    @staticmethod
    def kind_in(topic: str) -> str:
        """`share` of `testbed/<run>/share/pi-1/pi-2`; nothing of a topic of no run."""
        levels = topic.split("/")
        return levels[2] if len(levels) > 2 else ""

    @staticmethod
    def name_in(topic: str) -> str:
        """The client or device that `topic` (a topic of a run) is addressed to or comes from."""
        return topic.rpartition("/")[2]
