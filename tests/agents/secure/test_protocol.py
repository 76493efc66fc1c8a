"""Secure aggregation among real clients' parties and the aggregator's real core, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs, storage
from agents.models.vectors import Vector
from agents.pipeline.interface import PeerError
from agents.rules.area import Area
from agents.rules.as_fedavg import AsFedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from agents.secure import secure_messages as secure_wire
from agents.secure.arithmetic import FIELD, Grid, SecureRun, Words
from agents.secure.party import ChannelError, Channels, Party
from agents.secure.secure_messages import Masked, SecureWireError, bits_of, holders_of
from agents.secure.server import SecureSums
from agents.timing.nanoseconds import from_seconds
from agents.wire import payloads
from agents.wire.messages import UnmaskRequest
from tests.agents.helpers import done, make_core, message, records, secure_step

_D = 7


def _settings(rule: Rule, clients: int, needed: int, colluding: int) -> SecureRun:
    sums = rule.sums()
    return SecureRun(
        clients=[f"c{k}" for k in range(clients)],
        updates=sums.updates,
        weights=64 if sums.weighted else 1,
        colluding=colluding,
        needed=needed,
        range=1.0,
        bits=20,
        timeout=30.0,
    )


class Run:
    """A core with clients c0, c1, …; every message arrives at once, in the order that it is sent."""

    def __init__(self, rule: Rule, clients: int, needed: int, colluding: int) -> None:
        self.settings = _settings(rule, clients, needed, colluding)
        names = self.settings.clients
        self.core, self.server = make_core(
            rule,
            w=np.zeros(_D, np.float32),
            importance=dict.fromkeys(names, 1 / clients),
            steps=[secure_step(self.settings)],
            keeps_models=True,
        )
        self.parties = {name: Party("run", name, self.settings, _D) for name in names}
        self.dispatched: dict[str, act.Dispatch] = {}
        self.log: list[act.Action] = []
        self.models: dict[int, Vector] = {}
        self.silent: set[str] = set()
        """Clients that do not answer requests."""
        self.now, self._sequences = 0.0, dict.fromkeys(names, 0)
        for name in names:
            self.status(name, "ready")
            self.add_peer(name)
        self.execute(self.core.start(0.0, 100.0))

    @property
    def records(self) -> list[events.Record]:
        return records(self.log)

    def add_peer(self, name: str) -> None:
        for other in self.parties.values():
            other.add_peer(name, self.parties[name].public)
            self.parties[name].add_peer(other.name, other.public)

    def status(self, name: str, state: str) -> None:
        self.execute(self.core.status(name, state, self.now))

    def crash(self, name: str) -> None:
        self.status(name, "offline")
        self.dispatched.pop(name, None)

    def restart(self, name: str) -> None:
        self.parties[name] = Party("run", name, self.settings, _D)
        self.add_peer(name)
        self.status(name, "joining")
        self.status(name, "ready")

    def execute(self, actions: Sequence[act.Action]) -> None:
        self.log += actions
        for action in actions:
            match action:
                case act.Dispatch(client, version):
                    self.dispatched[client] = action
                    self.models.setdefault(version, self.server.w.copy())
                case UnmaskRequest(client, number, updates) if client not in self.silent:
                    payload = self.parties[client].answer(number, updates)
                    self.answer(client, payload)

    def answer(self, client: str, payload: bytes) -> None:
        at = from_seconds(self.now)
        self.execute(self.core.handle(inputs.Answered(at, client, payload)))

    def train(self, name: str, change: Vector, kind: str = "delta", **more: Any) -> None:
        """The client answers its dispatch with a masked update, which goes over the wire. `more`: other
        fields of the update."""
        self.now += 0.001
        dispatch, party = self.dispatched.pop(name), self.parties[name]
        present = self.core.core.server.clients
        for recipient, share in party.prepare(dispatch.number):
            if recipient in present:
                self.parties[recipient].receive_share(name, share)
        self._sequences[name] += 1
        masked = party.masked(dispatch.number, change, np.random.default_rng(dispatch.number))
        update = message(
            name,
            dispatch.number,
            kind=kind,
            base_version=dispatch.version,
            sequence=self._sequences[name],
            vector=np.zeros(0, np.float32),
            encoded=masked.encoded,
            **more,
            **done(self.now),
        )
        decoded = payloads.decode_update(payloads.encode(update))
        self.execute(self.core.update(name, decoded, 1, self.now))
        self.execute(self.core.end_of_instant(self.now))
        if (timer := self.core.next_timer) is not None and timer <= self.now:
            self.execute(self.core.due(self.now))


def test_buffer_with_too_few_shares_is_reported_and_the_run_continues() -> None:
    run = Run(FedBuff(buffer_size=2), clients=3, needed=3, colluding=1)
    run.silent = {"c0", "c1"}
    run.train("c0", np.ones(_D))
    run.train("c1", np.ones(_D))
    assert run.server.version == 0
    assert run.core.next_timer is not None
    begun = run.now
    run.crash("c2")
    run.execute(run.core.due(begun + 0.99 * run.settings.timeout))
    notes = [r.message for r in run.records if isinstance(r, events.Note)]
    assert not notes  # c2 had answered before it went: the others still can
    run.execute(run.core.due(begun + 1.01 * run.settings.timeout))
    notes = [r.message for r in run.records if isinstance(r, events.Note)]
    lost = "lost: 1 of 3 possible clients have answered, expected at least 3 answers"
    assert notes == [f"a buffer of 2 updates is {lost}"]
    rejected = [r.reason for r in run.records if isinstance(r, events.UpdateRejected)]
    assert rejected == [f"its buffer is {lost}"] * 2
    assert sum(isinstance(r, events.RoundUnfinished) for r in run.records) == 3  # and that of c2
    assert run.server.version == 0
    run.silent = set()
    run.restart("c2")
    run.train("c2", np.full(_D, 0.5))
    run.train("c0", np.full(_D, 0.25))
    assert run.server.version == 1
    assert run.server.w == pytest.approx(np.full(_D, 0.375), abs=1e-5)


def test_wrong_sum_of_shares_changes_no_model_and_its_senders_are_named() -> None:
    run = Run(FedBuff(buffer_size=2), clients=4, needed=3, colluding=1)
    run.train("c3", np.full(_D, 0.5))
    run.silent = {"c1"}  # its answer is made up below
    run.train("c0", np.full(_D, 0.25))
    (asked,) = [a for a in run.log if isinstance(a, UnmaskRequest) and a.client == "c1"]
    assert run.server.version == 1  # three others have answered
    run.silent = {"c0", "c1", "c2"}
    run.train("c2", np.full(_D, 0.5))
    run.train("c0", np.full(_D, 0.25))
    asked = [a for a in run.log if isinstance(a, UnmaskRequest) and a.client == "c1"][-1]
    before = run.server.w.copy()
    honest = secure_wire.decode_sum(run.parties["c1"].answer(asked.number, asked.updates))[1]
    assert honest is not None
    wrong = np.random.default_rng(0).integers(0, FIELD.p, honest.size).astype(np.uint32)
    run.answer("c1", secure_wire.encode_sum(asked.number, wrong))
    run.answer("c2", run.parties["c2"].answer(asked.number, asked.updates))
    assert run.server.version == 1
    assert run.server.w.tolist() == before.tolist()
    (found,) = [r for r in run.records if isinstance(r, events.WrongSum)]
    assert (found.updates, found.answers) == (("c0", "c2"), ("c1", "c2", "c3"))
    (note,) = [r.message for r in run.records if isinstance(r, events.Note)]
    assert note.startswith("a buffer of 2 updates is lost because an update or an answer was wrong: ")
    assert note.endswith("; updates of c0, c2; answers of c1, c2, c3")
    rejected = [r for r in run.records if isinstance(r, events.UpdateRejected)]
    assert [r.client for r in rejected] == ["c2", "c0"]
    assert all(r.reason.startswith("its buffer is lost because an update or an an") for r in rejected)
    run.silent = set()
    run.train("c2", np.full(_D, 0.5))
    run.train("c0", np.full(_D, 0.25))
    assert run.server.version == 2
    assert run.server.w == pytest.approx(np.full(_D, 0.75), abs=1e-5)


class Liar(Grid):
    """Encode without clipping to the range."""

    def round(self, vector: Vector, rng: np.random.Generator) -> tuple[Words, int]:
        return np.full(vector.size, 2**28, np.uint32), 0


def test_update_beyond_the_range_is_detected_in_its_sum() -> None:
    run = Run(FedBuff(buffer_size=2), clients=3, needed=2, colluding=1)
    run.parties["c1"].grid = Liar(1.0, 20)
    run.train("c0", np.full(_D, 0.5))
    run.train("c1", np.full(_D, 0.5))
    assert run.server.version == 0
    assert not run.server.w.any()
    (found,) = [r for r in run.records if isinstance(r, events.WrongSum)]
    assert found.updates == ("c0", "c1")


def test_updates_lost_with_a_wrong_sum_arrive_later_if_clients_have_a_memory() -> None:
    """For `area` it is lost like any other buffer, and the next model says so."""
    run = Run(Area(every=2), clients=3, needed=2, colluding=1)
    run.parties["c1"].grid = Liar(1.0, 20)
    run.train("c0", np.full(_D, 0.5), "model")
    run.train("c1", np.full(_D, 0.5), "model")
    assert run.server.version == 0
    assert sum(isinstance(r, events.WrongSum) for r in run.records) == 1
    run.train("c0", np.full(_D, 0.5), "residual")
    told = [a.to_client for a in run.log if isinstance(a, act.Dispatch) and a.client == "c0"]
    assert told[-1]["lost"] == (1,)


def test_a_checkpoint_keeps_a_sum_that_is_being_opened(tmp_path: Path) -> None:
    run = Run(FedBuff(buffer_size=2), clients=3, needed=2, colluding=1)
    run.silent = set(run.settings.clients)
    run.train("c0", np.full(_D, 0.5))
    run.train("c1", np.full(_D, 0.25))
    run.train("c2", np.full(_D, 0.125))  # waits in the next buffer
    storage.save_snapshot(run.core.core, tmp_path / "checkpoint")
    run.core.core = storage.load_snapshot(tmp_path / "checkpoint")
    run.server = run.core.core.server
    (asked,) = [a for a in run.log if isinstance(a, UnmaskRequest) and a.client == "c2"]
    for name in ("c2", "c0"):
        run.answer(name, run.parties[name].answer(asked.number, asked.updates))
    assert run.server.version == 1
    assert run.server.w == pytest.approx(np.full(_D, 0.375), abs=1e-5)
    run.silent = set()
    run.train("c0", np.full(_D, 0.125))
    assert run.server.w == pytest.approx(np.full(_D, 0.5), abs=1e-5)


def test_models_are_sent_as_differences_and_averaged_as_models() -> None:
    """as_fedavg: w ← the mean of two models, each its base plus what was sent, with different bases."""
    run = Run(AsFedAvg(every=2), clients=3, needed=2, colluding=1)
    run.train("c0", np.full(_D, 0.5), "model")
    run.train("c1", np.full(_D, 0.25), "model")
    assert run.server.w == pytest.approx(np.full(_D, 0.375), abs=1e-5)
    run.train("c2", np.full(_D, 0.1), "model")  # from version 0
    run.train("c0", np.full(_D, -0.2), "model")  # the reply to its first was version 0, too
    assert run.server.w == pytest.approx(np.full(_D, -0.05), abs=1e-5)
    run.train("c1", np.full(_D, 0.1), "model")
    run.train("c2", np.full(_D, 0.1), "model")
    weights = [r.weight for r in run.records if isinstance(r, events.UpdateApplied)]
    assert weights == [0.5] * 6
    assert run.server.version == 3


def _parties(settings: SecureRun, size: int = _D) -> list[Party]:
    """Parties of which the first and each other one know each other."""
    first, *others = (Party("run", name, settings, size) for name in settings.clients)
    for party in others:
        first.add_peer(party.name, party.public)
        party.add_peer(first.name, first.public)
    return [first, *others]


def _two() -> list[Party]:
    return _parties(_settings(FedBuff(buffer_size=2), 2, 2, 1))


@pytest.mark.parametrize("key", [bytes(32), bytes([1]) + bytes(31)])
def test_low_order_key_is_refused_without_affecting_other_masks(key: bytes) -> None:
    """No share can be sealed with such a key; the other clients still get their shares."""
    settings = _settings(FedBuff(buffer_size=2), 3, 2, 1)
    a, b, _ = (Party("run", name, settings, _D) for name in settings.clients)
    a.add_peer("c1", b.public)
    a.add_peer("c2", b.public)
    with pytest.raises(PeerError, match="invalid public key of c2"):
        a.add_peer("c2", key)
    assert [name for name, _ in a.prepare(1)] == ["c1"]


def _shares(party: Party, dispatch: int) -> bytes:
    ((_, payload),) = party.prepare(dispatch)
    return payload


def test_client_sums_at_least_one_buffer_and_each_share_once() -> None:
    a, b = _two()
    for dispatch in (1, 2, 3):
        b.receive_share("c0", _shares(a, dispatch))
    for wanted, problem in [
        ([("c0", 1, 1)], "sum of 1 updates"),
        ([("c0", 1, 1), ("c0", 1, 1)], "sum of 1 updates"),
        ([("c0", 1, 1), ("c0", 2, 2)], "weight out of range, expected from 1 to 1"),
    ]:
        with pytest.raises(PeerError, match=problem):
            b.answer(1, wanted)
    both = [("c0", 1, 1), ("c0", 2, 1)]
    assert secure_wire.decode_sum(b.answer(1, both))[1] is not None
    assert secure_wire.decode_sum(b.answer(2, both))[1] is None
    assert secure_wire.decode_sum(b.answer(3, [("c0", 2, 1), ("c0", 3, 1)]))[1] is None


def test_client_refuses_a_sum_dominated_by_one_update() -> None:
    """With weights 64, 1 and 1 the sum would equal the first update within 1/32."""
    a, b = _parties(_settings(FedBuff(buffer_size=3, staleness="inverse_sqrt"), 2, 2, 1))
    for dispatch in (1, 2, 3):
        b.receive_share("c0", _shares(a, dispatch))
    for weights in [(64, 1, 1), (1, 3, 1)]:
        wanted = [("c0", dispatch, weight) for dispatch, weight in enumerate(weights, start=1)]
        with pytest.raises(PeerError, match="more weight than the other updates"):
            b.answer(1, wanted)
    wanted = [("c0", 1, 64), ("c0", 2, 63), ("c0", 3, 1)]  # and it still has its shares
    assert secure_wire.decode_sum(b.answer(2, wanted))[1] is not None


def test_forged_shares_only_displace_those_of_their_sender() -> None:
    """Room is for 2(K + N) shares, 12 of K = 2 and N = 4: what each of the others may need at once, two
    of a buffer and one more, stays, whatever c3 sends before, between and after."""
    settings = _settings(FedBuff(buffer_size=2), 4, 3, 1)
    assert settings.most_shares == 12
    victim, *honest, attacker = _parties(settings)
    made_up = iter(range(1000, 2000))
    for dispatch in (1, 2, 3):
        for party in honest:
            for _ in range(20):
                victim.receive_share("c3", _shares(attacker, next(made_up)))
            victim.receive_share(party.name, _shares(party, dispatch))
    for _ in range(200):
        victim.receive_share("c3", _shares(attacker, next(made_up)))
    held = {name: len(shares) for name, shares in victim._held.items()}
    assert held == {"c1": 3, "c2": 3, "c3": 6}
    last = next(made_up) - 1
    for wanted in (
        [("c1", 1, 1), ("c2", 3, 1)],
        [("c1", 2, 1), ("c1", 3, 1)],
        [("c3", last, 1), ("c2", 1, 1)],
    ):
        assert secure_wire.decode_sum(victim.answer(1, wanted))[1] is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_client_keeps_the_newest_shares_of_each_honest_sender(
    sent: list[tuple[int, bool]],
) -> None:
    """c1 to c3 send honestly one share after the other, c4 and c5, which collude, what they like: of the
    honest ones' the last three stay, as long as these have no more than they need at once."""
    settings = _settings(FedBuff(buffer_size=2), 6, 5, 2)
    assert settings.most_shares == 16
    victim, *others = _parties(settings, size=1)
    newest = dict.fromkeys(("c1", "c2", "c3"), 0)
    for number, (who, honest) in enumerate(sent, start=1):
        name = f"c{1 + who % 3}" if honest else f"c{4 + who % 2}"
        dispatch = number
        if honest:
            newest[name] += 1
            dispatch = newest[name]
        party = others[int(name[1:]) - 1]
        victim.receive_share(name, _shares(party, dispatch))
    assert sum(map(len, victim._held.values())) <= 16
    for name, count in newest.items():
        assert set(victim._held.get(name, {})) >= set(range(max(1, count - 2), count + 1))


