"""Reasons to refuse a topology with `privacy` before launch."""

from __future__ import annotations

import pytest

from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Sums
from testbed import topology
from testbed.errors import BadInputError
from testbed.plan import model_check

BASE = """\
name: private
task: {name: digits-logreg, local: {steps: 1}}
rule: {name: fedbuff, buffer_size: 4, staleness: inverse_sqrt}
privacy: {secure: {colluding: 1, needed: 3}}
devices: [{name: d, count: 4, cpu: 0.1}]
stop: {after: 10s}
"""


def test_secure_settings_for_the_agents() -> None:
    parsed = topology.parse(BASE)
    secure = parsed.secure
    assert secure is not None
    assert secure.clients == ("d-1", "d-2", "d-3", "d-4")
    assert (secure.updates, secure.weights, secure.needed, secure.bits) == (4, 64, 3, 16)
    assert topology.parse(parsed.to_yaml()) == parsed
    plain = topology.parse(BASE.replace(", needed: 3", "").replace("inverse_sqrt", "none")).secure
    assert plain is not None
    assert (plain.weights, plain.needed) == (1, 3)  # 0.7 · 4, rounded up
    assert topology.parse(BASE.replace("privacy", "# privacy")).secure is None
    # 3 of 4 clients are needed, and 3 of 5: any two sets of that size have a common member.
    assert topology.parse(BASE.replace("count: 4", "count: 5")).secure is not None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("needed: 3", "needed: 5", "needed (U) is 5, expected from 1 to the number of clients, 4"),
        ("needed: 3", "needed: 2", "needed (U) is 2, expected more than half of the number of clients"),
        ("count: 4", "count: 6", "expected more than half of the number of clients, 6"),
        ("colluding: 1", "colluding: 3", "needed: found 3, expected above colluding (T), 3"),
        ("needed: 3", "needed: 3, bits: 24", "4 updates × weights up to 64 × a range of 2^24 is more"),
        ("needed: 3", "needed: 3, bits: 31", "bits: found 31, expected from 2 to 30"),
        ("buffer_size: 4", "buffer_size: 1", "buffer_size is 1"),
        ("staleness: inverse_sqrt", "trim: median", "trim median needs the single updates: remove it"),
        ("staleness: inverse_sqrt", "reply: after_aggregation", "set reply: immediate"),
        ("fedbuff, buffer_size: 4, staleness: inverse_sqrt", "port", "depends on its direction"),
        (
            "fedbuff, buffer_size: 4, staleness: inverse_sqrt",
            "fedfa, window_size: 4, variant: delta",
            "consecutive windows differ",
        ),
        ("fedbuff, buffer_size: 4, staleness: inverse_sqrt", "fedavg", "the rule fedavg does not work"),
        (
            "fedbuff, buffer_size: 4, staleness: inverse_sqrt",
            "area, criterion: period, period: 1s",
            "a sum may have only one message",
        ),
        (
            "{steps: 1}}\nrule: {name: fedbuff, buffer_size: 4, staleness: inverse_sqrt}",
            "{steps: 1}, importance: samples}\nrule: {name: area, every: 2}",
            "area would converge to another model",
        ),
        ("stop:", "bounds: {norm: 1}\nstop:", "the server sees no single update whose norm"),
        ("cpu: 0.1", "cpu: 0.1, link: {compression: {kind: int8}}", "masked updates look random"),
    ],
)
def test_invalid_privacy_settings_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(BadInputError) as refused:
        topology.parse(BASE.replace(old, new))
    assert message in str(refused.value)
    assert "<text>:" in str(refused.value)  # the place


def test_rule_or_model_that_cannot_be_summed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match="has buffers, such as BatchNorm's"):
        model_check.check(topology.parse(BASE.replace("digits-logreg", "cifar10-resnet18")))
    monkeypatch.setattr(FedBuff, "sums", lambda _: Sums(1))  # as a user's own rule may declare it
    with pytest.raises(BadInputError, match="a sum of one update"):
        topology.parse(BASE)


DIFFERENTIAL = BASE.replace("secure: {colluding: 1, needed: 3}", "differential: {clip: 1, noise: 2}")


def test_differential_privacy_settings() -> None:
    parsed = topology.parse(DIFFERENTIAL)
    found = parsed.differential
    assert found is not None
    assert (found.clip, found.noise, found.at, found.delta) == (1, 2, "client", 1e-5)
    (told,) = parsed.update_steps
    assert told.name == "differential"
    assert (told.params["seed"], told.params["rounding"]) == (parsed.seed, 0.0)
    assert topology.parse(parsed.to_yaml()) == parsed
    for at, norm in (("server", 1.5), ("client", None)):  # what has noise may be longer
        both = f"differential: {{clip: 1.5, noise: 2, at: {at}}}, secure: {{needed: 3}}"
        secure = topology.parse(BASE.replace("secure: {colluding: 1, needed: 3}", both)).secure
        assert secure is not None
        assert secure.norm == norm
    for old, new, message in [
        (
            "fedbuff, buffer_size: 4, staleness: inverse_sqrt",
            "area, every: 2",
            "clients of area remember",
        ),
        ("noise: 2", "noise: 0", "expected a number above 0"),
        ("noise: 2", "noise: 2, delta: 0", "delta: found 0, expected above 0"),
        ("stop:", "durability: checkpoint\nstop:", "write durability: update"),
    ]:
        with pytest.raises(BadInputError) as refused:
            topology.parse(DIFFERENTIAL.replace(old, new))
        assert message in str(refused.value)
    compressed = DIFFERENTIAL.replace("cpu:", "link: {compression: {kind: int8}}, cpu:")
    assert topology.parse(compressed).differential
    with pytest.raises(BadInputError, match="compression comes after clipping"):
        topology.parse(compressed.replace("noise: 2", "noise: 2, at: server"))
    fedasync = DIFFERENTIAL.replace("fedbuff, buffer_size: 4, staleness: inverse_sqrt", "fedasync")
    assert topology.parse(fedasync).differential
    with pytest.raises(BadInputError, match="does not sum up buffered updates"):
        topology.parse(fedasync.replace("noise: 2", "noise: 2, at: server"))


@pytest.mark.parametrize(
    ("at", "bits", "refused"), [("server", 7, False), ("server", 6, True), ("client", 6, False)]
)
def test_rounding_must_leave_room_below_the_clip_norm(at: str, bits: int, refused: bool) -> None:
    """With 650 parameters rounding to steps of 1/63 adds up to 0.40 to the length, to steps of 1/31 up
    to 0.82; client noise is added before it."""
    privacy = f"secure: {{needed: 3, bits: {bits}}}, differential: {{clip: 1, noise: 2, at: {at}}}"
    parsed = topology.parse(BASE.replace("secure: {colluding: 1, needed: 3}", privacy))
    if not refused:
        assert model_check.check(parsed) == 650
        return
    with pytest.raises(BadInputError, match=r"of 650 parameters longer by 0\.82"):
        model_check.check(parsed)
