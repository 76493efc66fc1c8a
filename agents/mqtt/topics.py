"""MQTT topics of one run (docs/concepts/wire.md), and the check of names in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agents.fields import NAME

ROOT = "testbed"
_NAME = re.compile(NAME)

AGGREGATOR = "aggregator"
CONTROLLER = "controller"
ROUTER = "router"


def is_name(text: str) -> bool:
    """Names must be usable as one level of an MQTT topic and as host names."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics under `testbed/<run>/`. The name `"+"` makes a subscription filter for all names."""

    run: str

    def __post_init__(self) -> None:
        if not is_name(self.run):
            raise ValueError(f"invalid run name {self.run!r}, expected {NAME}")

    def model(self, client: str) -> str:
        """aggregator -> one client: a dispatch of the global model."""
        return f"{ROOT}/{self.run}/model/{client}"

    @property
    def broadcast(self) -> str:
        """aggregator -> all clients: a dispatch of the global model."""
        return f"{ROOT}/{self.run}/model"

    def update(self, client: str) -> str:
        """client -> aggregator: an update."""
        return f"{ROOT}/{self.run}/update/{client}"

    def request(self, client: str) -> str:
        """aggregator -> one client: requests of the learning protocol
        (`agents.wire.messages.Request`)."""
        return f"{ROOT}/{self.run}/request/{client}"

    def status(self, client: str) -> str:
        """client -> aggregator and controller: the client's state. Messages are retained; the last will
        is `offline`."""
        return f"{ROOT}/{self.run}/status/{client}"

    def report(self, client: str) -> str:
        """client -> aggregator: the dispatch that the client works on
        (`agents.wire.messages.Report`)."""
        return f"{ROOT}/{self.run}/report/{client}"

    def key(self, client: str) -> str:
        """client -> all clients, retained: the client's public key, with which shares are
        encrypted."""
        return f"{ROOT}/{self.run}/key/{client}"

    def share(self, recipient: str, sender: str) -> str:
        """client -> another client: a message about an update of its own."""
        return f"{ROOT}/{self.run}/share/{recipient}/{sender}"

    def sums(self, client: str) -> str:
        """client -> aggregator: an answer to `wire.messages.UnmaskRequest`."""
        return f"{ROOT}/{self.run}/sums/{client}"

    def control(self, device: str) -> str:
        """controller -> one device, the router or the aggregator: orders of the emulation."""
        return f"{ROOT}/{self.run}/control/{device}"

    def telemetry(self, device: str) -> str:
        """device -> controller: telemetry of the device, such as resource usage and disturbances."""
        return f"{ROOT}/{self.run}/telemetry/{device}"

    def failure(self, device: str) -> str:
        """device or router -> controller: the reason for a failure, for instance of an order."""
        return f"{ROOT}/{self.run}/failure/{device}"

    def kind_and_name(self, topic: str) -> tuple[str, str]:
        """Kind and name, such as `status` and `pi-1` for `testbed/<run>/status/pi-1`. Raises ValueError
        if the topic has another form or is of another run."""
        match topic.split("/"):
            case [root, run, kind, name] if (root, run) == (ROOT, self.run) and is_name(name):
                return kind, name
        raise ValueError(f"{topic!r:.200} is not a topic of run {self.run}")

    @staticmethod
    def split(topic: str) -> tuple[str, str]:
        """Kind, and last name: `share` and `pi-2` for `testbed/<run>/share/pi-1/pi-2`.

        The name is that of the client or device that sends or receives the message. It is not checked;
        the kind is empty if the topic has fewer than three levels.
        """
        levels = topic.split("/")
        return levels[2] if len(levels) > 2 else "", levels[-1]