def test_repeated_new_keys_of_a_client_use_bounded_memory() -> None:
    a, b = _two()
    for _ in range(20):
        key = Channels().public
        a.add_peer("c1", key)
        a.add_peer("c1", key)
    a.add_peer("c1", b.public)
    assert len(a._channels._ciphers) == 1
    b.receive_share("c0", _shares(a, 1))


def test_shares_sealed_for_another_client_are_refused() -> None:
    a, b = _two()
    payload = _shares(a, 1)
    b.receive_share("c0", payload)
    other = bytearray(payload)
    other[4] ^= 1  # says it is of another dispatch
    with pytest.raises(PeerError, match="not sealed for this client"):
        b.receive_share("c0", other)
    with pytest.raises(PeerError, match="public key is not known"):
        b.receive_share("c1", payload)
    with pytest.raises(PeerError, match=f"{len(payload) - 1} bytes, expected {len(payload)}"):
        b.receive_share("c0", payload[1:])
    with pytest.raises(PeerError, match="expected a public key"):
        b.add_peer("c0", bytes(31))


def _faulty_sums() -> Iterator[tuple[bytes, str]]:
    good = secure_wire.encode_sum(1, np.array([1, 2], np.uint32))
    yield good[:5], "message has 5 bytes"
    yield b"x" + good[1:], "wrong magic number"
    yield good + b"1234", "wrong magic number or length"
    yield secure_wire.encode_sum(1, np.array([2**31 - 1], np.uint32)), "not below p"


