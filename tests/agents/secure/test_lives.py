"""Secure aggregation whatever happens when: real clients, parties and a real aggregator, whose messages
get through one by one, in any order of the clients, while processes die, forget, and come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import events
from agents.models.vectors import Vector
from agents.rules.area import Area, AreaState
from agents.rules.as_fedavg import AsFedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from agents.secure.arithmetic import SecureRun
from agents.secure.server import SecureSums
from tests.agents.fleet import Fleet, random_lives
from tests.agents.helpers import records
from tests.agents.lives import Life

CENTERS = {"a": 1.0, "b": -2.0, "c": 5.0, "d": 30.0}
TIMEOUT = 6
"""Instants after which a sum is given up."""
FATES = [
    *["deliver", "finish", "arrive", "work", "work"] * 3,
    *["diverge", "twice", "lose model", "lose update", "reorder updates"],
    *["crash", "crash", "crash all", "forget", "reconnect", "leave", "tick"],
]
lives = st.tuples(
    st.integers(1, 4),  # U
    st.integers(0, 3),  # T, below U
    st.lists(st.tuples(st.sampled_from(FATES), st.sampled_from(list(CENTERS))), min_size=5, max_size=80),
)
Steps = tuple[int, int, Sequence[tuple[str, str]]]


class Run(Life):
    """A fleet with secure aggregation, in float64, so that sums are right up to the rounding alone."""

    def __init__(self, rule: Rule, needed: int, colluding: int) -> None:
        asked = rule.sums()
        secure = SecureRun(
            clients=[*CENTERS],
            updates=asked.updates,
            weights=16 if asked.weighted else 1,
            colluding=min(colluding, needed - 1),
            needed=needed,
            range=64.0,
            bits=24,
            timeout=float(TIMEOUT),
        )
        share = dict.fromkeys(CENTERS, 1 / len(CENTERS))
        fleet = Fleet(rule, share, lambda name, w: (CENTERS[name] - w) / 2, np.float64, secure)
        super().__init__(fleet)
        self._read = 0

    def news(self) -> list[events.Record]:
        new, self._read = self.fleet.log[self._read :], len(self.fleet.log)
        return records(new)

    def settle(self, rounds: int) -> Iterator[None]:
        """Restart all processes; nothing is lost from then on."""
        for name in CENTERS:
            if self.fleet.devices[name].core is None:
                self.fleet.start(name)
        for name in CENTERS:
            self.fleet.crash(name)
            self.fleet.start(name)
        for _ in range(rounds):
            for name in CENTERS:
                self.fleet.work_off(name)
                yield
            self.fleet.end_instant()

    def check_end(self) -> None:
        """Each update that arrived is in a version or reported as not, and nothing waits for ever."""
        sums = self.fleet.core.core._sums
        assert isinstance(sums, SecureSums)
        newest = set(sums.waiting)
        for _ in range(TIMEOUT + 1):
            self.fleet.end_instant()
        assert not sums.waiting.keys() & newest
        self.fleet.execute(self.fleet.core.end("interrupted by nobody", self.fleet.now))
        for _ in range(2):
            if self.fleet.core.core._evaluations:
                self.fleet.execute(self.fleet.core.evaluated(0, 1.0, 0.5, self.fleet.now))
        ended = [
            (record.client, record.dispatch)
            for record in self.fleet.records
            if isinstance(record, events.UpdateApplied | events.UpdateRejected) and record.dispatch
        ]
        answered = {(message.client, message.dispatch) for message in self.fleet.arrived}
        assert answered <= set(ended)
        applied = [
            (record.client, record.dispatch)
            for record in self.fleet.records
            if isinstance(record, events.UpdateApplied)
        ]
        assert len(applied) == len(set(applied))


@pytest.mark.parametrize(
    "rule",
    [
        FedBuff(buffer_size=5, staleness="inverse_sqrt", server_lr=0.5),  # more than there are clients
        FedBuff(buffer_size=2, concurrency=1),
        AsFedAvg(every=3, server_lr=0.5),
    ],
    ids=["fedbuff", "concurrency", "as_fedavg"],
)
@given(life=lives)
@settings(random_lives, max_examples=25)
def test_model_moves_by_the_sum_of_the_updates_recorded_as_applied(rule: Rule, life: Steps) -> None:
    run = Run(rule, *life[:2])
    fleet, version = run.fleet, 0
    expected = fleet.server.w.copy()
    bases = {0: expected.copy()}
    for what, name in life[2]:
        run.happens(what, name)
        parts: list[events.UpdateApplied] = []
        for record in run.news():
            if isinstance(record, events.UpdateApplied):
                parts.append(record)
            elif isinstance(record, events.VersionMade):
                expected = _moved(rule, expected, parts, fleet, bases)
                bases[record.version] = expected.copy()
                version, parts = version + 1, []
                assert record.version == version
        assert fleet.server.w.tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    for _ in run.settle(6):
        pass
    assert fleet.server.version > version  # it goes on
    run.check_end()


def _moved(
    rule: Rule,
    w: Vector,
    parts: Sequence[events.UpdateApplied],
    fleet: Fleet,
    bases: dict[int, Vector],
) -> Vector:
    """Return w after the plain rule applied the updates of a version."""
    moves = sum((part.weight * fleet.sent[part.client, part.dispatch] for part in parts), np.zeros(1))
    if isinstance(rule, AsFedAvg):
        moves = moves + sum(part.weight * (bases[part.base_version] - w) for part in parts)
    return w + moves


def test_sum_is_opened_by_a_client_whose_own_update_is_rejected() -> None:
    """All four clients have to answer. The training of d diverges while the sum waits for its answer."""
    fleet = Run(FedBuff(buffer_size=3), needed=4, colluding=1).fleet
    for name in [*CENTERS] * 2:  # their models, then the shares of all masks
        while fleet.devices[name].inbox:
            fleet.deliver(name)
    for name in CENTERS:
        fleet.finish(name, diverged=name == "d")
        fleet.arrive(name)
    assert [one.client for one in fleet.records if isinstance(one, events.UpdateRejected)] == ["d"]
    for name in CENTERS:
        while fleet.devices[name].inbox:
            fleet.deliver(name)
    assert fleet.server.version == 1


@given(life=lives)
@settings(random_lives, max_examples=15)
def test_area_mean_contains_all_opened_sums_and_later_the_lost_ones(life: Steps) -> None:
    """x + u = Σ y_i / N with y_i all that was opened of a client's messages; and once nothing is lost
    any more, x gets to where the clients' own y_i are those."""
    run = Run(Area(every=2), *life[:2])
    mean = Mean(run.fleet)
    for what, name in life[2]:
        run.happens(what, name)
        mean.check(run.news())
    for _ in run.settle(100):
        mean.check(run.news())
        frozen = [float(cell[0][0]) for cell in mean.frozen]
        # y_i = (x + c_i)/2 of those that train; what was forgotten stays as it is.
        expected = (sum(CENTERS.values()) / 2 + sum(frozen)) / (len(CENTERS) / 2 + len(frozen))
        if abs(run.fleet.server.w[0] - expected) < 1e-3:
            break
    else:
        raise AssertionError(f"ends at {run.fleet.server.w[0]}, not at {expected}")
    run.check_end()


