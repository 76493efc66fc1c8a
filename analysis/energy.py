"""Energy in the analysis of runs and in all views: power draw, batteries and chargers of devices.

energy.joules(run)                    # of each device
energy.consumed(run, [10.0, 20.0])    # of all devices together, up to these device times
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from agents import events
from agents.device_actions import Action, PowerOff
from agents.energy.messages import Charge, RoundEnergy, SetBattery
from analysis import part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from analysis.charts.chart import Chart
    from analysis.load import Run
    from analysis.tally import DeviceTally, Tally

_joules = partial(part.number, unit="J")
_watts = partial(part.number, unit="W")
_RUN = "start of the run"
_ROUNDS = {
    "at": part.seconds("Device time at which the update was sent, or the round was lost"),
    "client": part.CLIENT,
    "dispatch": part.count("Number of the dispatch; with `client` it identifies the update"),
    "energy_j": _joules(
        "Energy to receive the model, of the training, and to send the update, as far as they came"
    ),
    "outcome": part.TableColumn(
        "`sent`: the device began to send the update; `lost`: the round ended before"
    ),
    "level": part.share("Level of the battery at `at`; NaN without a battery"),
}
_SAMPLES = {
    "device": part.DEVICE,
    "at": part.seconds("Device time of the sample; NaN between legs of a resumed run", sign="any"),
    "consumed": _joules("Consumed energy, with transfers", cumulative=_RUN),
    "transferred": _joules("Energy consumed to send and receive bytes", cumulative=_RUN),
    "power": _watts("Mean power since the device's sample before"),
    "level": part.share("Level of the battery; NaN without a battery"),
    "supplied": _joules(
        "Energy from the charger that was consumed or stored; NaN without a battery", cumulative=_RUN
    ),
    "charging": _watts("Power that the charger offers; NaN without a battery"),
    "monotonic": part.MONOTONIC,
}


def _of_rounds(updates: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> Any:
    """Energy of each update's round; NaN if it was not counted."""
    import pandas as pd

    rounds = tables[RoundEnergy.event]
    sent = rounds[rounds["outcome"] == "sent"].drop_duplicates(["client", "dispatch"], keep="last")
    if sent.empty:
        return nan
    keys = [sent["client"].astype(str), sent["dispatch"]]
    found = pd.Series(sent["energy_j"].to_numpy(), pd.MultiIndex.from_arrays(keys))
    wanted = pd.MultiIndex.from_arrays([updates["client"].astype(str), updates["dispatch"]])
    return found.reindex(wanted).to_numpy()


# In the fold.


