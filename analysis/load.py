"""A run directory as tables, for finished runs and during a run.

All times are in seconds of device time since the run clock started; sizes in bytes.

    run = load("runs/quickstart-20260101-120000-abcd")
    run.updates.groupby("group")["staleness"].mean()

    follower = Follower(Path("runs/..."))      # during the run
    new = follower.read()["update"]            # rows since the last call
    run = follower.run()                       # all rows so far
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from pyarrow import parquet
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from agents import events
from agents.disk import files
from agents.disk.yaml_loader import Loader
from agents.texts import quantity
from agents.timing.clock import in_device_time
from analysis import columns, records
from analysis import manifest as manifests
from analysis.features import PARTS, RECORDS, STREAMS, FeatureTables

_MAX_TABLES = 50
"""Tables of one kind of record, above which they are concatenated into one."""
_MAX_BYTES = 64 * 2**20
"""Maximum size of `topology.yaml` and `fidelity.json`."""
_AFTER_SECONDS = 1.5
"""Maximum between the end of a run's leg and a sample that still belongs to it. Samples are one
second apart."""
_DEVICE = ("group", "profile", "cpu", "gflops", "speed", "memory", "samples", "importance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(FeatureTables):
    """One run. Each table has one row per record, and its columns are the fields of the record
    (`agents.events`). `columns.COLUMNS` defines every column, with unit and sign.

    Names of clients, devices and groups are categoricals, in the order of the plan.
    """

    path: Path
    """The run directory."""
    manifest: Mapping[str, Any]
    """The content of `manifest.json`."""
    topology: Mapping[str, Any]
    """The content of `topology.yaml`; empty if that file was not written yet."""
    starts: tuple[events.RunStarted, ...]
    """The start of each leg of the run. A resumed run has several legs."""
    ended: events.RunEnded | None
    """The end of the run; None while it is running, and after a crash."""
    devices: pd.DataFrame
    """Devices as planned. Values that are not set are NaN."""
    updates: pd.DataFrame
    """`events.UpdateApplied`, in the order of application, with the `group` of the client."""
    versions: pd.DataFrame
    """`events.VersionMade`."""
    evaluations: pd.DataFrame
    """`events.Evaluated`. For language tasks also `perplexity`, which is exp(loss)."""
    parts: pd.DataFrame
    """`events.EvaluatedPart`. Empty if the topology does not request this evaluation."""
    statuses: pd.DataFrame
    """`events.ClientStatus`."""
    rejected: pd.DataFrame
    """`events.UpdateRejected`."""
    clipped: pd.DataFrame
    """`events.UpdateClipped`."""
    unfinished: pd.DataFrame
    """`events.RoundUnfinished`."""
    notes: pd.DataFrame
    """`events.Note`."""
    scenario: pd.DataFrame
    """`events.Acted`, the actions on devices; `details` is the whole action as JSON."""
    telemetry: pd.DataFrame
    """One row per sample. Without `monotonic_zero` in the manifest, `at` is NaN."""
    probes: pd.DataFrame
    """Links as measured by the devices."""
    fidelity: pd.DataFrame
    """Requested and measured figures (`fidelity.json`). Empty until the run has ended."""
    more: Mapping[str, pd.DataFrame]
    """Tables of features (`analysis.features`) by name. Each is an attribute, too, and empty if the
    topology does not have the feature."""

    if not TYPE_CHECKING:  # which knows those of FeatureTables, and no others

        def __getattr__(self, name: str) -> pd.DataFrame:
            if name != "more" and name in self.more:  # without `more`, while it is unpickled
                return self.more[name]
            raise AttributeError(f"a run has no attribute {name!r}")

    def __repr__(self) -> str:
        """The default would print the tables, which are long."""
        made = f"{quantity(len(self.updates), 'update')} in {quantity(self.versions_made, 'version')}"
        devices = quantity(len(self.devices), "device")
        return f"<run {self.name}: {devices}, {made}, {self.duration:.1f} s>"

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.name

    @property
    def started(self) -> events.RunStarted | None:
        """The first start of the run; None if the run has not started yet."""
        return next(iter(self.starts), None)

    @property
    def versions_made(self) -> int:
        """Number of global models made by aggregations. The initial model and rounds without updates do
        not count."""
        recorded = self.versions["version"]
        return int(recorded[recorded > 0].nunique())

    @property
    def duration(self) -> float:
        """Seconds until the run ended. If it has not ended, seconds until its last record or sample."""
        if self.ended is not None:
            return self.ended.at
        ats = [self.updates["applied"]]
        ats += [
            t["at"] for t in (self.versions, self.evaluations, self.statuses, self.rejected, self.notes)
        ]
        ats.append(self.telemetry["at"].dropna())
        # At least 0: samples start before the run.
        return max([0.0, *(float(at.max()) for at in ats if len(at))])

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """All tables, by the names of their attributes."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**{name: one for name, one in own.items() if isinstance(one, pd.DataFrame)}, **self.more}

    def export(self, folder: str | Path, form: Literal["parquet", "csv"] = "parquet") -> list[Path]:
        """Write every table to `folder` as `<table>.<form>`, and return the files. Create the folder if
        it does not exist. A Parquet file has the definition of each column as metadata
        (`columns.TableColumn`).

        Raises ValueError for another value of `form`, and OSError if a file cannot be written.
        """
        if form not in ("parquet", "csv"):
            raise ValueError(f"form is {form!r}, expected parquet or csv")
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = []
        for name, table in self.tables.items():
            paths.append(path := Path(folder) / f"{name}.{form}")
            if form == "csv":
                table.to_csv(path, index=False)
            else:
                parquet.write_table(columns.with_metadata(name, table), path)
        return paths


