"""Records scenarios from the testbed's own core: who is sent which version, and each new model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agents.rules import RULES
from agents.rules.favano import Favano, FavanoClient
from agents.rules.interface import ClientSettings
from testbed.conformance.adapter import Client, ClientUpdate, Kind, Setting, Vector
from tests.conformance.core_adapter import Adapter, Made, Sent


@dataclass(frozen=True)
class Up:
    """`client` hands in an update."""

    at: float
    client: str
    vector: tuple[float, float]
    """First two elements of Δ_i for rules of kind `delta`, of the gradient for `gradient`, otherwise of
    the end of the training. The third element is their product."""
    of: int | None = None
    """Version that the client trained from; None for the newest that it was sent."""
    uploaded: float | None = None
    """Time at which the upload began; None for `at`."""
    steps: int = 1
    effective_steps: float = 1.0
    again: bool = False
    """Whether this repeats the client's last update."""


@dataclass(frozen=True)
class Join:
    at: float
    client: str


@dataclass(frozen=True)
class Leave:
    at: float
    client: str
    goodbye: bool = False
    """Whether the client hands in its memory (AREA)."""


@dataclass(frozen=True)
class Wait:
    """Nothing happens but the rule's timers."""

    at: float


Happening = Up | Join | Leave | Wait


@dataclass(frozen=True)
class Script:
    """A scenario before it is recorded."""

    name: str
    about: str
    parameters: Mapping[str, Any]
    happenings: Sequence[Happening]
    importance: Sequence[float] = (0.25, 0.25, 0.5)
    samples: Sequence[int] = (10, 20, 10)
    absent: Sequence[str] = ()
    """Clients that are not present at the start."""
    draws: Sequence[Sequence[str]] = ()
    intervals: Sequence[float] = ()
    model: Sequence[float] = (1.0, -1.0, 0.5)


@dataclass
class _Memory:
    """What the recorder knows of a client."""

    end: Vector | None = None
    """y_i: the end of the last training, shape (d,); None before the first one."""
    last: ClientUpdate | None = None
    favano: FavanoClient | None = None


