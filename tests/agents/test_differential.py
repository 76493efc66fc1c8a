"""Clipping and noise, at the client and once per version at the server."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from agents.aggregator import actions as act
from agents.client.core import ClientCore, ClientIdentity, Outcome, SendUpdate, Trained
from agents.config import Named
from agents.models.vectors import Vector
from agents.pipeline.differential import DifferentialPrivacy, DifferentialRun, Privatiser
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import ClientSide, Kind
from agents.secure.arithmetic import Grid
from agents.wire.payloads import ModelMessage, UpdateMessage
from tests.agents.helpers import client_rule, done, message, of, started

_D = 10_000


def _privatiser(at: str, clip: float = 2.0, noise: float = 0.5, **more: float) -> Privatiser:
    settings = _settings(clip=clip, noise=noise, at=at, **more)
    return Privatiser(settings, np.random.default_rng)


def _settings(**values: Any) -> DifferentialRun:
    return DifferentialRun(seed=1, **values)


def _private(privatiser: Privatiser, dispatch: int, change: Vector) -> Vector:
    return privatiser.apply(change, 1, dispatch)


_NOISE = Named("differential", asdict(_settings(clip=1.0, noise=3.0, at="server")))


def test_only_updates_over_the_clip_norm_are_clipped() -> None:
    long, short = np.full(_D, 0.1, np.float32), np.full(_D, 0.01, np.float32)  # norms 10 and 1
    server = _privatiser("server")
    assert np.linalg.norm(_private(server, 1, long)) == pytest.approx(2.0, rel=1e-5)
    assert np.array_equal(_private(server, 1, short), short)
    assert np.array_equal(long, np.full(_D, 0.1, np.float32))  # the trained model is not changed


@pytest.mark.parametrize("size", [10_000, 10_000_000])
@pytest.mark.parametrize("value", [0.03, 0.1, 0.7, 3.0])
def test_clipped_norm_never_exceeds_clip(size: int, value: float) -> None:
    """Each element is rounded in the same direction, and in float32 the norm would be 0.1 % off."""
    private = _private(_privatiser("server"), 1, np.full(size, value, np.float32))
    length = math.sqrt(size) * float(private[0])
    assert 2.0 * (1 - 1e-6) < length <= 2.0


def test_rounded_update_in_a_sum_never_exceeds_clip() -> None:
    """Rounding lengthens: an update that was clipped to 2 comes to 2.04."""
    grid, rng = Grid(range=1.0, bits=8), np.random.default_rng(1)
    long = np.full(_D, 0.1, np.float32)
    plain = _privatiser("server")
    assert np.linalg.norm(grid.as_sent(_private(plain, 1, long), rng)) > 2.02
    told = _privatiser("server", rounding=grid.step)
    assert np.linalg.norm(_private(told, 1, long)) == pytest.approx(2.0 - 100 / 127, rel=1e-5)
    assert np.linalg.norm(grid.as_sent(_private(told, 1, long), rng)) < 2.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_diverged_training_reveals_nothing(wrong: float) -> None:
    """Not even its finite coordinates are sent, because they cannot be clipped."""
    change = np.full(_D, 1000, np.float32)
    change[0] = wrong
    for at in ("client", "server"):
        assert np.isnan(_private(_privatiser(at), 1, change)).all()


def test_client_noise_has_its_deviation_and_differs_per_update() -> None:
    client = _privatiser("client")
    zero = np.zeros(_D, np.float32)
    first, second = _private(client, 1, zero), _private(client, 2, zero)
    assert first.std() == pytest.approx(1.0, rel=0.03)  # 0.5 · 2
    assert abs(first.mean()) < 0.05
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.05
    assert np.array_equal(first, _private(client, 1, zero))


@pytest.mark.parametrize("kind", ["delta", "model"])
def test_difference_of_a_model_is_clipped_and_its_loss_withheld(kind: Kind) -> None:
    """A model's difference to its base is clipped; with client noise the local loss is not sent."""
    start = np.full(4, 5.0, np.float32)
    for at, loss in (("client", math.nan), ("server", 0.25)):
        sent = _sent(kind, start, start + 3.0, _privatiser(at, clip=1.0, noise=1e-9))
        change = sent.vector - start if kind == "model" else sent.vector
        assert change == pytest.approx(np.full(4, 0.5), abs=1e-5)
        assert sent.loss == pytest.approx(loss, nan_ok=True)


