"""Records scenarios from the testbed's own core: who is sent which version, and each new model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from fl_conformance import scenario
from fl_conformance.scenario import ClientJoined, ClientLeft, UpdateReceived
from tests.conformance.core_adapter import Adapter, Made, Sent

INPUTS = {"receive", "join", "leave"}
"""Keys of events that clients cause. All others are what the core does."""


@dataclass
class Recorder:
    """Hands the inputs of a scenario to the core."""

    rule: str
    content: Mapping[str, Any]
    """The scenario, as the kit's file has it."""
    adapter: Adapter = field(default_factory=Adapter)
    events: list[dict[str, Any]] = field(default_factory=list)
    names: dict[tuple[str, int], int] = field(default_factory=dict)
    """The scenario's number of each dispatch, by client and number of the core's dispatch."""
    seen: int = 0
    """Entries of the adapter's log that are in `events`."""
    window: list[str] = field(default_factory=list)
    members_changed: bool = False

    def record(self) -> dict[str, Any]:
        setting = scenario._scenario(self.rule, {**self.content, "events": []}).setting
        self.reader = scenario._EventReader(setting)
        self.adapter.start(setting)
        self._note()
        recorded = self.content["events"]
        inputs = [event for event in recorded if event.keys() & INPUTS]
        end = [] if recorded[-1] is inputs[-1] else [{"at": recorded[-1]["at"]}]
        for at, events in groupby([*inputs, *end], lambda event: event["at"]):
            self.adapter.advance(at)
            self._note()
            for event in events:
                if event.keys() & INPUTS:
                    self._do(event)
            self.adapter.model(at)
            self._note()
        return {**self.content, "events": self.events}

    def _do(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        at = event["at"]  # perhaps an integer, which the next record keeps
        match self.reader.read(event):
            case ClientJoined(_, client):
                self.members_changed = True
                self.adapter.join(client, at)
            case ClientLeft(_, client, memory):
                self.members_changed = True
                self.adapter.leave(client, at, memory)
            case UpdateReceived(_, update):
                self.adapter.receive(replace(update, at=at))
        self._note()

    def _note(self) -> None:
        """Append what the core has sent and made since the last call."""
        while self.seen < len(self.adapter.log):
            entry = self.adapter.log[self.seen]
            self.seen += 1
            event: dict[str, Any] = {"at": entry.at}
            if isinstance(entry, Sent):
                self.names[entry.client, entry.number] = len(self.names) + 1
                self.adapter.model(entry.at, entry.client)
                event |= {"send": entry.client, "version": entry.version}
            else:
                event |= {"version": entry.version, "model": entry.model.tolist()}
                event["equation"] = self._equation(entry)
                self.members_changed = False
            self.reader.read(event)
            self.events.append(event)

    def _equation(self, made: Made) -> str:
        """The step to this version, with the weights of the updates in it. `a1` is the update of client
        a that answers dispatch 1."""
        parameters = self.content["parameters"]
        new, old = f"w{made.version}", f"w{made.version - 1}"
        used = [(f"{c}{self.names[c, n]}", weight) for c, n, weight in made.weights]
        lr = float(parameters.get("server_lr", 1.0))
        match self.rule:
            case "fedasync":
                (name, beta) = used[0]
                return f"{new} = {1 - beta:.6g}·{old} + {beta:.6g}·w_{name}"
            case "as_fedavg":
                kept = f"{1 - lr:g}·{old} + " if lr != 1 else ""
                return f"{new} = {kept}{_sum(used, 'w_')}"
            case "fedfa":
                size = parameters["window_size"]
                self.window = [*self.window, *(name for name, _ in used)][-size:]
                is_param = parameters.get("variant", "param") == "param"
                total = " + ".join(("w_" if is_param else "Δ_") + name for name in self.window)
                if is_param:
                    kept = f"{1 - lr:g}·{old} + " if lr != 1 else ""
                    return f"{new} = {kept}{lr / size:.6g}·({total})"
                return f"{new} = {old} + {used[0][1]:.6g}·({total})"
            case "area":
                changed = " and the change of members" if self.members_changed else ""
                step = f"{lr:g}·u" if lr != 1 else "u"
                total = _sum(used, "m_") if used else "what is left of it"
                return f"x{made.version} = x{made.version - 1} + {step}; u grew by {total}{changed}"
            case "favano":
                kept = f"{1 - sum(w for _, w in used):.6g}·{old}"
                return f"{new} = {kept} + {_sum(used, 'ŵ_')}"
            case "asysg":
                return f"{new} = {old} − ({_sum(used, 'g_')})"
            case _:
                return f"{new} = {old} + {_sum(used, 'Δ_')}"


def _sum(used: Sequence[tuple[str, float]], prefix: str) -> str:
    return " + ".join(f"{weight:.6g}·{prefix}{name}" for name, weight in used)
