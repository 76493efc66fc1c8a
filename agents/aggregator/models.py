"""The run's models: how the first one comes about, and how they are kept."""

from __future__ import annotations

from pathlib import Path

import torch

from agents import files, wire
from agents.tasks.interface import Task
from agents.vectors import Vector


def first(task: Task, seed: int) -> torch.nn.Module:
    """The model that the run with this seed begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task.model()


def save(folder: Path, name: str, w: Vector, version: int, schema: str) -> None:
    """Write `folder/<name>.safetensors` to the disk; a crash leaves no half file by that name."""
    metadata = {"version": str(version), "schema": schema}
    files.save(folder / f"{name}.safetensors", wire.pack(w, metadata))
