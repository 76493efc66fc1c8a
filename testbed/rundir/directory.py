"""The run directory, which outlives the run (docs/guide/run-directory.md)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from agents.disk import files
from agents.texts import make_printable
from analysis import manifest
from testbed.errors import BadInputError, listed, reading

_MAX_TAIL_BYTES = 4 * 2**20
_MAX_LINE = 1000
"""Characters of a log line in an error message: a device may have written it."""
_START_TOLERANCE_SECONDS = 2.0
"""A process's start time is read from the wall clock, which may be set in between."""


def _run_id(name: str) -> str:
    """`<topology name>-<date>-<time>-<4 hex digits>`, in local time."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class RunDirectory:
    """The files and folders of one run. `work/` is for the living run alone; teardown removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path.name
        """The run's id."""
        self.topology = path / "topology.yaml"
        """The topology, every default spelled out."""
        self.profiles = path / "profiles.yaml"
        """The device profiles and link classes that it names."""
        self.measured = path / "measured.yaml"
        """What was measured on the host for the run (`testbed.plan.measured`)."""
        self.code = path / "code"
        """Own code (`testbed.own_code`), as it is run."""
        self.manifest = path / "manifest.json"
        self.events = path / "events.jsonl"
        self.inputs = path / "inputs.bin"
        """The aggregator's inputs, with `durability: recording` (`agents.aggregator.recording`)."""
        self.telemetry = path / "telemetry.jsonl"
        self.fidelity = path / "fidelity.json"
        self.models = path / "models"
        self.start = path / "start.safetensors"
        """State of the module at the start, where not all of it follows from the seed and is sent."""
        self.logs = path / "logs"
        """One `<process name>.log` each: aggregator, broker, controller and every device."""
        self.work = path / "work"
        """Shards, agents' configurations, broker configuration; gone when the run has ended."""
        self.state = path / "state"
        """What an interrupted run goes on from."""
        self.aggregator_state = self.state / "aggregator"
        """Its checkpoint, and its log of inputs where the run is not recorded."""
        self.disks = self.state / "clients"
        """What each client keeps over restarts."""
        self.checkpoint = self.aggregator_state / "checkpoint.bin"
        self.orders = self.work / "orders"
        """The folder of users' commands in mid-run (`testbed.rundir.commands`)."""
        self.control = self.work / "control"
        """The folder of the broker's Unix socket, where devices are containers."""
        self.mps = self.work / "mps"
        """The folder of MPS's pipes, where containers share a GPU."""
        self.test_set = self.work / "test.safetensors"
        self.device_set = self.work / "devices.safetensors"
        """Samples of each device that the global model is evaluated on, where that is asked for."""

    @classmethod
    def new(cls, runs: Path, name: str) -> RunDirectory:
        """Make one in `runs` for a new run of the topology of that name, under an id that no run there
        has. Raises BadInputError."""
        while True:
            directory = cls((runs / _run_id(name)).resolve())
            try:
                directory.path.mkdir(parents=True)
            except OSError as error:
                if directory.path.is_dir():  # begun in the same second
                    continue
                raise directory._unmade(error) from error
            directory.open()
            return directory

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
            raise self._unmade(error) from error

    def _unmade(self, error: OSError) -> BadInputError:
        return BadInputError(
            f"cannot make the run directory {self.path} ({error.strerror}); "
            "name a folder that you may write to with --runs"
        )

    def log(self, name: str) -> Path:
        """Of one process."""
        return self.logs / f"{name}.log"

    def config(self, name: str) -> Path:
        """The JSON configuration (agents.config) of one process."""
        return self.work / f"{name}.json"

    def shard(self, client: str) -> Path:
        return self.work / f"{client}.shard.safetensors"

    def disk(self, client: str) -> Path:
        """The folder of what a client keeps over restarts: its memory (AREA), and updates that are not
        acknowledged."""
        return self.disks / client

    def write_manifest(self, **entries: Any) -> None:
        """Merge `entries` into manifest.json; a crash in mid-write leaves the old file."""
        merged = {**self.read_manifest(), **entries}
        with files.atomic_write(self.manifest) as partial:
            partial.write_text(_lines(merged), encoding="utf-8")

    def read_manifest(self) -> dict[str, Any]:
        """The manifest's entries, none where there is no manifest. Raises BadInputError."""
        with reading(self.path), suppress(FileNotFoundError):
            return manifest.read(self.manifest)
        return {}

    def devices(self, name: str) -> list[str]:
        """The devices that `name`, of a device or of a group of devices, stands for. Raises
        BadInputError where there are none."""
        known: dict[str, dict[str, Any]] = self.read_manifest().get("devices", {})
        found = [device for device, facts in known.items() if name in (device, facts["group"])]
        if not found:
            names = list(dict.fromkeys([*(facts["group"] for facts in known.values()), *known]))
            raise BadInputError(f"{self.run} has no device {name}; it has {listed(names)}")
        return found

    def claim(self) -> None:
        """Write to the manifest that the run is live, and that this process is its controller."""
        me = {"pid": os.getpid(), "started": psutil.Process().create_time()}
        self.write_manifest(controller=me, outcome=None, error=None)

    def controller(self) -> psutil.Process | None:
        """The process that will write the outcome; None if there is an outcome, or it has died."""
        entries = self.read_manifest()
        claim = entries.get("controller")
        if not claim or entries.get("outcome"):
            return None
        try:
            process = psutil.Process(claim["pid"])
            same = abs(process.create_time() - claim["started"]) < _START_TOLERANCE_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    def begin_telemetry(self) -> None:
        """Note, before the samples of a segment of the run, what tells the time of their clock: after a
        reboot, or the host's sleep, it is another than before."""
        with self.telemetry.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read() != b"\n"  # by a crash
                file.write(b"\n" * torn)
            clock = {"monotonic_zero": self.read_manifest()["monotonic_zero"]}
            file.write(json.dumps(clock).encode() + b"\n")

    def log_tail(self, component: str, lines: int = 12) -> str:
        """The end of a process's log, to stand below an error message; empty if there is none."""
        path = self.log(component)
        try:
            tail = tail_of(path, lines)
        except OSError:
            return ""
        shown = (make_printable(line, _MAX_LINE, keep="\t") for line in tail)
        return "\n    ".join([f"\nThe end of {path}:", *shown])

    def remove_work(self) -> None:
        """Remove secrets and shards: what remains is results, and what the run can go on from."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_state(self) -> None:
        """The run is complete: remove what it would have gone on from."""
        shutil.rmtree(self.state, ignore_errors=True)


def _lines(entries: dict[str, Any]) -> str:
    """JSON with a line for each entry, and for each entry of an entry, such as a device: with `indent`,
    json does not use its encoder in C, and 100,000 devices take it seconds."""
    return _object(
        {
            key: _object({name: json.dumps(one) for name, one in value.items()}, "  ")
            if isinstance(value, dict) and value
            else json.dumps(value)
            for key, value in entries.items()
        }
    )


def _object(texts: dict[str, str], margin: str = "") -> str:
    lines = ",\n".join(f"{margin}  {json.dumps(key)}: {text}" for key, text in texts.items())
    return f"{{\n{lines}\n{margin}}}" + ("" if margin else "\n")


def tail_of(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a text file, in its last 4 MiB. Raises OSError."""
    with files.open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL_BYTES))
        return last_lines(file.read(_MAX_TAIL_BYTES), lines)


def last_lines(text: bytes, lines: int) -> list[str]:
    """The last `lines` lines of what a process has printed."""
    return text.decode("utf-8", "replace").splitlines()[-lines:]