@pytest.mark.parametrize(("payload", "problem"), [*_faulty_sums()])
def test_faulty_sums_are_refused(payload: bytes, problem: str) -> None:
    with pytest.raises(SecureWireError, match=problem):
        secure_wire.decode_sum(payload)


def test_unmasked_updates_are_refused_in_secure_runs_and_the_reverse() -> None:
    run = Run(FedBuff(buffer_size=2), clients=2, needed=2, colluding=1)
    plain = message("c0", run.dispatched["c0"].number, vector=np.zeros(_D, np.float32), **done(0.0))
    run.execute(run.core.update("c0", plain, 1, 0.001))
    few = Masked(np.zeros(_D, np.uint32), (0,), 0)
    number = run.dispatched["c1"].number
    run.execute(run.core.update("c1", message("c1", number, encoded=few.encoded, **done(0.0)), 1, 0.001))
    assert [r.reason for r in run.records if isinstance(r, events.UpdateRejected)] == [
        "not masked, but the run uses secure aggregation",
        "only 1 clients have a share of its mask, expected at least 2: too many clients are absent",
    ]
    forged = Masked(np.zeros(_D, np.uint32), (0, 1), 0, took=10**400)
    number = [a.number for a in run.log if isinstance(a, act.Dispatch) and a.client == "c1"][-1]
    again = message("c1", number, sequence=2, encoded=forged.encoded, **done(0.001))
    run.execute(run.core.update("c1", again, 1, 0.002))
    assert run.records[-2:][0].reason.startswith("masking time out of range")  # type: ignore[union-attr]


