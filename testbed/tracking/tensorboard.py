"""TensorBoard: event files in the run directory, so that `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.tracking.following import Facts, Point


class TensorboardTracker:
    """Event files in RUN/tensorboard. A step is a millisecond of device time."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None
        self._began = 0.0

    def begin(self, facts: Facts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for earlier in self._folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._began = facts.began
        self._writer = SummaryWriter(str(self._folder))
        rows = [*facts.tags.items(), *facts.parameters.items()]
        text = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
        self._writer.add_text("parameters", text, 0, walltime=facts.began)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(
                    name, value, int(point.at * 1e3), walltime=self._began + point.at
                )
        self._writer.flush()

    def end(self, outcome: str, files: Sequence[Path]) -> str:
        for file in files:
            if file.suffix in (".json", ".yaml"):
                text = "\n".join(f"    {line}" for line in file.read_text(encoding="utf-8").splitlines())
                self._writer.add_text(file.name, text, 0, walltime=self._began)
        self._writer.add_text("outcome", outcome, 0, walltime=self._began)
        self._writer.close()
        return f"TensorBoard files in {self._folder}"
