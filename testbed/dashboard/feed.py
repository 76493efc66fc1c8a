"""One run directory, read as it grows: once for all who look at it, and in bounded memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis import manifest as manifests
from analysis.load import Follower, Run
from testbed.dashboard import live_fidelity
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory

_LIMITS = {"update": 500_000, "telemetry": 50_000, "rejected": 50_000, "unfinished": 200_000,
           "status": 200_000, "note": 1_000, "action": 1_000_000}  # fmt: skip
"""Rows that are held of each kind of record, of all the run's: about 200 MB at most."""
_LIMITS_LIVE = {**_LIMITS, "update": 100_000}
"""Of a run that goes on: the charts are computed of them twice a second."""
_FILES = ("manifest.json", "events.jsonl", "telemetry.jsonl", "fidelity.json")


class Feed:
    """`run` is None until the run has a plan, and where it cannot be read (`error` tells)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: Run | None = None
        self.error = ""
        self.updates = 0
        """Applied so far, whether they are held or not."""
        self.samples = 0
        """Of telemetry, likewise."""
        self.live = False
        self.generation = 0
        """Grows whenever there is something new."""
        self._follower: Follower | None = None
        self._seen: tuple[tuple[int, int] | None, ...] = ()

    def refresh(self) -> None:
        """Read what is new, if anything is."""
        seen = tuple(_state(self.path / name) for name in _FILES)  # before reading: nothing is missed
        live = is_live(self.path)
        if seen == self._seen and live == self.live:
            return
        self._seen, self.live = seen, live
        self.generation += 1
        try:
            self._read()
            self.error = "" if self.run is not None or self.live else _why_there_is_none(self.path)
        except FileNotFoundError as error:
            self.error = "" if self.run is None else f"{error.filename} is gone"
        except (ValueError, OSError) as error:
            self.error = f"cannot be read: {error}"
            self._follower = None  # from the start again, once the files have changed

    @property
    def held(self) -> int:
        """Updates that are held."""
        return 0 if self.run is None else len(self.run.updates)

    @property
    def held_samples(self) -> int:
        return 0 if self.run is None else len(self.run.telemetry)

    def _read(self) -> None:
        if self._follower is None:
            self._follower = Follower(self.path, _LIMITS_LIVE if self.live else _LIMITS)
        run = self._follower.run()
        if run.devices.empty:
            return
        self.updates, self.samples = (self._follower.rows[kind] for kind in ("update", "telemetry"))
        if run.fidelity.empty and not run.telemetry.empty:
            run = replace(run, fidelity=live_fidelity.so_far(run))
        self.run = run


def is_live(path: Path) -> bool:
    """Whether somebody runs it now; not where its manifest cannot be read."""
    try:
        return RunDirectory(path).controller() is not None
    except BadInputError:
        return False


def _why_there_is_none(path: Path) -> str:
    """Of a run without devices to show; empty where it is still to come."""
    manifest = manifests.read(path / "manifest.json")
    if not manifest.get("controller") and not manifest.get("outcome"):
        return ""
    error = manifest.get("error") or "see the log of its controller"
    return f"The run ended ({manifest.get('outcome') or 'killed'}) before it began: {error}"


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