def test_client_noise_is_not_repeated_after_a_restart() -> None:
    """A restarted client counts its updates from 1 again: two updates with the same noise would differ
    by none."""
    start = np.zeros(_D, np.float32)
    client = _privatiser("client")
    first, second = (_sent("delta", start, start, client, dispatch).vector for dispatch in (1, 2))
    assert np.linalg.norm(first - second) > np.linalg.norm(first)


def _sent(
    kind: Kind, start: np.ndarray, end: np.ndarray, privatiser: Privatiser, dispatch: int = 1
) -> UpdateMessage:
    """Send one update from a newly started client."""
    rule = client_rule(ClientSide(kind))
    core = ClientCore(ClientIdentity("run", "a", 10), lambda *_: 0, rule, [privatiser])
    core.on_model(ModelMessage(run="run", version=0, dispatch=dispatch, schema="s", vector=start), 0)
    core.on_trained(Trained(lambda: Outcome(end, 0.25), 1, 0, 0))
    (send,) = core.on_thought(0)
    assert isinstance(send, SendUpdate)
    return send.message()


def test_server_noise_is_added_once_per_version_scaled_to_the_heaviest_update() -> None:
    """Noise is added before the version is sent to any client. Two updates have weight 1/2 each."""
    core, server = started(FedBuff(buffer_size=2), w=np.zeros(_D, np.float32), steps=[_NOISE])
    zero = np.zeros(_D, np.float32)
    core.update("a", message("a", 1, vector=zero, **done(0.0)), 1, 1.0)
    assert not server.w.any()
    actions = core.update("b", message("b", 2, vector=zero, **done(0.0)), 1, 1.0)
    assert any(isinstance(action, act.Dispatch) for action in actions)
    assert server.w.std() == pytest.approx(1.5, rel=0.03)
    first = server.w.copy()
    core.update("a", message("a", 3, sequence=2, vector=zero, **done(1.0)), 1, 1.0)
    core.update("b", message("b", 4, sequence=2, base_version=1, vector=zero, **done(1.0)), 1, 1.0)
    assert server.version == 2
    assert abs(float(np.corrcoef(first, server.w - first)[0, 1])) < 0.05


@pytest.mark.parametrize("importance", [(0.7, 0.3), (0.3, 0.7)])
def test_server_noise_covers_the_heaviest_update(
    importance: tuple[float, float],
) -> None:
    """An update of norm C moves the model by up to 0.7 C, whichever comes last: with noise for 0.3 of it
    the run would be less than half as private as it says."""
    core, server = started(
        FedAvg(),
        w=np.zeros(_D, np.float32),
        importance=dict(zip("ab", importance, strict=True)),
        steps=[_NOISE],
    )
    zero = np.zeros(_D, np.float32)
    core.end_of_instant(0.0)
    for number, client in enumerate("ab", 1):
        core.update(client, message(client, number, vector=zero, **done(0.0)), 1, 1.0)
    assert server.version == 1
    assert server.w.std() == pytest.approx(0.7 * 3.0, rel=0.03)


def test_server_noise_follows_the_staleness_discount() -> None:
    """The fresh update has the weight 1/2, the one that is 3 versions old half of that."""
    core, server = started(
        FedBuff(buffer_size=2, staleness="inverse_sqrt"),
        w=np.zeros(_D, np.float32),
        steps=[_NOISE],
    )
    zero = np.zeros(_D, np.float32)
    number, version = 1, 0
    for sequence in range(1, 8):  # of a, which make three versions and half of the fourth
        at = float(sequence)
        fields = done(at - 1) | {"sequence": sequence, "base_version": version, "vector": zero}
        actions = core.update("a", message("a", number, **fields), 1, at)
        (dispatch,) = of(act.Dispatch, actions)
        number, version = dispatch.number, dispatch.version
    before = server.w.copy()
    core.update("b", message("b", 2, vector=zero, **done(0.0)), 1, 8.0)
    assert server.version == 4
    assert (server.w - before).std() == pytest.approx(3.0 / 2, rel=0.03)


def test_delta_must_be_positive() -> None:
    with pytest.raises(ValueError, match="delta is 0, expected above 0"):
        DifferentialPrivacy(clip=1.0, noise=1.0, delta=0.0)
