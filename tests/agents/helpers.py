"""What the agents' tests share: short ways to write events, and the real cores wired in memory.

Tests have seconds; the cores have nanoseconds.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agents import events, shards
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.core import AggregatorCore
from agents.aggregator.evaluation import Evaluation
from agents.aggregator.inputs import Settings
from agents.client.core import ClientCore, ClientIdentity, Outcome
from agents.client.factory import Timing
from agents.config import (
    AggregatorConfig,
    BrokerAccess,
    DrawnDuration,
    LocalTraining,
    Named,
    RunSettings,
    StopConditions,
)
from agents.device_actions import Join
from agents.models.vectors import Buffers, Vector
from agents.pipeline.compression import METHODS, Compressor
from agents.pipeline.steps import ServerSteps
from agents.rules.area import AreaClient
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import (
    Actions,
    Aggregated,
    ClientSettings,
    ClientSide,
    ClientState,
    Rule,
    Send,
    Server,
    State,
    Update,
)
from agents.secure.arithmetic import SecureRun
from agents.tasks.quadratic import Quadratic
from agents.timing.nanoseconds import SECOND, from_seconds, to_seconds
from agents.wire import payloads
from agents.wire.messages import Acknowledgement, ReportRequest
from testbed.plan import PlannedDevice
from testbed.plan.costs import StepCost
from testbed.topology.scenario import Step
from testbed.virtual import simulation
from testbed.virtual.device import VirtualDevice
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.timing import ComputeTimes, EventQueue

NAMES = "abcdefgh"


def make_server(*importance: float, w: Sequence[float] = (0.0,), seed: int = 0) -> Server:
    """A server with the model `w` and the clients a, b, … of that importance, all present."""
    clients = dict(zip(NAMES, importance, strict=False))
    return Server(np.array(w), clients, np.random.default_rng(seed), population=dict(clients))


def update(
    client: str,
    *vector: float,
    base: int = 0,
    round_trip: float = 0.0,
    dispatched: float = 0.0,
    **fields: Any,
) -> Update:
    """`round_trip` and `dispatched` in seconds."""
    return Update(
        client=client,
        dispatch=0,
        base_version=base,
        vector=np.array(vector),
        round_trip=from_seconds(round_trip),
        dispatched=from_seconds(dispatched),
        **fields,
    )


def sent(actions: Actions) -> list[str]:
    """Return the clients to whom `actions` send the model, in order."""
    return [action.client for action in actions if isinstance(action, Send)]


def weights(actions: Actions) -> list[tuple[str, Any]]:
    """Client and weight of every update that `actions` say was aggregated, in order."""
    made = [action for action in actions if isinstance(action, Aggregated)]
    return [(c.client, c.weight) for aggregated in made for c in aggregated.contributions]


class Core:
    """An AggregatorCore that is handed one input per call, with times in seconds.

    The actions that a call returns are without those that accompany each update and status: of these,
    `acknowledged` tells."""

    def __init__(self, core: AggregatorCore, rule: State) -> None:
        self.core, self.rule = core, rule
        self.acknowledged: list[tuple[str, int]] = []
        """Client and dispatch of each acknowledgement, in order."""

    @property
    def ready(self) -> Sequence[str]:
        return self.core.ready

    @property
    def next_timer(self) -> float | None:
        return None if self.core.next_timer is None else to_seconds(self.core.next_timer)

    @property
    def ended(self) -> float | None:
        return None if self.core.ended is None else to_seconds(self.core.ended)

    @property
    def rule_waits(self) -> bool:
        return self.core.rule_waits

    def start(self, wall_clock: float = 0.0, epoch: float = 0.0, at: float = 0.0) -> act.Actions:
        started = inputs.Started(from_seconds(at), wall_clock, from_seconds(epoch))
        return self.handle(started)

    def status(self, client: str, state: str, at: float) -> act.Actions:
        return self.handle(inputs.StatusChanged(from_seconds(at), client, state))

    def update(
        self,
        sender: str,
        message: payloads.UpdateMessage,
        size: int,
        at: float,
        arrived: float | None = None,
    ) -> act.Actions:
        there = from_seconds(at if arrived is None else arrived)
        return self.handle(inputs.UpdateArrived(from_seconds(at), sender, size, there, message))

    def reject(self, sender: str, reason: str, at: float) -> act.Actions:
        return self.handle(inputs.Unreadable(from_seconds(at), sender, reason))

    def evaluated(self, version: int, loss: float, accuracy: float, at: float) -> act.Actions:
        done = inputs.EvaluationDone(from_seconds(at), version, loss, accuracy)
        return self.handle(done)

    def due(self, at: float) -> act.Actions:
        return self.handle(inputs.TimersDue(from_seconds(at)))

    def end_of_instant(self, at: float) -> act.Actions:
        return self.handle(inputs.InstantOver(from_seconds(at)))

    def end(self, reason: str, at: float) -> act.Actions:
        return self.handle(inputs.EndRequested(from_seconds(at), reason))

    def handle(self, event: inputs.Input) -> act.Actions:
        done = self.core.handle(event)
        self.core.validate()
        for one in done:
            if isinstance(one, Acknowledgement):
                self.acknowledged.append((one.client, one.dispatch))
        return [action for action in done if not _is_usual(action)]


def _is_usual(action: act.Action) -> bool:
    """Acknowledgements, and what every client that is ready is asked for."""
    return isinstance(action, Acknowledgement) or (
        isinstance(action, ReportRequest) and not action.about
    )


def make_core(
    rule: Rule,
    stop: StopConditions | None = None,
    w: Vector | None = None,
    *,
    evaluate_every: float = 1e6,
    **settings: Any,
) -> tuple[Core, Server]:
    """A core for the model `w`, (0.0,) in float32 unless told otherwise, and the clients a and b."""
    chosen: dict[str, Any] = {
        "importance": {"a": 0.5, "b": 0.5},
        "checkpoint_every": from_seconds(1e6),
    } | settings
    server = Server(
        np.zeros(1, np.float32) if w is None else w,
        {},
        np.random.default_rng(0),
        population=chosen["importance"],
    )
    asked = Settings(
        run="run",
        schema="s",
        side=rule.client_side,
        stop=stop or StopConditions(after=1e6),
        evaluate_every=from_seconds(evaluate_every),
        **chosen,
    )
    steps = ServerSteps(asked.steps, server.w.size)
    server.sums_only = steps.sums is not None
    state = rule.begin(server)
    return Core(AggregatorCore(asked, state, server, steps), state), server


def secure_step(secure: SecureRun) -> Named:
    """Secure aggregation among what is done to updates."""
    return Named("secure", dataclasses.asdict(secure))


def compressor(kind: str, **params: Any) -> Compressor:
    """Delta of one client."""
    return Compressor(METHODS[kind](**params))


COMPRESSED = Named("compression", {"kind": "fp16", "params": {}})
"""Compression among what is done to updates: the server takes them by any method."""


def client_rule(
    side: ClientSide | None = None, local: LocalTraining | None = None, **more: Any
) -> ClientState:
    """The client half of a rule with this `side`."""
    settings = ClientSettings(local=local or LocalTraining(steps=1), **more)
    side = side or ClientSide()
    return (AreaClient if side.kind == "residual" else ClientState)(side, settings)


def message(client: str, dispatch: int, value: float = 1.0, **fields: Any) -> payloads.UpdateMessage:
    """A first update of `client`, a delta from version 0, that says all is well."""
    plain = payloads.UpdateMessage(
        run="run",
        client=client,
        sequence=1,
        dispatch=dispatch,
        base_version=0,
        schema="s",
        kind="delta",
        samples=10,
        steps=2,
        effective_steps=1.0,
        loss=0.5,
        downloaded=from_seconds(100.125),
        train_start=from_seconds(100.25),
        train_end=from_seconds(100.375),
        sent=from_seconds(100.5),
        vector=np.array([value], np.float32),
    )
    return dataclasses.replace(plain, **fields)


def done(at: float, epoch: float = 100.0) -> dict[str, Any]:
    """The times of a message about work that took none, `at` seconds of a run clock begun at `epoch`."""
    return dict.fromkeys(("downloaded", "train_start", "train_end", "sent"), from_seconds(epoch + at))


def records(actions: act.Actions) -> list[events.Record]:
    return [action.record for action in actions if isinstance(action, act.Log)]


VANILLA = FedBuff(buffer_size=1)
"""Adds every update at once and answers with the new model."""


def started(
    rule: Rule = VANILLA, stop: StopConditions | None = None, **settings: Any
) -> tuple[Core, Server]:
    """A run of the clients a and b, which hold dispatches 1 and 2 of version 0, which is evaluated."""
    aggregator, server = make_core(rule, stop, **settings)
    aggregator.status("b", "ready", 0.0)
    aggregator.status("a", "ready", 0.0)
    aggregator.start(wall_clock=1e9, epoch=100.0)
    aggregator.end_of_instant(0.0)
    aggregator.evaluated(0, 2.3, 0.1, 0.0)
    return aggregator, server


def split(payload: bytes | bytearray) -> tuple[dict[str, Any], bytes]:
    """Header and data of a payload in the format of safetensors."""
    (length,) = struct.unpack_from("<Q", payload)
    return json.loads(payload[8 : 8 + length]), bytes(payload[8 + length :])


def joined(header: Any, data: bytes) -> bytes:
    """The payload with this header, which need not be a valid one, and this data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def aggregator_config(
    folder: Path, importance: Mapping[str, float] = MappingProxyType({"a": 1.0}), **changes: Any
) -> AggregatorConfig:
    """Configuration of a long run of the clients of `importance` in `folder`, which gets the folder of
    models and a test set."""
    (folder / "models").mkdir()
    shards.save(Quadratic(((1.0,),)).shards()[0], folder / "shard")
    fields: dict[str, Any] = {
        "settings": RunSettings(
            run="r",
            importance=dict(importance),
            evaluate_every=10**6 * SECOND,
            stop=StopConditions(after=1e6),
        ),
        "broker": BrokerAccess("localhost", 1883, "a", ""),
        "task": Named("quadratic", {"centers": [[1.0]]}),
        "rule": Named("fedasync", {}),
        "seed": 1,
        "test_set": str(folder / "shard"),
        "run_directory": str(folder),
        "threads": 1,
    }
    return AggregatorConfig(**fields | changes)


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of an aggregator: limits on messages per second then do not depend on the host."""
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 1e9)
    monkeypatch.setattr("agents.aggregator.main.time", clock)
    monkeypatch.setattr("agents.aggregator.main.Aggregator._now", lambda _: 0)


def of(kind: type[act.Action], actions: act.Actions) -> list[Any]:
    """Return the actions of this kind."""
    return [action for action in actions if isinstance(action, kind)]


class _Training:
    """Client i's training of f_i(w) = ½ h_i (w − c_i)². Implements
    `testbed.virtual.device.LazyTraining`."""

    def __init__(self, simulated: Simulation, client: str, model: payloads.ModelMessage) -> None:
        self.due = 0
        self.steps, self.work = simulated.local.count(10), simulated.local.work(10)
        self._simulated = simulated
        self._client = client
        self._model = model

    def outcome(self) -> Outcome:
        return Outcome(self._simulated.trained(self._client, self._model, self.steps), 0.5)

    def shorten(self, steps: int) -> None:
        self.steps = steps

    def request_result(self) -> None:
        pass


class Simulation:
    """A real AggregatorCore and real ClientCores in virtual time; messages take none.

    Client i trains f_i(w) = ½ h_i (w − c_i)² in `periods[i]` seconds, from `joins[i]` on: `steps` steps
    go 1 − (1 − lr h_i)^steps of the way to its center, with `lr` or the step size that the rule assigns.
    `scenario` is what happens to devices; who joins later than at 0 s is away before. float64, for more
    digits, goes from core to core as it is.
    """

    def __init__(
        self,
        rule: Rule,
        centers: Sequence[float],
        periods: Sequence[float],
        lr: float,
        stop: StopConditions,
        *,
        steps: int = 1,
        curvatures: Sequence[float] | None = None,
        joins: Sequence[float] | None = None,
        scenario: Sequence[Step] = (),
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        names = NAMES[: len(centers)]
        core, self.server = make_core(
            rule,
            stop,
            np.zeros(1, dtype),
            importance=dict.fromkeys(names, 1 / len(names)),
            patient=True,
        )
        self.state: Any = core.rule
        self.local = LocalTraining(steps=steps, lr=lr)
        self.records: list[events.Record] = []
        self.models: list[float] = [0.0]
        self._rule = rule
        self._centers = dict(zip(names, centers, strict=True))
        self._curvatures = dict(zip(names, curvatures or [1.0] * len(names), strict=True))
        self._periods = dict(zip(names, periods, strict=True))
        late = {name: at for name, at in zip(names, joins or [0.0] * len(names), strict=True) if at}
        planned = [*scenario, *(Step(from_seconds(at), name, Join()) for name, at in late.items())]
        self._queue = EventQueue()
        self._network = VirtualNetwork(self._queue, 0)
        self._simulation = simulation.Simulation(
            self._queue,
            core.core,
            self.server,
            self._device,
            lambda version, _, __: Evaluation(version, 0.5, 0.5),
            self,
            run="run",
            schema="s",
            sizes=(4, 4),
            stop=stop,
            steps=iter(sorted(planned, key=lambda step: step.at)),
            absent=frozenset(late),
        )

    def run(self) -> list[float]:
        """Run to the end; return the model of every version."""
        self._simulation.run(0.0, lambda: False)
        return self.models

    def device(self, name: str) -> VirtualDevice:
        return self._simulation.device(name)

    @property
    def finished(self) -> str | None:
        """Why the run ended."""
        last = self.records[-1]
        return last.reason if isinstance(last, events.RunEnded) else None

    def trained(self, name: str, model: payloads.ModelMessage, steps: int) -> Vector:
        """End point of local training; for a gradient rule the gradient."""
        start, rest = model.vector, self._centers[name] - model.vector
        curvature = self._curvatures[name]
        if self._rule.client_side.kind == "gradient":
            return -curvature * rest
        lr = self.local.lr if model.lr is None else model.lr
        share = 1 - (1 - lr * curvature) ** steps
        return (start + share * rest).astype(start.dtype)

    def _device(self, name: str, last: VirtualDevice | None) -> VirtualDevice:
        timing = DrawnDuration("constant", {"value": self._periods[name]})
        planned = PlannedDevice(
            name=name, group=name, cpu=None, memory=0, local=self.local, timing=timing
        )
        memory = None if last is None else last.memory
        settings = ClientSettings(local=self.local, memory=memory)
        return VirtualDevice(
            index=NAMES.index(name),
            core=ClientCore(
                ClientIdentity("run", name, 10), lambda *_: 0, self._rule.begin_client(settings)
            ),
            line=self._network.line(planned) if last is None else last.line,
            train=lambda wanted: _Training(self, name, wanted.model),
            speed=ComputeTimes(planned, StepCost()) if last is None else last.speed,
            timing=Timing(timing, None, np.random.default_rng) if last is None else last.timing,
            memory=memory,
        )

    # Implements testbed.virtual.simulation.Recorder

    def input(self, event: inputs.Input) -> None:
        pass

    def record(self, record: events.Record) -> None:
        self.records.append(record)
        if isinstance(record, events.VersionMade) and record.version == len(self.models):
            self.models.append(float(self.server.w[0]))

    def save(self, version: int, w: Vector, buffers: Buffers, *, final: bool) -> None:
        pass

    def pulse(self) -> None:
        pass
