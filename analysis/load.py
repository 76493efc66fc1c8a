"""A run directory as tables: of a finished run, or of one still going.

All times are in seconds of device time since the run clock started; sizes in bytes.

    run = load("runs/quickstart-20260101-120000-abcd")
    run.updates.groupby("group")["staleness"].mean()

    follower = Follower(Path("runs/..."))      # a run still going
    new = follower.read()["update"]            # rows since the last call
    run = follower.run()                       # all so far
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from agents import events
from agents.disk import files
from agents.disk.yaml_loader import Loader
from agents.texts import quantity
from agents.timing.clock import in_device_time
from analysis import manifest as manifests
from analysis import records

_MAX_TABLES = 50
"""Tables of one kind of record; more are concatenated."""
_MAX_BYTES = 64 * 2**20
"""Of `topology.yaml` and `fidelity.json`."""
_AFTER_SECONDS = 1.5
"""Of a segment of a run, until which samples still count to it: they are a second apart."""
_DEVICE = ("group", "profile", "cpu", "gflops", "speed", "memory", "samples", "importance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. A table has one row per record; its columns are the record's fields (`agents.events`).

    Names of clients, devices and groups are categoricals, in the order of the plan.
    """

    path: Path
    manifest: Mapping[str, Any]
    topology: Mapping[str, Any]
    starts: tuple[events.RunStarted, ...]
    """One for each segment of the run: a resumed one has several."""
    ended: events.RunEnded | None
    """None while the run goes on (a resumed one too), and where a crash ended it."""
    devices: pd.DataFrame
    """As planned: `device`, `group`, `profile`, `cpu` (share of one core), `gflops` (Gflop/s), `speed`
    (factor), `memory` (bytes), `samples`, `importance` (p_i, sums to 1). What is not given is NaN."""
    updates: pd.DataFrame
    """`events.UpdateApplied`, in the order of application, and the client's `group`. From `dispatched`
    to `applied`: s; `bytes`: of the payload."""
    versions: pd.DataFrame
    """`events.VersionMade`: `at` (s), `version`, `updates` that went into it."""
    evaluations: pd.DataFrame
    """`events.Evaluated`: `at` (s), `version`, `loss`, `accuracy` (share, 0 to 1); of a language
    task also `perplexity`, exp(loss)."""
    parts: pd.DataFrame
    """`events.EvaluatedPart`, where asked for: `at` (s), `version`, `part` (`class`, `device`), `name`,
    `samples`, `loss`, `accuracy` (share, 0 to 1)."""
    statuses: pd.DataFrame
    """`events.ClientStatus`: `at` (s), `client`, `state`."""
    rejected: pd.DataFrame
    """`events.UpdateRejected`: `at` (s), `client`, `reason`, `dispatch`."""
    clipped: pd.DataFrame
    """`events.UpdateClipped`: `at` (s), `client`, `norm` before."""
    unfinished: pd.DataFrame
    """`events.RoundUnfinished`: `at`, `dispatched`, `until` (s), `client`, `base_version` and
    `dispatch`."""
    notes: pd.DataFrame
    """`events.Note`: `at` (s), `message`."""
    scenario: pd.DataFrame
    """`events.Acted`, what was done to devices: `at` (s), `device`, `source`, `lateness` (s), `action`,
    and `details`, all that the record says, as JSON."""
    telemetry: pd.DataFrame
    """One row per sample: `device`, `at` (s), `cpu` (CPU time so far, s of one host core), `periods`,
    `throttled_periods` (CFS, so far), `throttled` (s), `memory` (bytes), `received`, `sent` (bytes so
    far), `up_busy` (s in which packets waited for the uplink, so far), `up_left`, `up_allowed` (bytes
    that left its queue then, and that its rate allows), likewise for `down`, `monotonic` (the host's
    clock in the last segment of the run, s). Without `monotonic_zero` in the manifest `at` is NaN."""
    probes: pd.DataFrame
    """What devices measured of their links: `device`, `at` (s), `up`, `down` (bit/s), `rtt`, `jitter`
    (s), `loss` (share), `monotonic` (s)."""
    fidelity: pd.DataFrame
    """`fidelity.json`, once the run has ended: `device`, `group`, `figure` (`cpu`, a share of one core;
    `up`, `down`, bit/s; `rtt`, `jitter`, s; `loss`, a share; `up_carried`, `down_carried`, shares of
    the rate that left while packets waited), `asked`, `got`, `error` (%)."""

    def __repr__(self) -> str:
        """One line: the tables are long."""
        made = f"{quantity(len(self.updates), 'update')} in {quantity(self.versions_made, 'version')}"
        devices = quantity(len(self.devices), "device")
        return f"<run {self.name}: {devices}, {made}, {self.duration:.1f} s>"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def started(self) -> events.RunStarted | None:
        """The first time, of a run that was resumed."""
        return next(iter(self.starts), None)

    @property
    def versions_made(self) -> int:
        """Global models made: the initial one is none, and a round without updates makes none."""
        recorded = self.versions["version"]
        return int(recorded[recorded > 0].nunique())

    @property
    def duration(self) -> float:
        """Seconds until the run ended, or until its last record or sample where it has not."""
        if self.ended is not None:
            return self.ended.at
        ats = [self.updates["applied"]]
        ats += [
            t["at"] for t in (self.versions, self.evaluations, self.statuses, self.rejected, self.notes)
        ]
        ats.append(self.telemetry["at"].dropna())
        return max([0.0, *(float(at.max()) for at in ats if len(at))])  # samples begin before the run

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table, by the name of its attribute."""
        return {
            name: table
            for name in self.__dataclass_fields__
            if isinstance(table := getattr(self, name), pd.DataFrame)
        }

    def export(self, folder: str | Path, form: Literal["parquet", "csv"] = "parquet") -> list[Path]:
        """Write every table to `folder`, which is made, as `<table>.<form>`; the files written.

        Raises ValueError for another form, OSError where the files cannot be written.
        """
        if form not in ("parquet", "csv"):
            raise ValueError(f"there is no form {form!r} to export to: use parquet or csv")
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = []
        for name, table in self.tables.items():
            paths.append(path := Path(folder) / f"{name}.{form}")
            if form == "csv":
                table.to_csv(path, index=False)
            else:
                table.to_parquet(path, index=False)
        return paths


class Follower:
    """One run directory, read as it grows."""

    def __init__(self, path: str | Path, newest: Mapping[str, int] = MappingProxyType({})) -> None:
        """`newest`: of these kinds of record (`records.SCHEMAS`, `telemetry`, `probe`) no more rows are
        held than that and a quarter; older ones are forgotten. Raises what `load` raises."""
        self.rows: Counter[str] = Counter()
        """Read so far, by kind of record; those forgotten included."""
        self._newest = newest
        self._path = Path(path)
        self._events = records.Tail(self._path / "events.jsonl")
        self._telemetry = records.Tail(self._path / "telemetry.jsonl")
        self._tables: dict[str, list[pa.Table]] = {
            **{kind: [records.empty(schema)] for kind, schema in records.SCHEMAS.items()},
            "telemetry": [records.empty(records.SAMPLES)],
            "probe": [records.empty(records.PROBES)],
            events.Acted.event: [records.empty(records.ACTIONS)],
        }
        self._zero: float | None = None
        """`monotonic_zero` of the newest samples."""
        self._topology = _topology(self._path / "topology.yaml")
        self._starts: list[events.RunStarted] = []
        """One of each segment of the run: a resumed one has several."""
        self._ended: events.RunEnded | None = None
        self._known: tuple[tuple[int, ...], dict[str, Any]] | None = None
        """The manifest, and the state of its file then."""
        self._manifest()

    def read(self) -> dict[str, pd.DataFrame]:
        """The rows since the last call, by kind of record (`update`, `version`, …: `records.SCHEMAS`;
        `telemetry` and `probe`, whose `at` is the host's monotonic clock); a kind without is left out.

        Raises ValueError, naming the line, for what cannot be read.
        """
        new: dict[str, list[pa.Table]] = {}
        for kind, table in self._take():
            new.setdefault(kind, []).append(table)
        return {kind: _frame(tables) for kind, tables in new.items()}

    def run(self) -> Run:
        """All so far, what is new included. Raises what `load` raises."""
        deque(self._take(), maxlen=0)
        manifest = self._manifest()
        devices = _devices(manifest)
        frames = {kind: _frame(tables) for kind, tables in self._tables.items()}
        updates = _planned(frames["update"], "client", devices)
        return Run(
            path=self._path,
            manifest=manifest,
            topology=self._topology,
            starts=tuple(self._starts),
            ended=self._ended,
            devices=devices,
            updates=updates.assign(group=_groups(updates["client"], devices)),
            versions=frames["version"],
            evaluations=_with_perplexity(frames["evaluation"], manifest),
            parts=_once(frames["evaluation_part"]),
            statuses=_planned(frames["status"], "client", devices),
            rejected=_planned(frames["rejected"], "client", devices),
            clipped=_planned(frames["clipped"], "client", devices),
            unfinished=_planned(frames["unfinished"], "client", devices),
            notes=frames["note"],
            scenario=_planned(frames[events.Acted.event], "device", devices),
            telemetry=_planned(self._in_device_time(frames["telemetry"], manifest), "device", devices),
            probes=_planned(self._in_device_time(frames["probe"], manifest), "device", devices),
            fidelity=_planned(_fidelity(self._path / "fidelity.json", manifest), "device", devices),
        )

    def _take(self) -> Iterator[tuple[str, pa.Table]]:
        """Read what is new, and hold it; the tables, by kind of record."""
        for block in self._events.blocks():
            found = records.parse_events(self._events, block)
            for kind, table in found.tables.items():
                self._hold(kind, table)
                yield kind, table
            acted = [record for record in found.others if isinstance(record, events.Acted)]
            if acted:
                self._hold(events.Acted.event, records.actions(acted))
            for record in found.others:
                match record:
                    case events.RunStarted():
                        manifests.check_format(self._events.path, record.format)
                        self._starts.append(record)
                        self._ended = None
                    case events.RunEnded():
                        self._ended = record
        for block in self._telemetry.blocks():
            samples, probes, self._zero = records.parse_samples(block, self._zero)
            for kind, table in (("telemetry", samples), ("probe", probes)):
                if table.num_rows:
                    self._hold(kind, table)
                    yield kind, table

    def _hold(self, kind: str, table: pa.Table) -> None:
        """Keep few tables, as concatenating them costs by their number, and no more rows than wanted."""
        self.rows[kind] += table.num_rows
        tables = self._tables[kind]
        tables.append(table)
        rows, newest = sum(one.num_rows for one in tables), self._newest.get(kind)
        if len(tables) > _MAX_TABLES or (newest is not None and rows > 1.25 * newest):
            whole = pa.concat_tables(tables).unify_dictionaries()
            self._tables[kind] = [whole.slice(max(0, rows - (newest or rows))).combine_chunks()]

    def _manifest(self) -> dict[str, Any]:
        path = self._path / "manifest.json"
        stat = path.stat()
        state = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if self._known is None or self._known[0] != state:
            self._known = state, manifests.read(path)
        return self._known[1]

    def _in_device_time(self, samples: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
        """Samples with `at` by the run clock. A resumed run has one for each of its segments; between
        two, while it is interrupted or about to go on, there is none, and `at` is NaN."""
        dilation = manifest.get("dilation", 1.0)
        zero = manifest.get("monotonic_zero", np.nan)
        # Not 0 where a reboot or sleep was between two segments.
        earlier = (samples["monotonic_zero"] - zero).fillna(0.0)
        monotonic = (samples["at"] + earlier).to_numpy()
        timed = samples.drop(columns="monotonic_zero").assign(at=np.nan, monotonic=monotonic)
        if self._starts:
            unix = monotonic + zero
            began = np.array([start.wall_clock for start in self._starts])
            at = np.array([start.at for start in self._starts])
            over = np.append(at[1:], np.inf)
            segment = np.maximum(np.searchsorted(began, unix, side="right") - 1, 0)
            found = at[segment] + (unix - began[segment]) / dilation
            timed["at"] = np.where(found <= over[segment] + _AFTER_SECONDS, found, np.nan)
        if "rtt" in timed:  # the link was measured by the host's clock
            measured = {name: timed[name] for name in records.PROBED}
            timed = timed.assign(**in_device_time(measured, dilation))
        return timed


class _Entry(BaseModel):
    """Of a topology, checked as far as it is looked at here."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str = "?"


class _Group(_Entry):
    link: dict[str, Any] | None = None


class _RecordedDifferential(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    noise: Annotated[float, Field(gt=0, le=1e18)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    at: Literal["client", "server"]


class _Privacy(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    differential: _RecordedDifferential | None = None


class _Topology(_Entry):
    rule: _Entry = _Entry()
    privacy: _Privacy | None = None
    task: _Entry = _Entry()
    devices: list[_Group] = []


class _Figure(BaseModel):
    model_config = ConfigDict(strict=True)
    asked: FiniteFloat | None
    got: FiniteFloat | None
    error: FiniteFloat | None


class _Measured(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # the figures, by name
    group: str


class _Fidelity(BaseModel):
    devices: dict[str, _Measured]


def load(path: str | Path) -> Run:
    """Read the run directory `path`. What is not written yet is empty, a torn last line is left out.

    Raises FileNotFoundError where there is no run, ValueError, naming the file and the line, for what
    cannot be read.
    """
    return Follower(path).run()


def load_many(where: str | Path | Iterable[str | Path]) -> list[Run]:
    """The runs of these directories, or those that lie in a folder, oldest first. Raises as `load`."""
    if not isinstance(where, str | Path):
        return [load(path) for path in where]
    runs = [load(path.parent) for path in sorted(Path(where).glob("*/manifest.json"))]
    if not runs:
        raise FileNotFoundError(f"{where} holds no run directory")
    return sorted(runs, key=lambda run: run.manifest.get("created") or 0.0)


def _frame(tables: list[pa.Table]) -> pd.DataFrame:
    table: pd.DataFrame = pa.concat_tables(tables).unify_dictionaries().to_pandas(split_blocks=True)
    return table


def _devices(manifest: Mapping[str, Any]) -> pd.DataFrame:
    planned = manifest.get("devices", {})
    rows = [[name, *(device.get(key) for key in _DEVICE)] for name, device in planned.items()]
    table = pd.DataFrame(rows, columns=["device", *_DEVICE])
    numbers = {key: pd.to_numeric(table[key]) for key in _DEVICE[2:]}
    named = {
        key: pd.Categorical(table[key], table[key].dropna().unique()) for key in ("device", "group")
    }
    return table.assign(**numbers, **named)


def _planned(table: pd.DataFrame, column: str, devices: pd.DataFrame) -> pd.DataFrame:
    """`column` with the plan's devices as its categories; who is not in the plan comes after them."""
    names = list(dict.fromkeys([*devices["device"], *table[column].unique()]))
    return table.assign(**{column: pd.Categorical(table[column], names)})


def _with_perplexity(evaluations: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
    if manifest.get("perplexity") is not True:
        return evaluations
    with np.errstate(over="ignore"):
        return evaluations.assign(perplexity=np.exp(evaluations["loss"]))


def _once(parts: pd.DataFrame) -> pd.DataFrame:
    """Without what an aggregator that was started again has evaluated anew."""
    return parts.drop_duplicates(["version", "part", "name"], keep="last", ignore_index=True)


def _groups(clients: pd.Series[str], devices: pd.DataFrame) -> pd.Categorical:
    groups = devices["group"].cat
    codes = np.full(len(clients.cat.categories), -1)
    codes[: len(devices)] = groups.codes  # the plan's devices are the first categories
    return pd.Categorical.from_codes(np.append(codes, -1)[clients.cat.codes], groups.categories)


def _topology(path: Path) -> dict[str, Any]:
    """What the run was to do; empty where there is no file yet."""
    try:
        with _names_file(path):
            found = Loader(files.read(path, _MAX_BYTES)).get_single_data()
            _Topology.model_validate(found)
    except FileNotFoundError:
        return {}
    return dict(found)


def _fidelity(path: Path, manifest: Mapping[str, Any]) -> pd.DataFrame:
    rows: list[tuple[Any, ...]] = []
    try:
        with _names_file(path):
            found = _Fidelity.model_validate(files.from_json(files.read(path, _MAX_BYTES)))
            for device, one in found.devices.items():
                for name, given in (one.model_extra or {}).items():
                    if isinstance(given, dict):
                        figure = _Figure.model_validate(given)
                        rows.append((device, one.group, name, figure.asked, figure.got, figure.error))
    except FileNotFoundError:
        pass
    except ValueError:
        if manifest.get("outcome"):  # else it may be about to be written
            raise
    table = pd.DataFrame(rows, columns=["device", "group", "figure", "asked", "got", "error"])
    numbers = {key: pd.to_numeric(table[key]) for key in ("asked", "got", "error")}
    return table.assign(**numbers, group=table["group"].astype("category"))


@contextmanager
def _names_file(path: Path) -> Iterator[None]:
    """Turns any error in what the file `path` says into a ValueError that names the file."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where or 'all of it'}: {first['msg']}") from None
    except RecursionError:
        raise ValueError(f"{path}: values are nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
