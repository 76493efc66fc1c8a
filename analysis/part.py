"""Parts that a feature may add to the analysis of runs and to all views, as data. `analysis.features`
has a row per feature; tables, fold, figures, metrics, charts, exports and views go over these rows and
name none.

Importing this module, or the module of a feature, must not import pandas or pyarrow: the terminal needs
neither, and they take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from math import isnan, nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agents import events
from agents.device_actions import Action

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from analysis.charts.chart import Chart
    from analysis.load import Run
    from analysis.tally import DeviceTally, Tally

Facts = Mapping[str, Any]
"""Content of a run's manifest, or of the entry of a device there."""

# Columns of tables.


@dataclass(frozen=True, slots=True)
class TableColumn:
    meaning: str
    """A value is NaN if it is unknown, or if the run did not record it."""
    unit: str = ""
    """Empty for texts."""
    sign: Literal["", "≥ 0", "any"] = ""
    """Range of the numbers; empty for texts."""
    cumulative: str = ""
    """Moment from which a cumulative column counts; empty if each value stands for itself."""


number = partial(TableColumn, sign="≥ 0")
seconds = partial(number, unit="s")
size = partial(number, unit="byte")
count = partial(number, unit="1")
share = partial(number, unit="share from 0 to 1")
AT = seconds("Device time of the record")
CLIENT = TableColumn("Name of the client, which is the name of its device")
DEVICE = TableColumn("Name of the device")
MONOTONIC = seconds("The host's monotonic clock, not device time")


@dataclass(frozen=True, slots=True)
class RecordTable:
    """A table with a row per record of one kind."""

    kind: type[events.Record]
    """Kind whose fields are texts and numbers."""
    table: str
    """Attribute of `load.Run`."""
    columns: Mapping[str, TableColumn]
    """One per field of the record."""
    _: KW_ONLY
    names: str = ""
    """Column with names of devices."""
    most: int | None = None
    """Maximum number of rows that the page keeps in memory; None for all."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Lines of `telemetry.jsonl` that become a table."""

    kind: str
    table: str
    """Attribute of `load.Run`."""
    key: str
    """Key that only these lines have."""
    columns: Mapping[str, TableColumn]
    """With `device`, `at` and `monotonic`, which all have. Columns without unit are texts."""
    _: KW_ONLY
    rows: Callable[[bytes], Iterable[Mapping[str, Any]]] | None = None
    """Rows of a line; ValueError for a damaged one. None if the value of `key` is an object of numbers,
    which are the other columns of one row."""
    is_of_devices: bool = True
    """Whether `device` is the name of a device in every row."""
    most: int | None = None
    """Maximum number of rows that the page keeps in memory; None for all."""

    @property
    def own_columns(self) -> Mapping[str, TableColumn]:
        """Columns beside those that all streams have."""
        common = ("device", "at", "monotonic")
        return {name: column for name, column in self.columns.items() if name not in common}


@dataclass(frozen=True, slots=True)
class UpdateColumn:
    """A further column of `Run.updates`."""

    about: TableColumn
    values: Callable[[pd.DataFrame, Mapping[str, pd.DataFrame]], Any]
    """From the updates, and the tables by kind of record or stream."""


# Figures of devices, and how people read them.


def formatted(form: str, factor: float = 1.0) -> Callable[[float], str]:
    return lambda value: "–" if isnan(value) else form.format(factor * value)


percent = formatted("{:.0%}")


def decimal(value: float, decimals: int) -> str:
    return "–" if isnan(value) else f"{value:.{decimals}f}"


def count_text(value: float) -> str:
    """Format a count in at most five characters."""
    return "–" if isnan(value) else f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k"


def rate(bits: float) -> str:
    """Format a rate in bit/s in at most four characters, such as `1.2M`."""
    if isnan(bits):
        return "–"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bits >= factor * 0.9995:
            scaled = bits / factor
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{bits:.0f}"


def known_number(value: object) -> float:
    """NaN if `value` is no number or too large."""
    return float(value) if isinstance(value, int | float) and abs(value) <= events.LARGEST else nan


class Together(Enum):
    """How the figures of several devices become that of their group. Unknown ones are left out."""

    MEAN = "mean"
    SUM = "sum"
    PER_UPDATE = "per update"
    """Mean over the updates of all devices."""
    NOTHING = "nothing"
    """A group has no such figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigure:
    """A figure of a device. A value that is not known is NaN."""

    name: str
    about: str
    """Says what the value is, with its unit. Prometheus shows it as the metric's help."""
    of: Callable[[DeviceTally, Tally, float], float]
    """The value for a device at a device time in seconds."""
    together: Together = Together.MEAN
    needs: str = ""
    """Part of a run without which it is unknown: `telemetry`, `links`, or one that a feature defines
    (`AnalysisPart.needs`)."""
    title: str = ""
    """Heading on the terminal; empty if it is not shown there."""
    width: int = 4
    """Characters that it has there at most."""
    text: Callable[[float], str] = str
    sort: int = 0
    """Order on the terminal when the user sorts by it: largest first (−1), smallest first (1), none."""
    gives_way: int = 0
    """Order in which columns are left out on a narrow terminal, from 1; 0 for one that stays."""
    heading: str = ""
    """Heading on the page; empty if it is not shown there."""
    page_text: Callable[[float], str] = str
    table: Callable[[Run, bool], pd.Series[float]] | None = None
    """The values of a run's devices from its tables, by device, and whether the run is live; None if the
    page makes them itself."""
    when: tuple[str, str] = ("", "")
    """Time of the page's value, while the run is live and afterwards, if the caption says it."""
    orders: Mapping[str, bool] = field(default_factory=dict)
    """Orders that the page offers: name, and whether the smallest come first."""
    metric: str = ""
    """Name in Prometheus, with its unit; empty if it has none."""
    is_total: bool = False
    """Whether the metric only grows."""
    metric_of: Callable[[DeviceTally], float] | None = None
    """The metric's value, if it is not that of the last seconds."""

    def group(self, values: Sequence[float], updates: Sequence[float]) -> float:
        """Return the figure of a group of devices, with as many `updates` each."""
        known = [(one, count) for one, count in zip(values, updates, strict=True) if not isnan(one)]
        match self.together:
            case Together.MEAN:
                return sum(one for one, _ in known) / len(known) if known else nan
            case Together.SUM:
                return sum(one for one, _ in known) if known else nan
            case Together.PER_UPDATE:
                total = sum(count for _, count in known)
                return sum(one * count for one, count in known) / total if total else nan
            case Together.NOTHING:
                return values[0] if len(values) == 1 else nan