@dataclass(slots=True)
class EnergyUse:
    """A device's latest sample (`agents.wire.messages.EnergyFigures`), and its power."""

    at: float = nan
    """Device time in seconds; NaN before the first sample."""
    consumed: float = nan
    """Joules."""
    power: float = nan
    """Watts, since the sample before."""
    level: float = nan
    """Share of the battery's capacity; NaN without a battery."""
    power_offs: int = 0
    powered: bool = True

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Devices may send anything: a sample without valid consumption is ignored."""
        consumed = part.known_number(values.get("consumed"))
        if consumed >= 0 and not at <= self.at:
            self.at, self.consumed = at, consumed
            self.power, self.level = (part.known_number(values.get(key)) for key in ("power", "level"))


class EnergyTally(part.FeatureTally):
    takes: ClassVar[tuple[type[events.Record], ...]] = (RoundEnergy, events.Acted)
    key: ClassVar[str] = "energy"

    def __init__(self, facts: part.Facts) -> None:
        self.round_joules = 0.0
        """Energy of all rounds, also of those whose update was lost."""
        self.power_offs = 0
        self._is_counted = False
        self._is_sampled = False

    def add(self, record: events.Record, tally: Tally) -> None:
        if isinstance(record, RoundEnergy):
            self._is_counted = True
            self.round_joules += record.energy_j
        elif isinstance(record, events.Acted) and record.details.get("action") in _SWITCHES:
            self._is_counted = True
            use = tally.device(record.device).part(EnergyUse)
            use.powered = not isinstance(record.action, PowerOff)
            use.power_offs += not use.powered
            self.power_offs += not use.powered

    def sample(self, device: DeviceTally | None, at: float, values: Mapping[str, Any]) -> None:
        if device is not None and isinstance(figures := values["energy"], Mapping):
            device.part(EnergyUse).add(at, figures)
            self._is_sampled = True

    def headline(self, tally: Tally) -> Iterable[tuple[str, str]]:
        total = self.consumed(tally)
        return [] if isnan(total) else [("", energy_text(total))]

    def consumed(self, tally: Tally) -> float:
        """Joules of all devices together; NaN if no energy is counted."""
        if not self._is_sampled:
            return nan
        devices = [one.part(EnergyUse) for one in tally.devices.values() if one.has_details]
        return math.fsum(one.consumed for one in devices if not isnan(one.consumed))

    def totals(self) -> Mapping[str, float]:
        if not self._is_counted:
            return {}
        return {"round_joules": self.round_joules, "power_offs": float(self.power_offs)}


_SWITCHES = ("poweroff", "poweron")


# Figures.


def watts_text(value: float) -> str:
    """Format a power in watts in at most four characters, such as `2.1`."""
    if isnan(value) or value >= 99.95:
        return part.count_text(value)
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def energy_text(joules: float) -> str:
    """Format an energy with its unit, such as `1.2 kJ`."""
    for factor, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if joules >= factor * 0.9995:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules:.3g} J"


def _newest(run: Run, column: str) -> pd.Series[float]:
    """The last sample of each device."""
    last: pd.Series[float] = run.energy.groupby(run.energy["device"].astype(str))[column].last()
    return last


def _mean_power(run: Run) -> pd.Series[float]:
    at = _newest(run, "at")
    return _newest(run, "consumed") / at.where(at > 0)


_FIGURES = (
    part.DeviceFigure(
        name="energy",
        about="Energy that the device has consumed, in joules.",
        of=lambda device, *_: device.part(EnergyUse).consumed,
        together=part.Together.SUM,
        needs="energy",
        heading="energy (J)",
        page_text=part.formatted("{:,.4g}"),
        table=lambda run, live: _newest(run, "consumed"),
        orders={"most energy": False},
        metric="energy_joules",
        is_total=True,
    ),
    part.DeviceFigure(
        name="power",
        about="Mean power of the device since its last sample, in watts.",
        of=lambda device, *_: device.part(EnergyUse).power,
        needs="energy",
        title="watt",
        text=watts_text,
        gives_way=1,
        heading="power (W)",
        page_text=part.formatted("{:.3g}"),
        table=lambda run, live: _newest(run, "power") if live else _mean_power(run),
        when=("last seconds", "mean of the run"),
        metric="power_watts",
    ),
    part.DeviceFigure(
        name="level",
        about="Level of the device's battery, from 0 to 1.",
        of=lambda device, *_: device.part(EnergyUse).level,
        needs="batteries",
        title="batt",
        text=part.percent,
        sort=1,
        heading="battery",
        page_text=part.percent,
        table=lambda run, live: _newest(run, "level"),
        orders={"lowest battery": True},
        metric="battery_level_ratio",
    ),
    part.DeviceFigure(
        name="powered",
        about="1 while the device with a battery has power, else 0.",
        of=lambda device, *_: device.part(EnergyUse).powered,
        needs="batteries",
        metric="powered",
    ),
    part.DeviceFigure(
        name="power_offs",
        about="Number of times that the battery was too low and the device powered off.",
        of=lambda device, *_: device.part(EnergyUse).power_offs,
        together=part.Together.SUM,
        needs="batteries",
        metric="power_offs",
        is_total=True,
    ),
)


# Results of whole runs.


def consumed(run: Run, at: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the energy in joules that all devices together had consumed at each of the times `at` (s),
    interpolated between samples. NaN if the run counted no energy."""
    times = np.asarray(at, np.float64)
    total = np.full(times.shape, nan if run.energy.empty else 0.0)
    known = run.energy[run.energy["at"].notna()]
    for _, own in known.groupby("device", observed=True):
        total += np.interp(times, np.append(0.0, own["at"]), np.append(0.0, own["consumed"]))
    return total