def test_masked_update_with_an_undeclared_vector_is_refused_and_not_kept() -> None:
    """Otherwise a client could fill the aggregator's memory: each such update gets it a new model."""
    run = Run(FedBuff(buffer_size=2), clients=2, needed=2, colluding=1)
    run.train("c0", np.ones(_D, np.float32), vectors={"more": np.zeros(1, np.float32)})
    (rejected,) = [r for r in run.records if isinstance(r, events.UpdateRejected)]
    assert rejected.reason == "a vector more, which the rule does not declare"
    assert isinstance(run.core.core._sums, SecureSums)
    assert not run.core.core._sums._received
    run.train("c0", np.full(_D, 0.5, np.float32))
    run.train("c1", np.full(_D, 0.25, np.float32))
    assert run.server.w == pytest.approx(np.full(_D, 0.375), abs=1e-5)


def test_sealed_channel_opens_only_for_its_two_clients() -> None:
    a, b, c = Channels(), Channels(), Channels()
    about = {"from": "a", "to": "b"}
    sealed = a.seal(b"share", b.public, about)
    assert b.open(sealed, a.public, about) == b"share"
    for opener, peer, what in [(c, a.public, about), (b, c.public, about), (b, a.public, {"from": "c"})]:
        with pytest.raises(ChannelError, match="not sealed for this client"):
            opener.open(sealed, peer, what)
    with pytest.raises(ChannelError, match="invalid public key"):
        a.seal(b"", bytes(32), about)


def test_share_holders_are_written_as_text_and_read_back() -> None:
    assert holders_of(bits_of((0, 3, 70))) == (0, 3, 70)
    for faulty in ("", "-1", "0x1", " 1", "g", "1" * 5000):
        with pytest.raises(ValueError, match="expected a hexadecimal number"):
            holders_of(faulty)
