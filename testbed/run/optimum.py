"""Comparison of the final model of a run of the quadratic task with the optimum, which is known exactly.

The global loss f(w) = Σ p_i ½‖w − c_i‖² has its minimum at Σ p_i c_i. A biased run converges to another
point, its *surrogate optimum*. If all devices do the same local training, this point is known for two
kinds of rules:

- Rules that add progress, w ← w + η Σ ω_i Δ_i (deltas or gradients), converge to Σ q̃_i c_i. Here q̃_i
  is client i's share of the sum of all weights applied (Fraboni et al. 2023, for small steps).
- AREA adds residuals. Because x + u = Σ p_i y_i, a client has the weight p_i, independent of how often
  the client reports (Iakovidou & Kim 2024). While all clients are present, AREA converges to Σ p_i c_i,
  the optimum.

For rules that mix models (`fedasync`, `fedfa` with `param`, `as_fedavg`, `favano`), no such result is
known. A model made from an old version also moves the global model back towards that version, so that
the logged weights do not determine where the global model ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.models.vectors import Vector
from agents.wire import payloads
from analysis.load import Run

_SHOWN = 4
"""Elements of a vector to show."""
_ADDED = {"delta", "gradient"}
"""Kinds of updates that are added to w."""
_OF_ONE_VERSION = {"fedavg"}
"""Rules that mix models made from the current version. Mixing such models has the same result as adding
the models' deltas."""


@dataclass(frozen=True, slots=True)
class OptimumComparison:
    """Vectors have shape (d,) and are float64."""

    final: Vector
    optimum: Vector
    surrogate: Vector | None
    """Point to which the run converges by theory; None if no theory applies."""

    @property
    def distance(self) -> float:
        return float(np.linalg.norm(self.final - self.optimum))

    def lines(self) -> list[str]:
        lines = [
            f"final model       {_format_vector(self.final)}  {self.distance:.3g} from the optimum",
            f"optimum           {_format_vector(self.optimum)}",
        ]
        if self.surrogate is not None:
            off = float(np.linalg.norm(self.surrogate - self.optimum))
            heading = f"{_format_vector(self.surrogate)}  {off:.3g} from it"
            lines.append(f"surrogate optimum {heading}, where the run converges by theory")
        return lines


def compare_with_optimum(run: Run) -> OptimumComparison | None:
    """None if the run has another task or no final model."""
    task = run.topology.get("task", {})
    path = run.path / "models" / "final.safetensors"
    if task.get("name") != "quadratic" or not path.is_file():
        return None
    final, _, _ = payloads.unpack(path.read_bytes())
    devices: Mapping[str, Mapping[str, float]] = run.manifest["devices"]
    centers = np.array(task["centers"], np.float64)
    importance = np.array([device["importance"] for device in devices.values()])
    weights = _center_weights(run, importance)
    surrogate = None if weights is None else weights @ centers / weights.sum()
    return OptimumComparison(final.astype(np.float64), importance @ centers, surrogate)


def _center_weights(run: Run, importance: Vector) -> Vector | None:
    """Weights in the plan's order; None if no theory applies."""
    kinds = set(run.updates["kind"])
    if not kinds or not _is_same_training(run):
        return None
    if "residual" in kinds:
        return importance if _all_present(run) else None
    if not kinds <= _ADDED and run.topology["rule"]["name"] not in _OF_ONE_VERSION:
        return None
    given = run.updates.groupby("client", observed=False)["weight"].sum()
    return given.to_numpy(np.float64)


def _is_same_training(run: Run) -> bool:
    """Updates must have the same number of steps, too."""
    general = run.topology["task"].get("local", {})
    # A group whose devices are drawn or recorded has only the keys of the file.
    locals_ = [{**general, **group.get("local", {})} for group in run.topology["devices"]]
    alike = all(local == locals_[0] for local in locals_) and _is_linear(locals_[0])
    return alike and run.updates["steps"].nunique() == 1


def _is_linear(local: Mapping[str, Any]) -> bool:
    """Whether a client's progress is a constant factor times the vector from the client's starting point
    to the client's center. This is true for SGD without clipping and weight decay, and with a step size
    that does not change with the version."""
    others = ("clip", "clip_gradient", "weight_decay", "lr_by_version")
    return local.get("optimizer", "sgd") == "sgd" and not any(local.get(name) for name in others)


def _all_present(run: Run) -> bool:
    """Whether all clients are present at the end. Only in that case is AREA's point of convergence
    known."""
    states = dict.fromkeys(run.started.missing if run.started else (), "offline")
    states |= dict(zip(run.statuses["client"], run.statuses["state"], strict=True))
    return set(states.values()) <= {"ready"}


def _format_vector(vector: Vector) -> str:
    more = " …" if len(vector) > _SHOWN else ""
    return "(" + ", ".join(f"{value:.6g}" for value in vector[:_SHOWN]) + more + ")"