@dataclass
class _Recorder:
    rule: str
    script: Script
    adapter: Adapter = field(default_factory=Adapter)
    events: list[dict[str, Any]] = field(default_factory=list)
    sends: list[Sent] = field(default_factory=list)
    seen: int = 0
    """Entries of the adapter's log that are in `events`."""
    names: dict[tuple[str, int], int] = field(default_factory=dict)
    """The scenario's number of each dispatch, by client and number of the core's dispatch."""
    memories: dict[str, _Memory] = field(default_factory=dict)
    window: list[str] = field(default_factory=list)
    members_changed: bool = False

    def record(self) -> dict[str, Any]:
        script = self.script
        clients = {
            name: Client(importance, samples)
            for name, importance, samples in zip(
                "abcde", script.importance, script.samples, strict=False
            )
        }
        setting = Setting(
            self.rule,
            script.parameters,
            clients,
            [name for name in clients if name not in script.absent],
            np.array(script.model, dtype=np.float64),
            script.draws,
            script.intervals,
        )
        self.adapter.start(setting)
        self._note()
        for happening, following in zip(script.happenings, [*script.happenings[1:], None], strict=True):
            self._do(happening)
            self._note()
            if following is None or following.at > happening.at:
                self.adapter.model(happening.at)
                self._note()
        content: dict[str, Any] = {
            "name": script.name,
            "about": script.about,
            "parameters": dict(script.parameters),
            "clients": {
                name: {"importance": one.importance, "samples": one.samples}
                for name, one in clients.items()
            },
            "present": list(setting.present),
            "model": list(script.model),
        }
        if script.draws:
            content["draws"] = [list(drawn) for drawn in script.draws]
        if script.intervals:
            content["intervals"] = list(script.intervals)
        return {**content, "events": self.events}

    def _do(self, happening: Happening) -> None:
        at = happening.at
        self.adapter._advance(at)
        self._note()
        match happening:
            case Join(_, client):
                self.members_changed = True
                self.events.append({"at": at, "join": client})
                self.adapter.join(client, at)
            case Leave(_, client, goodbye):
                self.members_changed = True
                memory = self._memory(client).end if goodbye else None
                if goodbye and memory is None:
                    memory = next(sent.model for sent in reversed(self.sends) if sent.client == client)
                said = {} if memory is None else {"memory": memory.tolist()}
                self.events.append({"at": at, "leave": client, **said})
                self.adapter.leave(client, at, memory)
                if goodbye:
                    del self.memories[client]
            case Up():
                self._update(happening)

    def _memory(self, client: str) -> _Memory:
        return self.memories.setdefault(client, _Memory())

    def _update(self, up: Up) -> None:
        memory = self._memory(up.client)
        if up.again:
            assert memory.last is not None
            update = memory.last
            update = ClientUpdate(**{**vars(update), "at": up.at, "uploaded": up.at})
        else:
            update = self._new_update(up, memory)
        memory.last = update
        event: dict[str, Any] = {
            "at": up.at,
            "receive": up.client,
            "dispatch": update.dispatch,
            "version": update.base_version,
            update.kind: update.vector.tolist(),
        }
        if self.rule in ("area", "favano"):
            assert update.trained is not None
            event["trained"] = update.trained.tolist()
        if update.steps != 1:
            event["steps"] = update.steps
        if update.effective_steps != 1:
            event["effective_steps"] = update.effective_steps
        if update.uploaded != update.at:
            event["uploaded"] = update.uploaded
        self.events.append(event)
        self.adapter.receive(update)

    def _new_update(self, up: Up, memory: _Memory) -> ClientUpdate:
        sent = next(
            sent
            for sent in reversed(self.sends)
            if sent.client == up.client and up.of in (None, sent.version)
        )
        vector = np.array([*up.vector, up.vector[0] * up.vector[1]], dtype=np.float64)
        kind: Kind = RULES[self.rule](**_parameters(self.script)).client_side.kind
        trained: Vector | None = None if kind == "gradient" else vector
        if kind == "delta":
            trained = sent.model + up.effective_steps * vector
        if kind == "residual":
            vector = vector - (sent.model if memory.end is None else memory.end)
            memory.end = trained
        if self.rule == "favano":
            vector = sent.model + (vector - sent.model) / self._favano_divisor(up, memory)
        return ClientUpdate(
            client=up.client,
            at=up.at,
            dispatch=self.names[sent.client, sent.number],
            base_version=sent.version,
            base=sent.model,
            kind=kind,
            vector=vector,
            trained=trained,
            samples=self.script.samples["abcde".index(up.client)],
            steps=up.steps,
            effective_steps=up.effective_steps,
            sent=sent.at,
            uploaded=up.at if up.uploaded is None else up.uploaded,
        )

    def _favano_divisor(self, up: Up, memory: _Memory) -> float:
        if memory.favano is None:
            from agents.config import LocalTraining

            settings = ClientSettings(local=LocalTraining(steps=8))
            memory.favano = FavanoClient(Favano(**_parameters(self.script)), settings)
        return memory.favano.divisor(up.steps)

    def _note(self) -> None:
        """Append what the core has sent and made since the last call."""
        log = self.adapter.log
        while self.seen < len(log):
            entry = log[self.seen]
            self.seen += 1
            if isinstance(entry, Sent):
                self.sends.append(entry)
                self.names[entry.client, entry.number] = len(self.sends)
                self.adapter.model(entry.at, entry.client)
                self.events.append({"at": entry.at, "send": entry.client, "version": entry.version})
            else:
                self.events.append(
                    {
                        "at": entry.at,
                        "version": entry.version,
                        "model": entry.model.tolist(),
                        "equation": self._equation(entry),
                    }
                )
                self.members_changed = False

    def _equation(self, made: Made) -> str:
        """The step to this version, with the weights of the updates in it. `a1` is the update of client
        a that answers dispatch 1."""
        new, old = f"w{made.version}", f"w{made.version - 1}"
        used = [(f"{c}{self.names[c, n]}", weight) for c, n, weight in made.weights]
        lr = float(self.script.parameters.get("server_lr", 1.0))
        match self.rule:
            case "fedasync":
                (name, beta) = used[0]
                return f"{new} = {1 - beta:.6g}·{old} + {beta:.6g}·w_{name}"
            case "as_fedavg":
                kept = f"{1 - lr:g}·{old} + " if lr != 1 else ""
                return f"{new} = {kept}{_sum(used, 'w_')}"
            case "fedfa":
                size = self.script.parameters["window_size"]
                self.window = [*self.window, *(name for name, _ in used)][-size:]
                is_param = self.script.parameters.get("variant", "param") == "param"
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


def _parameters(script: Script) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in script.parameters.items()}


def record(rule: str, script: Script) -> dict[str, Any]:
    """Return the scenario, as the kit's files have it."""
    return _Recorder(rule, script).record()
