"""The run directory, which is kept after the run (docs/guide/run-directory.md)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from agents.disk import files
from agents.texts import make_printable, name_list
from analysis import manifest
from testbed.errors import BadInputError, reading_run
from testbed.rundir import finding

_MAX_TAIL_BYTES = 4 * 2**20
"""Bytes at the end of a log that are searched for its last lines."""
_MAX_LINE = 1000
"""Characters of a log line in an error message. A device may have written the line."""
_START_TOLERANCE_SECONDS = 2.0
"""Difference between a process's recorded start time and the one that the kernel reports. The kernel
derives start times from the wall clock, which may be adjusted."""


class RunDirectory:
    """The folder `work/` is used only while the run is live, and is removed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path.name
        self.topology = path / "topology.yaml"
        """With all default values."""
        self.profiles = path / "profiles.yaml"
        """Device profiles and link classes that the topology names."""
        self.measured = path / "measured.yaml"
        """Measurements on the host for this run (`testbed.plan.machines`)."""
        self.fleet = path / "fleet.json"
        """Keys of drawn devices, only if a group of the topology has
        `draw`."""
        self.code = path / "code"
        """Copy of the user's own code (`testbed.user_code`)."""
        self.manifest = path / "manifest.json"
        self.events = path / "events.jsonl"
        self.inputs = path / "inputs.bin"
        """The aggregator's inputs (`agents.aggregator.recording`), only if `durability` is
        `recording`."""
        self.telemetry = path / "telemetry.jsonl"
        self.fidelity = path / "fidelity.json"
        self.models = path / "models"
        self.start = path / "start.safetensors"
        """Initial state of the model, only if the topology gives `task.initial`, or if some parameters
        are not trained."""
        self.hosts = path / "hosts.json"
        """Real devices, only while anything of the run may be left on them."""
        self.logs = path / "logs"
        """One `<process name>.log` per process: aggregator, broker, controller and every device."""
        self.work = path / "work"
        """Shards, agents' configurations, and broker configuration, until the run has ended."""
        self.state = path / "state"
        """For resuming an interrupted run."""
        self.aggregator_state = self.state / "aggregator"
        """The aggregator's checkpoint and, if the run is not recorded, its input log."""
        self.disks = self.state / "clients"
        """One folder per client, for the files that it keeps across restarts."""
        self.checkpoint = self.aggregator_state / "checkpoint.bin"
        self.orders = self.work / "orders"
        """Users' commands during the run (`testbed.rundir.live_files`)."""
        self.control = self.work / "control"
        """The broker's Unix socket, if devices are containers."""
        self.mps = self.work / "mps"
        """Pipes of NVIDIA's MPS, if containers share a GPU."""
        self.test_set = self.work / "test.safetensors"
        self.device_set = self.work / "devices.safetensors"
        """Samples of each device, on which the global model is evaluated, only if the topology asks for
        an evaluation per device."""

    @classmethod
    def new(cls, runs: Path, name: str) -> RunDirectory:
        """The id, `<topology name>-<date>-<time>-<4 hex digits>` in local time, is one that no other run
        in `runs` has. Raises BadInputError."""
        while True:
            run = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            directory = cls((runs / run).resolve())
            directory._check_path()
            try:
                directory.path.mkdir(parents=True)
            except OSError as error:
                if directory.path.is_dir():  # another run began in the same second
                    continue
                raise directory._creation_error(error) from error
            directory.open()
            return directory

    @classmethod
    def create(cls, runs: Path, run: str) -> RunDirectory:
        """Other users have no access to `work/`, because it holds secrets."""
        directory = cls((runs / run).resolve())
        directory.open()
        return directory

    def open(self) -> None:
        """Folders that exist are kept. Raises BadInputError."""
        try:
            for folder in (self.models, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._creation_error(error) from error

    def _check_path(self) -> None:
        """Raises BadInputError unless the bytes of the path are its text in UTF-8. Brokers, agents and
        engines get the text."""
        path = str(self.path)
        if os.fsencode(path) != path.encode("utf-8", "replace"):
            raise BadInputError(
                f"the path of the run directory {make_printable(path, _MAX_LINE)} is not UTF-8 here: "
                "name another folder with --runs or, if its name is UTF-8 and this locale is not, set "
                "PYTHONUTF8=1"
            )

    def _creation_error(self, error: OSError) -> BadInputError:
        return BadInputError(
            f"cannot make the run directory {self.path} ({error.strerror}); "
            "name a folder that you may write to with --runs"
        )

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def config(self, name: str) -> Path:
        """JSON configuration (agents.config) of one process."""
        return self.work / f"{name}.json"

    def shard(self, client: str) -> Path:
        return self.work / f"{client}.shard.safetensors"

    def share(self, client: str) -> Path:
        """CPU share of one local process, in cores."""
        return self.work / f"{client}.share"

    def disk(self, client: str) -> Path:
        """Folder of the files that a client keeps across restarts: the memory of its rule (such as
        AREA's), and unacknowledged updates."""
        return self.disks / client

    def write_manifest(self, **entries: Any) -> None:
        """Merge `entries`. If this process crashes during the write, the old file is kept."""
        merged = {**self._read_manifest(manifest.read_compact), **entries}
        with files.atomic_write(self.manifest) as partial:
            partial.write_text(_lines(merged), encoding="utf-8")

    def read_manifest(self) -> dict[str, Any]:
        """Empty if the run has no manifest. Raises BadInputError."""
        return self._read_manifest(manifest.read)

    def _read_manifest(self, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        with reading_run(self.path), suppress(FileNotFoundError):
            return read(self.manifest)
        return {}

    def devices(self, name: str) -> list[str]:
        """The device `name`, or the devices of the group `name`. Raises BadInputError if neither
        exists."""
        known: dict[str, dict[str, Any]] = self.read_manifest().get("devices", {})
        found = [device for device, facts in known.items() if name in (device, facts["group"])]
        if not found:
            names = list(dict.fromkeys([*(facts["group"] for facts in known.values()), *known]))
            raise BadInputError(f"{self.run} has no device {name}; it has {name_list(names)}")
        return found

    def targets(self, name: str) -> list[str]:
        """A segment, a device, or the devices of a group. Raises BadInputError if there is none."""
        return [name] if name in self.read_manifest().get("segments", {}) else self.devices(name)

    def claim(self) -> None:
        """Record in the manifest that the run is live, and that this process is its controller."""
        me = {"pid": os.getpid(), "started": psutil.Process().create_time()}
        self.write_manifest(controller=me, outcome=None, error=None)

    def controller(self) -> psutil.Process | None:
        """None if the run has an outcome, or if the controller's process has died."""
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
        """Begin a new leg of the telemetry with a line that has the Unix time at which the
        telemetry's clock was 0. This time can differ between legs, because the clock stands still
        while the host sleeps and starts again when the host restarts."""
        with self.telemetry.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read() != b"\n"  # a crash has cut the last line
                file.write(b"\n" * torn)
            clock = {"monotonic_zero": self.read_manifest()["monotonic_zero"]}
            file.write(json.dumps(clock).encode() + b"\n")

    def log_tail(self, component: str, lines: int = 12) -> str:
        """Text to append to an error message; empty if the process has no log."""
        path = self.log(component)
        try:
            tail = last_log_lines(path, lines)
        except OSError:
            return ""
        shown = (make_printable(line, _MAX_LINE, keep="\t") for line in tail)
        return "\n    ".join([f"\nThe end of {path}:", *shown])

    def remove_work(self) -> None:
        """Results, and the state for resuming the run, are kept."""
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_state(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)


def find_run(run: str, runs: Path, *, live: bool = False) -> RunDirectory | None:
    """`run`: an id in `runs`, a path, or the beginning of either. `live`: if `run` is the beginning of
    several ids, prefer a live run. Raises BadInputError if several runs match."""
    path = finding.find_directory(
        run, runs, lambda one: live and RunDirectory(one).controller() is not None
    )
    return None if path is None else RunDirectory(path.resolve())


def _lines(entries: dict[str, Any]) -> str:
    """One line per entry. If an entry is an object, it has one line per key, such as one per device.

    The option `indent` of json.dumps is not used, because it disables json's C encoder: 100,000 devices
    would take seconds.
    """
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


def last_log_lines(path: Path, lines: int) -> list[str]:
    """Only the last 4 MiB of the file are read. Raises OSError."""
    with files.open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL_BYTES))
        return last_lines(file.read(_MAX_TAIL_BYTES), lines)


def last_lines(text: bytes, lines: int) -> list[str]:
    return text.decode("utf-8", "replace").splitlines()[-lines:]
