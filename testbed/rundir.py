"""The run directory: what outlives a run (ARCHITECTURE.md, "Run directory")."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def new_run_id(name: str) -> str:
    """`<topology name>-<date>-<time>-<4 hex digits>`, in local time, unique even within one second."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names every file of one run. `work/` holds what only the living run needs; teardown removes it."""

    path: Path

    @classmethod
    def create(cls, runs: Path, run: str) -> RunDirectory:
        """Make `runs/run` and its folders. `work/` is closed to other users: it holds the secrets."""
        directory = cls((runs / run).resolve())
        directory.open()
        return directory

    def open(self) -> None:
        """Make what a living run needs; what is there already stays."""
        for folder in (self.models, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(mode=0o700, exist_ok=True)

    @property
    def run(self) -> str:
        return self.path.name

    @property
    def topology(self) -> Path:
        """The resolved topology, every default spelled out."""
        return self.path / "topology.yaml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry.jsonl"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def logs(self) -> Path:
        """One `<process name>.log` each: aggregator, broker, controller and every device."""
        return self.path / "logs"

    @property
    def work(self) -> Path:
        """Shards, agents' configurations, broker configuration; gone when the run has ended."""
        return self.path / "work"

    def config(self, name: str) -> Path:
        """The JSON configuration (agents.config) of one process."""
        return self.work / f"{name}.json"

    def shard(self, client: str) -> Path:
        return self.work / f"{client}.shard.safetensors"

    @property
    def test_set(self) -> Path:
        return self.work / "test.safetensors"

    def write_manifest(self, **entries: Any) -> None:
        """Merge `entries` into manifest.json; a crash in mid-write leaves the old file."""
        merged = {**self.read_manifest(), **entries}
        partial = self.manifest.with_suffix(".json.partial")
        partial.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.manifest)

    def read_manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return manifest

    def remove_work(self) -> None:
        """Take the secrets and shards away; what remains is for reading."""
        shutil.rmtree(self.work, ignore_errors=True)


def listing(runs: Path) -> list[dict[str, Any]]:
    """One row for each run directory in `runs`, oldest first."""
    rows = []
    for path in sorted(runs.glob("*/manifest.json")) if runs.is_dir() else []:
        manifest = RunDirectory(path.parent).read_manifest()
        created = manifest.get("created")
        rows.append(
            {
                "run": path.parent.name,
                "created": created and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
                "rule": manifest.get("rule"),
                "task": manifest.get("task"),
                "runtime": manifest.get("runtime"),
                "devices": len(manifest.get("devices", {})),
                "outcome": manifest.get("outcome"),
            }
        )
    return sorted(rows, key=lambda row: row["created"] or "")