def joules(run: Run, watts: Mapping[str, Mapping[str, float]] | None = None) -> pd.Series[float]:
    """Return the energy of each device in joules; NaN if it is not known.

    If the run counted energy (`energy` of the topology), and `watts` is None, the result is the counted
    consumption. Otherwise it is an estimate: Σ over states of seconds in the state × watts. The watts
    are `watts[group][state]`, or those of the plan (`power` of the topology or of the profile) if
    `watts` is None. If no watts are set for `unfinished` or `mask`, the watts of `train` are used. Any
    other state without watts counts as 0 W. For example, `power: {train: 7.2W}` gives the energy of
    training alone.
    """
    import pandas as pd

    from analysis.device_states import STATES
    from analysis.metrics import utilisation

    names = run.updates["client"].cat.categories
    if watts is None and not run.energy.empty:
        counted = run.energy.groupby("device", observed=True)["consumed"].last()
        return counted.reindex(names).rename("joules")
    planned = [run.manifest.get("devices", {}).get(name, {}) for name in names]
    drawn = [one.get("power") if watts is None else watts.get(one.get("group")) for one in planned]
    known = np.array([one is not None for one in drawn], bool)
    if not known.any():
        return pd.Series(nan, names, name="joules")
    power = pd.DataFrame(
        [
            {**dict.fromkeys(("unfinished", "mask"), (one or {}).get("train", 0.0)), **(one or {})}
            for one in drawn
        ],
        names,
        list(STATES),
    ).fillna(0.0)
    spent = utilisation(run)[list(STATES)] * run.duration
    return (spent * power).sum(axis=1, skipna=False).where(known).rename("joules")


def power_offs(run: Run) -> pd.Series[int]:
    """Return the number of times that each device powered off because its battery was too low."""
    names = run.updates["client"].cat.categories
    switched = run.scenario.loc[run.scenario["action"] == "poweroff", "device"].astype(str)
    return switched.value_counts().reindex(names, fill_value=0).rename("power_offs")


def _known_joules(run: Run) -> pd.Series[float] | None:
    """None if the energy of no device is known."""
    return None if (own := joules(run)).isna().all() else own


def _known_power_offs(run: Run) -> pd.Series[int] | None:
    """None if no device has a battery."""
    return power_offs(run) if run.energy["level"].notna().any() else None


def _facts(run: Run) -> dict[str, str]:
    facts = {} if run.energy.empty else {"energy": energy_text(float(_newest(run, "consumed").sum()))}
    offs = int((run.scenario["action"] == "poweroff").sum())
    return facts | ({"power-offs": f"{offs:,}"} if offs else {})


def _power(runs: Sequence[Run]) -> Chart:
    """Empty if the runs counted no energy."""
    from analysis.charts import telemetry

    return telemetry.growth_of(
        runs, "Power", ("power", "W"), "energy", "consumed", "power and batteries"
    )


def _batteries(runs: Sequence[Run]) -> Chart:
    """Empty if no device has a battery."""
    from analysis.charts import telemetry

    return telemetry.share_of(runs, "Batteries", "battery", "energy", "level", "power and batteries")


def _has_energy(device: part.Facts) -> bool:
    return bool(device.get("energy"))


def _has_battery(device: part.Facts) -> bool:
    return _has_energy(device) and bool(device["energy"].get("battery"))


def _counts(run: Run) -> bool:
    return any(map(_has_energy, run.manifest.get("devices", {}).values()))


def _has_batteries(run: Run) -> bool:
    return any(map(_has_battery, run.manifest.get("devices", {}).values()))


def _describe(action: Action | None) -> str | None:
    match action:
        case SetBattery(level):
            return f"battery {level:.0%}"
        case Charge(watts):
            return "charge" if watts is None else f"charge {watts:g} W"
    return None


class EnergyTables:
    """Empty unless the topology has `energy`."""

    __slots__ = ()
    rounds: pd.DataFrame
    """`RoundEnergy`."""
    energy: pd.DataFrame
    """One row per sample of a device."""


PART = part.AnalysisPart(
    needs={"energy": _has_energy, "batteries": _has_battery},
    states={"unpowered": "batteries"},
    records=[part.RecordTable(RoundEnergy, "rounds", _ROUNDS, names="client", most=50_000)],
    streams=[part.SampleTable("energy_sample", "energy", "energy", _SAMPLES, most=50_000)],
    update_columns={
        "energy_j": part.UpdateColumn(
            _joules("Energy of the update's round; NaN if it was not counted"), _of_rounds
        )
    },
    tally=EnergyTally,
    figures=_FIGURES,
    facts=_facts,
    summary=[
        part.SummaryColumn("energy", _known_joules, unit="J"),
        part.SummaryColumn("power_offs", _known_power_offs),
    ],
    progress=[
        part.ProgressFigure(
            "energy",
            "energy of all devices",
            "J",
            consumed,
            wanted=_counts,
            words=("needs fewer joules", "more"),
        )
    ],
    charts={
        "battery-over-time": part.FeatureChart(_batteries, _has_batteries, in_report=True),
        "power-over-time": part.FeatureChart(_power, _counts, in_report=True),
    },
    counters=[
        part.TraceCounter("energy", "level", "battery (%)", 100.0),
        part.TraceCounter("energy", "power", "power (W)"),
    ],
    describe=_describe,
)
