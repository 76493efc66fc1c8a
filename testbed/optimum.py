"""Where a run of the quadratic task ended, against where it should have: its optimum is known exactly.

f(w) = Σ p_i ½‖w − c_i‖² has its minimum at Σ p_i c_i. A rule that gives client i the share q̃_i of all
weight heads for Σ q̃_i c_i instead (Fraboni et al. 2023): the *surrogate optimum*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agents import wire
from agents.vectors import Vector
from analysis.load import Run

_SHOWN = 4
"""Elements of a vector that are shown."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Vectors of shape (d,), in float64."""

    final: Vector
    optimum: Vector
    surrogate: Vector
    """By the weights that the updates were given; NaN without any."""

    @property
    def distance(self) -> float:
        """Of the final model from the optimum."""
        return float(np.linalg.norm(self.final - self.optimum))

    def lines(self) -> list[str]:
        """For people."""
        off = float(np.linalg.norm(self.surrogate - self.optimum))
        return [
            f"final model       {_shown(self.final)}  {self.distance:.3g} from the optimum",
            f"optimum           {_shown(self.optimum)}",
            f"surrogate optimum {_shown(self.surrogate)}  {off:.3g} from it, by the weights given",
        ]


def ending(run: Run) -> Ending | None:
    """None for a run of another task, or one that has no final model."""
    task = run.topology.get("task", {})
    path = run.path / "models" / "final.safetensors"
    if task.get("name") != "quadratic" or not path.is_file():
        return None
    final, _ = wire.unpack(path.read_bytes())
    devices: Mapping[str, Mapping[str, float]] = run.manifest["devices"]
    centers = np.array(task["centers"], np.float64)
    importance = np.array([device["importance"] for device in devices.values()])
    given = run.updates.groupby("client")["weight"].sum().reindex(list(devices), fill_value=0.0)
    weights = given.to_numpy(np.float64)
    with np.errstate(invalid="ignore"):
        surrogate = weights @ centers / weights.sum()
    return Ending(final.astype(np.float64), importance @ centers, surrogate)


def _shown(vector: Vector) -> str:
    more = " …" if len(vector) > _SHOWN else ""
    return "(" + ", ".join(f"{value:.6g}" for value in vector[:_SHOWN]) + more + ")"