# State in the fold of records and telemetry.


@dataclass(frozen=True, slots=True)
class Notice:
    """Message to the user. Those with the same `what` can be merged."""

    at: float
    """Device time in seconds."""
    what: str
    detail: str
    """Usually the name of a device."""
    why: str = ""
    """Reason; empty if there is none."""


class FeatureTally:
    """State of a feature in `analysis.tally.Tally`; made of the facts that are known before the first
    record. State of one device is kept with `DeviceTally.part`."""

    takes: ClassVar[tuple[type[events.Record], ...]] = ()
    """Kinds of record that `add` receives."""
    key: ClassVar[str] = ""
    """Key of the samples that `sample` receives (`SampleTable.key`)."""

    def __init__(self, facts: Facts) -> None: ...

    def add(self, record: events.Record, tally: Tally) -> Notice | None:
        """None if the user need not see the record."""

    def sample(self, device: DeviceTally | None, at: float, values: Mapping[str, Any]) -> None:
        """`at`: device time. Devices may send anything. `device`: None if it is unknown."""

    def headline(self, tally: Tally) -> Iterable[tuple[str, str]]:
        """Names and texts for the terminal's header. Those without a name are about the whole run."""
        return ()

    def totals(self) -> Mapping[str, float]:
        """Totals so far, for trackers; empty if the run does not have the feature."""
        return {}


# Results of whole runs.


@dataclass(frozen=True, slots=True)
class SummaryColumn:
    """A further column of `summary.devices`."""

    name: str
    values: Callable[[Run], pd.Series[Any] | None]
    """One value per device, in the order of the plan; None if the run has none."""
    _: KW_ONLY
    together: Literal["sum", "max"] = "sum"
    """How the values of several devices become that of their group."""
    unit: str = ""
    title: str = ""
    """Heading in the table at the end of a run; empty if it is not shown there."""


@dataclass(frozen=True, slots=True)
class ProgressFigure:
    """Measure of a run's progress, against which `accuracy-by-NAME` and `loss-by-NAME` are drawn."""

    name: str
    label: str
    unit: str
    at: Callable[[Run, npt.ArrayLike], npt.NDArray[np.float64]]
    """Values at device times in seconds; NaN if it was not counted."""
    _: KW_ONLY
    wanted: Callable[[Run], bool] | None = None
    """Whether page and report show the accuracy of a run against it; None for never."""
    words: tuple[str, str] | None = None
    """If it is a cost of reaching an accuracy, beside time, rounds, updates and bytes: words on two
    ranked configurations, of which the better one `is faster`, the other `slower`."""


@dataclass(frozen=True, slots=True)
class FeatureChart:
    draw: Callable[[Sequence[Run]], Chart]
    wanted: Callable[[Run], bool]
    """Whether the page shows it for a run. The page must know it from the start, before any record."""
    in_report: bool = False
    """A report shows it for a few runs, because it has a line per device."""


@dataclass(frozen=True, slots=True)
class TraceCounter:
    """A counter per device in a trace for Perfetto."""

    table: str
    """Attribute of `load.Run`, with the columns `device` and `at`."""
    column: str
    name: str
    """Has the unit, such as `power (W)`."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisPart:
    """Additions of a feature. All is optional."""

    needs: Mapping[str, Callable[[Facts], bool]] = field(default_factory=dict)
    """Name of a part of a run, which figures may need -> whether a device with these facts has it."""
    states: Mapping[str, str] = field(default_factory=dict)
    """State of a device (`analysis.activity.STATES`) -> part of a run without which there is none."""
    records: Sequence[RecordTable] = ()
    streams: Sequence[SampleTable] = ()
    update_columns: Mapping[str, UpdateColumn] = field(default_factory=dict)
    tally: type[FeatureTally] | None = None
    figures: Sequence[DeviceFigure] = ()
    facts: Callable[[Run], Mapping[str, str]] = lambda _: {}
    """Facts about a whole run for people: name -> text. Those that it does not have are left out."""
    summary: Sequence[SummaryColumn] = ()
    progress: Sequence[ProgressFigure] = ()
    charts: Mapping[str, FeatureChart] = field(default_factory=dict)
    counters: Sequence[TraceCounter] = ()
    describe: Callable[[Action | None], str | None] = lambda _: None
    """Short text for an action of the feature; None for all others."""
