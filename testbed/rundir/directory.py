"""The run directory, which outlives the run (docs/run-directory.md)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import psutil

from agents import files
from testbed.errors import BadInputError

_START_TOLERANCE_SECONDS = 2.0
"""A process's start time is read from the wall clock, which may be set in between."""


def new_run_id(name: str) -> str:
    """`<topology name>-<date>-<time>-<4 hex digits>`, in local time, unique even within one second."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class RunDirectory:
    """The files and folders of one run. `work/` is for the living run alone; teardown removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path.name
        """The run's id."""
        self.topology = path / "topology.yaml"
        """The resolved topology, every default spelled out."""
        self.manifest = path / "manifest.json"
        self.events = path / "events.jsonl"
        self.inputs = path / "inputs.bin"
        """The aggregator's recorded inputs, where `record: updates` (`agents.aggregator.recording`)."""
        self.telemetry = path / "telemetry.jsonl"
        self.fidelity = path / "fidelity.json"
        self.models = path / "models"
        self.logs = path / "logs"
        """One `<process name>.log` each: aggregator, broker, controller and every device."""
        self.work = path / "work"
        """Shards, agents' configurations, broker configuration; gone when the run has ended."""
        self.orders = self.work / "orders"
        """The folder of users' commands in mid-run (`testbed.rundir.commands`)."""
        self.test_set = self.work / "test.safetensors"

    @classmethod
    def create(cls, runs: Path, run: str) -> RunDirectory:
        """Make `runs/run` and its folders. `work/` is closed to other users: it holds the secrets."""
        directory = cls((runs / run).resolve())
        directory.open()
        return directory

    def open(self) -> None:
        """Make what a living run needs; what is there already stays. Raises BadInputError."""
        try:
            for folder in (self.models, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise BadInputError(
                f"cannot make the run directory {self.path} ({error.strerror}); "
                "name a folder that you may write to with --runs"
            ) from error

    def config(self, name: str) -> Path:
        """The JSON configuration (agents.config) of one process."""
        return self.work / f"{name}.json"

    def shard(self, client: str) -> Path:
        return self.work / f"{client}.shard.safetensors"

    def memory(self, client: str) -> Path:
        """A client's memory across restarts (AREA), in a folder of its own."""
        return self.work / f"{client}.memory" / "memory.safetensors"

    def write_manifest(self, **entries: Any) -> None:
        """Merge `entries` into manifest.json; a crash in mid-write leaves the old file."""
        merged = {**self.read_manifest(), **entries}
        with files.whole(self.manifest) as partial:
            partial.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")

    def read_manifest(self) -> dict[str, Any]:
        """The manifest's entries, none where there is no manifest. Raises BadInputError."""
        try:
            manifest = json.loads(self.manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BadInputError(f"{self.manifest} is no manifest: {error}") from error
        if not isinstance(manifest, dict):
            raise BadInputError(f"{self.manifest} is no manifest: it holds no map")
        return manifest

    def claim(self) -> None:
        """Write to the manifest that the run is live, and that this process is its controller."""
        me = {"pid": os.getpid(), "started": psutil.Process().create_time()}
        self.write_manifest(controller=me, outcome=None, error=None)

    def controller(self) -> psutil.Process | None:
        """The process that will write the outcome; None if there is an outcome, or it has died."""
        manifest = self.read_manifest()
        claim = manifest.get("controller")
        if not claim or manifest.get("outcome"):
            return None
        try:
            process = psutil.Process(claim["pid"])
            same = abs(process.create_time() - claim["started"]) < _START_TOLERANCE_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    def last_words(self, part: str, lines: int = 12) -> str:
        """The end of a process's log, to stand below an error message; empty if there is none."""
        path = self.logs / f"{part}.log"
        if not path.is_file():
            return ""
        tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        return "\n".join(["", f"The end of {path}:", *(f"    {line}" for line in tail)])

    def remove_work(self) -> None:
        """Remove secrets and shards; all that remains is results."""
        shutil.rmtree(self.work, ignore_errors=True)


def listing(runs: Path) -> list[dict[str, Any]]:
    """One row for each run directory in `runs`, oldest first."""
    found = runs.glob("*/manifest.json") if runs.is_dir() else []
    rows = [row(RunDirectory(path.parent)) for path in sorted(found)]
    return sorted(rows, key=lambda row: row["created"] or "")


def row(directory: RunDirectory) -> dict[str, Any]:
    """Name, outcome and other facts of one run."""
    try:
        manifest = directory.read_manifest()
        outcome = manifest.get("outcome") or ("running" if directory.controller() else "crashed")
    except BadInputError:
        manifest, outcome = {}, "unreadable"
    created = manifest.get("created")
    return {
        "run": directory.run,
        "created": created and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
        "rule": manifest.get("rule"),
        "task": manifest.get("task"),
        "runtime": manifest.get("runtime"),
        "devices": len(manifest.get("devices", {})),
        "outcome": outcome,
    }
