"""End of a run of the quadratic task against its predicted optimum, for records written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.events import ClientStatus, RunStarted, to_line
from agents.wire import payloads
from analysis.load import load
from testbed.run.optimum import OptimumComparison, compare_with_optimum
from tests.testbed import record_factories

LOCAL = {"steps": 5, "lr": 0.1, "clip": None}
GROUP = {"name": "d", "local": LOCAL}
IMPORTANCE = {"a": 0.5, "b": 0.3, "c": 0.2}
CENTERS = [[0.0, 0.0], [4.0, 0.0], [0.0, 8.0]]
OPTIMUM = [1.2, 1.6]


def update(client: str, weight: float, kind: str, steps: int = 5) -> str:
    made = record_factories.update(client, 1.0, dispatch=1)
    return to_line(replace(made, weight=weight, kind=kind, steps=steps, outside=0))


def ended(
    path: Path, lines: Sequence[str], groups: Sequence[Any] = (GROUP,), rule: str = "fedasync"
) -> OptimumComparison | None:
    """Records of a run whose final model is (1, 2)."""
    devices = {name: {"importance": p} for name, p in IMPORTANCE.items()}
    (path / "models").mkdir()
    final = np.array([1.0, 2.0], np.float32)
    (path / "models" / "final.safetensors").write_bytes(b"".join(payloads.pack(final, {})))
    (path / "manifest.json").write_text(json.dumps({"devices": devices}))
    task = {"name": "quadratic", "centers": CENTERS}
    topology = {"task": task, "devices": list(groups), "rule": {"name": rule}}
    (path / "topology.yaml").write_text(json.dumps(topology))
    (path / "events.jsonl").write_text("".join(lines))
    return compare_with_optimum(load(path))


def heads_for(
    path: Path, lines: Sequence[str], groups: Sequence[Any] = (GROUP,), rule: str = "fedasync"
) -> list[float] | None:
    found = ended(path, lines, groups, rule)
    assert found is not None
    assert found.optimum.tolist() == pytest.approx(OPTIMUM)
    return None if found.surrogate is None else found.surrogate.tolist()


@pytest.mark.parametrize("kind", ["delta", "gradient"])
def test_additive_rules_converge_to_the_centers_by_applied_weights(kind: str, tmp_path: Path) -> None:
    lines = [update("a", 0.25, kind), update("b", 0.5, kind), update("a", 0.25, kind)]
    assert heads_for(tmp_path, lines) == pytest.approx([2.0, 0.0])  # c was never heard


def test_area_converges_to_the_optimum_at_any_update_rates(tmp_path: Path) -> None:
    lines = [update("a", 0.5, "model"), *[update("a", 0.5, "residual")] * 9, update("b", 0.3, "model")]
    assert heads_for(tmp_path, lines) == pytest.approx(OPTIMUM)


@pytest.mark.parametrize(
    ("absent", "states", "known"),
    [
        ((), ["offline"], False),
        ((), ["offline", "joining"], False),
        ((), ["offline", "joining", "ready"], True),
        (("b",), [], False),
        (("b",), ["ready"], True),
    ],
)
def test_area_converges_elsewhere_if_a_client_never_contributes(
    absent: tuple[str, ...], states: list[str], known: bool, tmp_path: Path
) -> None:
    """Client b is absent at the start, or has these states after that."""
    begun = RunStarted(0.0, 1.7e9, tuple({*"abc"} - {*absent}), absent)
    later = [ClientStatus(2.0 + n, "b", state) for n, state in enumerate(states)]
    lines = [to_line(begun), update("a", 0.5, "residual"), *map(to_line, later)]
    assert (heads_for(tmp_path, lines) is not None) == known


def test_models_of_one_version_count_like_their_deltas_and_mixed_ones_not(tmp_path: Path) -> None:
    lines = [update("a", 0.5, "model"), update("b", 0.5, "model")]
    for name in ("mixed", "one version", "no update"):
        (tmp_path / name).mkdir()
    assert heads_for(tmp_path / "mixed", lines) is None
    assert heads_for(tmp_path / "one version", lines, rule="fedavg") == pytest.approx([2.0, 0.0])
    assert heads_for(tmp_path / "no update", []) is None


@pytest.mark.parametrize("kind", ["delta", "residual"])
@pytest.mark.parametrize("other", [{**LOCAL, "lr": 0.2}, {**LOCAL, "steps": 7}, {**LOCAL, "clip": 1.0}])
def test_unequal_local_training_has_no_predicted_optimum(
    kind: str, other: dict[str, Any], tmp_path: Path
) -> None:
    """A client that trains further than another counts for more than its weight."""
    lines = [update("a", 0.5, kind), update("b", 0.5, kind)]
    assert heads_for(tmp_path, lines, [GROUP, {"name": "e", "local": other}]) is None


def test_clipped_or_interrupted_updates_have_no_predicted_optimum(tmp_path: Path) -> None:
    lines = [update("a", 0.5, "delta"), update("b", 0.5, "delta")]
    for number, (group, more) in enumerate(
        [({"name": "d", "local": {**LOCAL, "clip": 1.0}}, []), (GROUP, [update("b", 0.5, "delta", 2)])]
    ):
        (tmp_path / str(number)).mkdir()
        assert heads_for(tmp_path / str(number), [*lines, *more], [group]) is None


def test_optimum_is_described_in_words(tmp_path: Path) -> None:
    found = ended(tmp_path, [update("b", 0.5, "delta")])
    assert found is not None
    assert found.lines() == [
        "final model       (1, 2)  0.447 from the optimum",
        "optimum           (1.2, 1.6)",
        "surrogate optimum (4, 0)  3.22 from it, where the run converges by theory",
    ]
    (tmp_path / "mixed").mkdir()
    mixed = ended(tmp_path / "mixed", [update("b", 0.5, "model")])
    assert mixed is not None
    assert not any("surrogate" in line for line in mixed.lines())