class Mean:
    """Σ y_i, computed from the messages sent and their outcome."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._seen = fleet, 0
        self.y = {name: [fleet.server.w.copy()] for name in CENTERS}
        self.frozen: list[list[Vector]] = []
        """Contributions of clients that have lost their memory."""
        self._owners: dict[tuple[str, int], list[Vector]] = {}

    def check(self, news: Sequence[events.Record]) -> None:
        state = self._fleet.core.rule
        assert isinstance(state, AreaState)
        for record in news:
            if isinstance(record, events.Note) and " restarts as a new member" in record.message:
                name = record.message.split()[0]
                self.frozen.append(self.y[name])
                self.y[name] = [state._begun_with[name]]
        for message in self._fleet.taken[self._seen :]:
            cell = self._owners[message.client, message.dispatch] = self.y[message.client]
            if message.kind == "model":
                cell[0] = self._fleet.dispatched[message.dispatch]
        self._seen = len(self._fleet.taken)
        for record in news:
            if isinstance(record, events.UpdateApplied):
                key = record.client, record.dispatch
                self._owners[key][0] = self._owners[key][0] + self._fleet.sent[key]
        cells = [*self.y.values(), *self.frozen]
        mean = sum((cell[0] for cell in cells), np.zeros(1)) / len(cells)
        assert (self._fleet.server.w + state.u).tolist() == pytest.approx(mean.tolist(), abs=1e-9)
