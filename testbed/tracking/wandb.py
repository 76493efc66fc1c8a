"""Weights & Biases, configured by its environment variables, such as WANDB_MODE=offline, WANDB_PROJECT
and WANDB_DIR."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from testbed.tracking.following import Facts, Point


class WandbTracker:
    """Run in WANDB_PROJECT, else in a project named like the topology. The axis `device_time` is in
    seconds."""

    def __init__(self, run: Path) -> None:
        self._run: Any = None

    def begin(self, facts: Facts) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or facts.study,
            id=facts.run,
            name=facts.run,
            group=facts.tags.get("testbed.rule"),
            config={**facts.parameters, **facts.tags},
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric("device_time", hidden=True)
        self._run.define_metric("*", step_metric="device_time")

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "device_time": point.at})

    def end(self, outcome: str, files: Sequence[Path]) -> str:
        self._run.summary["outcome"] = outcome
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")
        where = self._run.url or self._run.dir
        self._run.finish(exit_code=int(outcome in ("failed", "crashed", "interrupted")))
        return f"W&B run at {where}"