class Follower:
    """Reader of a run directory to which a run may still write."""

    def __init__(self, path: str | Path, newest: Mapping[str, int] = MappingProxyType({})) -> None:
        """`newest`: approximate maximum number of rows to keep, by kind of record (`records.SCHEMAS`,
        `records.TELEMETRY`). Up to a quarter more rows may be kept. Older rows are discarded. Raises
        the same errors as `load`."""
        self.rows: Counter[str] = Counter()
        """Read so far, by kind of record, with those that were discarded."""
        self._newest = newest
        self._path = Path(path)
        self._events = records.Tail(self._path / "events.jsonl")
        self._telemetry = records.Tail(self._path / "telemetry.jsonl")
        self._tables: dict[str, list[pa.Table]] = {
            **{kind: [records.empty(schema)] for kind, schema in records.SCHEMAS.items()},
            **{kind: [records.empty(schema)] for kind, schema in records.TELEMETRY.items()},
            events.Acted.event: [records.empty(records.ACTIONS)],
        }
        self._zero: float | None = None
        """`monotonic_zero` of the newest samples."""
        self._topology = _topology(self._path / "topology.yaml")
        self._starts: list[events.RunStarted] = []
        """A resumed run has several legs."""
        self._ended: events.RunEnded | None = None
        self._known: tuple[tuple[int, ...], dict[str, Any]] | None = None
        """State (inode, size, time of last change) and content of `manifest.json` when last read."""
        self._manifest()

    def read(self) -> dict[str, pd.DataFrame]:
        """Return the rows since the last call, by kind of record: `update`, `version`, …
        (`records.SCHEMAS`), `telemetry`, … (`records.TELEMETRY`). Kinds without new rows are left out.

        In the tables of `records.TELEMETRY`, `at` is on the host's monotonic clock. Raises ValueError
        that names the line if a record is invalid.
        """
        new: dict[str, list[pa.Table]] = {}
        for kind, table in self._read_new():
            new.setdefault(kind, []).append(table)
        return {kind: _frame(tables) for kind, tables in new.items()}

    def run(self) -> Run:
        """Read new rows, and return the run so far. Raises the same errors as `load`."""
        deque(self._read_new(), maxlen=0)
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
            updates=updates.assign(
                **{
                    name: column.values(updates, frames)
                    for part in PARTS
                    for name, column in part.update_columns.items()
                },
                group=_groups(updates["client"], devices),
            ),
            versions=frames["version"],
            evaluations=_with_perplexity(frames["evaluation"], manifest),
            parts=with_class_names(
                _without_duplicates(frames["evaluation_part"]), manifest.get("classes")
            ).astype({"name": "category"}),
            statuses=_planned(frames["status"], "client", devices),
            rejected=_planned(frames["rejected"], "client", devices),
            clipped=_planned(frames["clipped"], "client", devices),
            unfinished=_planned(frames["unfinished"], "client", devices),
            notes=frames["note"],
            scenario=_planned(frames[events.Acted.event], "device", devices),
            telemetry=_planned(self._in_device_time(frames["telemetry"], manifest), "device", devices),
            probes=_planned(self._in_device_time(frames["probe"], manifest), "device", devices),
            fidelity=_planned(_fidelity(self._path / "fidelity.json", manifest), "device", devices),
            more=self._more(frames, devices),
        )

    def _more(
        self, frames: Mapping[str, pd.DataFrame], devices: pd.DataFrame
    ) -> dict[str, pd.DataFrame]:
        """Tables of the features. Their samples are recorded in device time in virtual time."""
        manifest = self._manifest()
        has_clock = "monotonic_zero" in manifest or manifests.verdict(manifest) != "simulated"
        tables = {}
        for records_of in RECORDS:
            table = frames[records_of.kind.event]
            names = records_of.names
            tables[records_of.table] = _planned(table, names, devices) if names else table
        for stream in STREAMS:
            samples = frames[stream.kind]
            timed = self._in_device_time(samples, manifest)
            timed = timed if has_clock else timed.assign(at=samples["at"], monotonic=np.nan)
            tables[stream.table] = _planned(timed, "device", devices) if stream.is_of_devices else timed
        return tables

    def _read_new(self) -> Iterator[tuple[str, pa.Table]]:
        """Keep new records; yield tables of new rows by kind. Starts, ends and actions are not
        yielded."""
        for found in records.read_events(self._events):
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
        for lines in self._telemetry.blocks():
            samples, self._zero = records.parse_samples(lines.text, self._zero)
            for kind, table in samples.items():
                if table.num_rows:
                    self._hold(kind, table)
                    yield kind, table

    def _hold(self, kind: str, table: pa.Table) -> None:
        """Limits the number of rows, and of tables, because it is slow to concatenate many."""
        self.rows[kind] += table.num_rows
        tables = self._tables[kind]
        tables.append(table)
        rows, newest = sum(one.num_rows for one in tables), self._newest.get(kind)
        if len(tables) > _MAX_TABLES or (newest is not None and rows > 1.25 * newest):
            joined = pa.concat_tables(tables).unify_dictionaries()
            self._tables[kind] = [joined.slice(max(0, rows - (newest or rows))).combine_chunks()]

    def _manifest(self) -> dict[str, Any]:
        path = self._path / "manifest.json"
        stat = path.stat()
        state = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if self._known is None or self._known[0] != state:
            self._known = state, manifests.read(path)
        return self._known[1]

    def _in_device_time(self, samples: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
        """`at` on the run clock. In a resumed run, this clock stands still between the legs, and
        `at` of samples between them is NaN. Figures of measured links are in device time, too."""
        dilation = manifest.get("dilation", 1.0)
        zero = manifest.get("monotonic_zero", np.nan)
        # Not 0 if the host was rebooted or suspended between two legs.
        earlier = (samples["monotonic_zero"] - zero).fillna(0.0)
        monotonic = (samples["at"] + earlier).to_numpy()
        timed = samples.drop(columns="monotonic_zero").assign(at=np.nan, monotonic=monotonic)
        if self._starts:
            unix = monotonic + zero
            began = np.array([start.wall_clock for start in self._starts])
            at = np.array([start.at for start in self._starts])
            over = np.append(at[1:], np.inf)
            leg = np.maximum(np.searchsorted(began, unix, side="right") - 1, 0)
            found = at[leg] + (unix - began[leg]) / dilation
            timed["at"] = np.where(found <= over[leg] + _AFTER_SECONDS, found, np.nan)
        # Durations and links are measured with the host's clock.
        durations = {name: timed[name] / dilation for name in records.DURATIONS if name in timed}
        measured = {name: timed[name] for name in records.PROBED if name in timed}
        return timed.assign(**durations, **in_device_time(measured, dilation))


class _NamedEntry(BaseModel):
    """Only the fields that this module uses are checked."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str = "?"


class _GroupEntry(_NamedEntry):
    link: dict[str, Any] | None = None


class _DifferentialEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    noise: Annotated[float, Field(gt=0, le=1e18)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    at: Literal["client", "server"]


class _PrivacyEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    differential: _DifferentialEntry | None = None


class _TopologyFile(_NamedEntry):
    rule: _NamedEntry = _NamedEntry()
    privacy: _PrivacyEntry | None = None
    task: _NamedEntry = _NamedEntry()
    devices: list[_GroupEntry] = []


class _FigureEntry(BaseModel):
    model_config = ConfigDict(strict=True)
    asked: FiniteFloat | None
    got: FiniteFloat | None
    error: FiniteFloat | None


class _DeviceFigures(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # further entries are figures, by name
    group: str


class _FidelityFile(BaseModel):
    devices: dict[str, _DeviceFigures]


def load(path: str | Path) -> Run:
    """Read the run directory `path`. If there are no records of a kind, its table is empty. An
    incomplete last line is ignored.

    Raises FileNotFoundError if there is no run. Raises ValueError that names file and line if the
    content is invalid.
    """
    return Follower(path).run()


def load_many(where: str | Path | Iterable[str | Path]) -> list[Run]:
    """Read the given run directories in their order. If a folder of runs is given, read all runs in it,
    the oldest first. Raises the same errors as `load`."""
    if not isinstance(where, str | Path):
        return [load(path) for path in where]
    runs = [load(path.parent) for path in sorted(Path(where).glob("*/manifest.json"))]
    if not runs:
        raise FileNotFoundError(f"{where} contains no run directory")
    return sorted(runs, key=lambda run: run.manifest.get("created") or 0.0)


def _frame(tables: list[pa.Table]) -> pd.DataFrame:
    table: pd.DataFrame = pa.concat_tables(tables).unify_dictionaries().to_pandas(split_blocks=True)
    return table


def _devices(manifest: Mapping[str, Any]) -> pd.DataFrame:
    planned = manifest.get("devices", {})
    alike = {id(facts): facts for facts in planned.values()}  # most devices share their facts
    rows = [[facts.get(key) for key in _DEVICE] for facts in alike.values()]
    place = {shared: row for row, shared in enumerate(alike)}
    row_of = np.fromiter((place[id(facts)] for facts in planned.values()), np.intp, len(planned))
    table = pd.DataFrame(rows, columns=_DEVICE).take(row_of).reset_index(drop=True)
    table.insert(0, "device", [*planned])
    numbers = {key: pd.to_numeric(table[key]) for key in _DEVICE[2:]}
    named = {
        key: pd.Categorical(table[key], table[key].dropna().unique()) for key in ("device", "group")
    }
    return table.assign(**numbers, **named)


def _planned(table: pd.DataFrame, column: str, devices: pd.DataFrame) -> pd.DataFrame:
    """`column` as categorical: the planned devices first, then names that are not in the plan."""
    planned = devices["device"].cat.categories
    others = [name for name in table[column].unique() if name not in planned]
    names = planned.append(pd.Index(others)) if others else planned
    return table.assign(**{column: pd.Categorical(table[column], names)})


def _with_perplexity(evaluations: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
    if manifest.get("perplexity") is not True:
        return evaluations
    with np.errstate(over="ignore"):
        return evaluations.assign(perplexity=np.exp(evaluations["loss"]))


def _without_duplicates(parts: pd.DataFrame) -> pd.DataFrame:
    """A restarted aggregator may repeat an evaluation; the last one of a part and version stays."""
    return parts.drop_duplicates(["version", "part", "name"], keep="last", ignore_index=True)


def with_class_names(parts: pd.DataFrame, classes: Any) -> pd.DataFrame:
    """Return a table with the columns `part` and `name`, with the names of classes in place of their
    numbers. `classes`: list of the names; empty, or another value in a damaged manifest, for none."""
    if parts.empty or not isinstance(classes, list) or not classes:
        return parts
    names = {str(number): str(name) for number, name in enumerate(classes)}
    given, is_class = parts["name"].astype(object), parts["part"] == "class"
    return parts.assign(name=given.mask(is_class, given.map(names).fillna(given)))


def _groups(clients: pd.Series[str], devices: pd.DataFrame) -> pd.Categorical:
    groups = devices["group"].cat
    codes = np.full(len(clients.cat.categories), -1)
    codes[: len(devices)] = groups.codes  # the plan's devices are the first categories
    return pd.Categorical.from_codes(np.append(codes, -1)[clients.cat.codes], groups.categories)


def _topology(path: Path) -> dict[str, Any]:
    """Empty if there is no such file yet."""
    try:
        with _naming_file(path):
            content = Loader(files.read(path, _MAX_BYTES)).get_single_data()
            _TopologyFile.model_validate(content)
    except FileNotFoundError:
        return {}
    return dict(content)


def _fidelity(path: Path, manifest: Mapping[str, Any]) -> pd.DataFrame:
    rows: list[tuple[Any, ...]] = []
    try:
        with _naming_file(path):
            content = _FidelityFile.model_validate(files.from_json(files.read(path, _MAX_BYTES)))
            for device, one in content.devices.items():
                for name, entry in (one.model_extra or {}).items():
                    if isinstance(entry, dict):
                        figure = _FigureEntry.model_validate(entry)
                        rows.append((device, one.group, name, figure.asked, figure.got, figure.error))
    except FileNotFoundError:
        pass
    except ValueError:
        if manifest.get("outcome"):  # before that, the file may be incomplete
            raise
    table = pd.DataFrame(rows, columns=["device", "group", "figure", "asked", "got", "error"])
    numbers = {key: pd.to_numeric(table[key]) for key in ("asked", "got", "error")}
    return table.assign(**numbers, group=table["group"].astype("category"))


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Make errors in the content a ValueError that names the file."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where or 'the file'}: {first['msg']}") from None
    except RecursionError:
        raise ValueError(f"{path}: values are nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
