"""Twins: emulated devices with the figures measured in a run, and the comparison of both runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.device_actions import name_of
from agents.texts import name_list
from analysis.agreement import RankAgreement, TwinRow
from testbed import speed
from testbed import topology as topologies
from testbed.api import running
from testbed.api.topology_input import data_root
from testbed.data import preparation
from testbed.errors import BadInputError, writable_folder
from testbed.fidelity import step_time
from testbed.fleets import recorded
from testbed.plan import costs
from testbed.plan.costs import StepTime
from testbed.plan.machines import Measurements
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, Virtual, profiles, units, yamlfile
from testbed.topology.features import TWIN_REMARKS
from testbed.traits import is_simulated

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result

FILE, PROFILES = "twin.yaml", profiles.FILE
"""Names in the folder of a twin."""
_KEPT = ("timing", "gflops")
"""Keys that give the speed of a group's devices, so that trainings say nothing about a CPU."""
_OTHERWISE_KEPT = ("think", "speed", "cpu", "profile", "power", "byzantine", "data", "steps")
_RATES = ("up", "down")
_DELAYS = ("rtt", "jitter")
_LEAST_JITTER = 0.05
"""Share of the round trip."""


@dataclass(frozen=True, slots=True)
class Twin:
    run: str
    """Id of the run whose twin it is."""
    topology: str
    """YAML."""
    profiles: str
    """Content of profiles.yaml beside the topology; empty if no figure was measured."""
    remarks: tuple[str, ...]
    """A sentence for each figure that the run's records lack, and for each key that is not measured."""

    def write(self, folder: Path) -> Path:
        """Return the path of the topology."""
        writable_folder(folder).mkdir(parents=True, exist_ok=True)
        file = folder / FILE
        file.write_text(self.topology, encoding="utf-8")
        if self.profiles:
            (folder / profiles.FILE).write_text(self.profiles, encoding="utf-8")
        return file


@dataclass(frozen=True, slots=True)
class TwinDevice:
    """A device in a run and in the run of its twin."""

    device: str
    updates: int
    staleness: float
    """Mean staleness in versions; NaN without updates."""
    round: float
    """Mean seconds from the dispatch to the arrival of the update; NaN without updates."""
    twin_updates: int
    twin_staleness: float
    twin_round: float


@dataclass(frozen=True, slots=True)
class ComparedTwin:
    """A run beside the run of its twin."""

    original: str
    """Id of the run."""
    twin: str
    """Id of the twin's run."""
    target: float | None
    """Target accuracy, 0 to 1; None if there is none."""
    remarks: Sequence[str]
    """A sentence for each figure that the run's records lack."""
    figures: Sequence[TwinRow]
    devices: Sequence[TwinDevice]
    ranks: RankAgreement | None
    """Ranks of the devices by seconds of the run per update; None for a single device."""


@dataclass(frozen=True, slots=True)
class ComparedTwins:
    """Runs beside the runs of their twins."""

    pairs: Sequence[ComparedTwin]
    target: float | None
    """Target accuracy of `ranks`, 0 to 1; None without ranks."""
    ranks: RankAgreement | None
    """Ranks of the configurations by seconds to the target; None if there is only one, or if no run
    reached an accuracy."""


@dataclass(frozen=True, slots=True)
class TwinPair:
    """A run and the run of its twin."""

    original: Result
    twin: Result
    figures: tuple[TwinRow, ...]
    """Figures of the whole runs."""
    devices: pd.DataFrame
    """Figures of each device (`analysis.agreement.twin_device_figures`)."""
    ranks: RankAgreement | None
    """Ranks of the devices by seconds per update; None if there are fewer than two devices with
    updates."""
    target: float | None
    """Test accuracy (share) to which times refer; None if there is none."""
    remarks: tuple[str, ...] = ()
    """Remarks of the twin (`Twin.remarks`)."""

    def output(self) -> ComparedTwin:
        """For programs."""
        devices: list[Any] = self.devices.to_dict("records")
        return ComparedTwin(
            self.original.name,
            self.twin.name,
            self.target,
            self.remarks,
            self.figures,
            [TwinDevice(**device) for device in devices],
            self.ranks,
        )


def make(
    run: str | Path,
    *,
    runtime: str | None = None,
    data: str | Path | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> Twin:
    """Take the step times, rates and delays that were measured in `run`. `runtime`: of the twin; None
    for `auto`. For the other parameters see `up`. Raises BadInputError, HostError."""
    result = running.load(run, runs=runs)
    if result.updates.empty:
        raise BadInputError(f"{result.path}: the run has no update, so that nothing was measured")
    topology = topologies.load(result.path / "topology.yaml")
    simulated = runtime is not None and is_simulated(runtime)
    made = _Making(result, topology, simulated=simulated)
    devices = [made.device(name) for name in topology.device_names]
    if made.needs_steps:
        made.add_speeds(devices, lambda: _measure_step(topology, result.path, data, on_progress))
    written = made.topology_of(devices, runtime or "auto")
    made.keep_profiles(devices)
    entries = {"devices": made.profiles, "links": made.links}
    found = {key: value for key, value in entries.items() if value}
    text = f"# Twin of {result.path}, made by testbed twin.\n"
    return Twin(
        result.name,
        text + yamlfile.write(written),
        text + yamlfile.write(found) if found else "",
        tuple(made.remarks),
    )


def compare(original: Result, twin: Result, target: float | None = None) -> TwinPair:
    """`target`: test accuracy (share) to reach; None for the highest that both reached."""
    from analysis import agreement, comparison

    level = target or comparison.common_target([original, twin])
    table = agreement.twin_device_figures(original, twin)
    return TwinPair(
        original,
        twin,
        tuple(agreement.twin_figures(original, twin, level)),
        table,
        agreement.device_ranks(original, twin, table),
        level,
    )


def twin(
    run: str | Path,
    *,
    runtime: str | None = None,
    to: str | Path | None = None,
    target: float | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> TwinPair:
    """Make the twin of `run`, run it, and compare both. `to`: folder for the twin's topology; None for
    the run's id and `-twin`, in the folder `runs`. `target`: test accuracy (share) to reach. For the
    other parameters see `up`. Raises BadInputError, HostError, RunFailedError.
    """
    made = make(run, runtime=runtime, data=data, on_progress=on_progress, runs=runs)
    for remark in made.remarks:
        on_progress(remark)
    folder = Path(to) if to is not None else Path(runs) / f"{made.run}-twin"
    file = made.write(folder)
    on_progress(f"{file}: written")
    with running.up(
        file, runtime=runtime, data=data, oversubscribe=oversubscribe, on_progress=on_progress, runs=runs
    ) as handle:
        done = handle.wait()
    return replace(compare(running.load(run, runs=runs), done, target), remarks=made.remarks)


def rank(pairs: Sequence[TwinPair], target: float | None = None) -> tuple[RankAgreement, float] | None:
    """Rank the configurations of runs by the time to an accuracy, in the runs and in those of their
    twins. Return the agreement and the accuracy (share). Return None for fewer than two configurations,
    or if no run reached an accuracy of 10 %.

    `target`: test accuracy (share); None for the highest that all runs reached. Raises
    BadInputError if the runs learn different tasks.
    """
    from analysis import agreement, comparison, names

    originals = [pair.original for pair in pairs]
    if len(comparison.by_task(originals)) > 1:
        raise BadInputError(
            "the runs learn different tasks, so that they cannot be ranked: name runs of one"
        )
    labels = {id(run): name for name, same in names.by_settings(originals).items() for run in same}
    level = target or comparison.common_target([*originals, *(pair.twin for pair in pairs)])
    if len(set(labels.values())) < 2 or level is None:
        return None
    configurations = [labels[id(run)] for run in originals]
    costs = agreement.times(configurations, [pair.twin for pair in pairs], originals, level)
    return agreement.agreement(costs), level


class _Making:
    def __init__(self, run: Result, topology: Topology, *, simulated: bool) -> None:
        self._run = run
        self._topology = topology
        self._simulated = simulated
        """Whether the twin runs in virtual time."""
        self.profiles: dict[str, dict[str, Any]] = {}
        self.links: dict[str, dict[str, Any]] = {}
        self._virtual: Virtual | None = None
        self._remarks: dict[str, list[str]] = {}
        """Remark -> devices; no devices if it is about the whole run."""
        self._steps: dict[str, tuple[float, float, int]] = {}
        """Device -> seconds of a step, steps of a training, and number of trainings."""
        self._groups = {name: group for group in topology.devices for name in group.device_names}
        written = run.topology.get("devices", [])
        self._written = {one["name"]: one for one in written if isinstance(one, dict)}

    @property
    def remarks(self) -> Iterator[str]:
        for text, devices in self._remarks.items():
            yield f"{name_list(devices)}: {text}" if devices else text

    def _remark(self, text: str, device: str | None = None) -> None:
        self._remarks.setdefault(text, []).extend([] if device is None else [device])

    @property
    def needs_steps(self) -> bool:
        """Whether a CPU share follows from measured steps."""
        return bool(self._steps)

    def _costs(self, measure: Callable[[], StepTime]) -> Virtual:
        """Measure a step on this host or, if both runs are in virtual time, take what the original run
        assumed."""
        virtual = self._topology.virtual
        if self._simulated and is_simulated(self._run.manifest.get("runtime", "")):
            virtual = virtual.with_defaults(Measurements.read(self._run.path).virtual)
            if virtual.step_time is not None:
                return virtual
        start = step_time.start_time([self._run])
        virtual = virtual.with_defaults([("start_time", start)])
        return costs.with_step_time(virtual.model_copy(update={"step_time": None}), measure())

    def device(self, name: str) -> dict[str, Any]:
        """Leave out the speed if it follows from measured steps."""
        group = self._groups[name]
        keys = {
            key: value
            for key in _OTHERWISE_KEPT
            if (value := self._written.get(group.group_name, {}).get(key)) is not None
        }
        own = recorded.training_keys(self._run, group.group_name)
        compression = own.pop("link", None)
        found: dict[str, Any] = {"name": name, **keys, **own}
        if memory := self._run.manifest["devices"][name].get("memory"):
            found["memory"] = units.format_size(memory)
        if actions := recorded.what_happened(self._run, name, ready=False):
            found["actions"] = [
                [units.format_duration(round(at, 6)), name_of(action)] for at, action in actions
            ]
        if any(getattr(group, key) is not None for key in _KEPT):
            kept = group.model_dump(mode="json", by_alias=True, include=set(_KEPT))
            found |= {key: value for key, value in kept.items() if value is not None}
            self._remark("its durations are given by the topology, and are kept", name)
        else:
            self._measure(name, found)
        if (link := self._link(name)) is not None:
            found["link"] = {"class": link, **(compression or {})}
        elif compression:
            found["link"] = compression
        return found

    def _measure(self, name: str, found: dict[str, Any]) -> None:
        """Take the mean duration of a step from the updates of `name`."""
        updates = self._run.updates[self._run.updates["client"] == name]
        updates = updates[updates["steps"] > 0]
        seconds = float((updates["train_end"] - updates["train_start"]).sum())
        if updates.empty or seconds <= 0:
            self._remark("no step was measured; its speed is that of the topology", name)
            if not {"cpu", "profile"} & found.keys():
                found["cpu"] = 1.0
            return
        for key in ("cpu", "profile", "speed"):
            found.pop(key, None)
        count = int(updates["steps"].sum())
        self._steps[name] = seconds / count, count / len(updates), len(updates)

    def add_speeds(self, devices: Sequence[dict[str, Any]], measure: Callable[[], StepTime]) -> None:
        """With the added profile, a step takes as long as it was measured to take. `measure`: returns
        the time of a step on this host."""
        here = speed.calibrate()
        self._virtual = self._costs(measure)
        cost = costs.step_cost(self._virtual, None)
        step = cost.time or StepTime(math.nan)
        for device in devices:
            name = device["name"]
            if name not in self._steps:
                continue
            seconds, steps, trainings = self._steps[name]
            share = _share(step, seconds, cost.update / steps)
            scaled = here.scaled(share)
            speeds = scaled.training.model_dump(exclude_none=True, exclude={"error"})
            training = {kind: _rounded(speed) for kind, speed in speeds.items()}
            self.profiles[name] = {
                "description": f"A step of {self._topology.task.name} takes {1000 * seconds:.4g} ms",
                "gflops": _rounded(scaled.gflops),
                "training": training,
                "source": f"measured in the run {self._run.name}, mean of {trainings} trainings; "
                f"relative to a core that takes {1000 * step.whole:.4g} ms ({here.host.cpu})",
            }
            device["profile"] = name
            if self._simulated:  # relative to the step of the same file, whatever host runs it
                device["cpu"] = _rounded(share)
            if share > here.host.cores:
                self._remark("it was faster than this host, which cannot emulate it", name)

    def keep_profiles(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Copy the profiles of the original run that devices still have."""
        path = self._run.path / profiles.FILE
        used = profiles.read(path).devices if path.is_file() else {}
        for device in devices:
            name = device.get("profile")
            if name in used and name not in self.profiles:
                self.profiles[name] = used[name].model_dump(mode="json", exclude_defaults=True)

    def _link(self, name: str) -> str | None:
        """Return the class's name; None if nothing is known of the link."""
        probes = self._run.probes[self._run.probes["device"] == name]
        measured = probes.median(numeric_only=True)
        figures = {key: float(measured.get(key, math.nan)) for key in (*_RATES, *_DELAYS, "loss")}
        figures = {key: value for key, value in figures.items() if math.isfinite(value) and value > 0}
        source = f"measured before the run {self._run.name}"
        planned = self._run.manifest["devices"][name].get("link")
        if not figures and planned:
            figures = {key: value for key, value in planned.items() if value}
            source = f"as configured in the run {self._run.name}, which did not measure it"
        if not figures and self._groups[name].is_real:
            figures = self._rates_of_transfers(name)
            source = f"durations of transfers in the run {self._run.name}"
        if not figures:
            self._remark("no rate and no round trip was measured; its link is not limited", name)
            return None
        for key in (*_RATES, "rtt"):
            if key not in figures:
                self._remark(f"{key} was not measured; it is left out", name)
        jitter, rtt = figures.pop("jitter", 0.0), figures.get("rtt", 0.0)
        if jitter > _LEAST_JITTER * rtt:  # less is the measurement's own
            figures["jitter"] = min(jitter, rtt / 2)
        self.links[name] = {
            **{key: _written(key, value) for key, value in figures.items()},
            "source": source,
        }
        return name

    def _rates_of_transfers(self, name: str) -> dict[str, float]:
        """Rates that the median transfers reached, in bit/s."""
        updates = self._run.updates[self._run.updates["client"] == name]
        took = {
            "up": (updates["arrived"] - updates["sent"], updates["bytes"]),
            "down": (
                updates["downloaded"] - updates["dispatched"],
                updates["bytes_before"].fillna(updates["bytes"]),
            ),
        }
        return {
            key: 8 * float(sizes.median()) / seconds
            for key, (times, sizes) in took.items()
            if (seconds := float(times.median())) > 0
        }

    def topology_of(self, devices: Sequence[Mapping[str, Any]], runtime: str) -> dict[str, Any]:
        found = dict(self._run.topology)
        if code := found.get("code"):
            found["code"] = str((self._run.path / code).absolute())
        changes = [
            entry for entry in self._topology.scenario if entry.verb in ("set", "charge", "unplug")
        ]
        if changes:
            self._remark("changes of CPU shares, links and chargers by the scenario are left out")
        if found.pop("network", None):
            self._remark("shared segments are left out: each device has a link of its own")
        for remark in filter(None, (one(self._topology) for one in TWIN_REMARKS)):
            self._remark(remark)
        found |= {
            "name": f"{self._topology.name[:34]}-twin",
            "devices": list(devices),
            "scenario": [],
            "churn": None,
            "server": {},
            "dilation": 1.0 if self._simulated else "auto",
            "runtime": {"name": runtime},
        }
        # The reason of a run that reached its end is the condition in `stop` that was met.
        if self._run.ended is None or self._run.ended.reason not in self._run.topology["stop"]:
            self._remark("the run was cut short: its twin lasts as long as the run did")
            lasted = units.format_duration(round(self._run.duration, 6))
            found["stop"] = {**self._run.topology["stop"], "after": lasted}
        if self._virtual is not None and self._simulated:
            found["virtual"] = self._virtual.model_dump(mode="json", exclude_none=True)
        return found


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _written(key: str, value: float) -> Any:
    if key in _RATES:
        return units.format_rate(max(1, round(value)))
    return units.format_duration(round(value, 6)) if key in _DELAYS else round(value, 6)


def _share(step: StepTime, seconds: float, beside: float) -> float:
    """CPU share at which a step takes `seconds`. `beside`: CPU seconds of an update in addition to its
    steps, per step."""
    share = step.whole / seconds
    for _ in range(50):
        share = (step.at(share) + beside) / seconds
    return share


def _measure_step(
    topology: Topology, run: Path, data: str | Path | None, report: Callable[[str], object]
) -> StepTime:
    """Time on this host, from the cache or by measuring it. `run`: directory of the original run, which
    has the user's code and the initial model."""
    from testbed.plan.agent_configs import initial_model
    from testbed.virtual import slices

    local = topology.task.local.build()
    if (known := costs.cached_step_time(topology.task.build(), local, topology.task.frozen)) is not None:
        return known
    prepared = preparation.prepare(topology, data_root(data), report)
    device = next(name for name, own in prepared.indices.items() if local.count(len(own)))
    report("Measuring how long a step takes here: a few seconds")
    directory = RunDirectory(run)
    trial = slices.StepTrial(
        task=topology.task.named,
        code=None if topology.user_code is None else str(directory.code),
        shard=prepared.shard(device),
        local=local,
        start=initial_model(topology, directory),
    )
    step = StepTime(*slices.measure_step(trial))
    costs.cache_step_time(topology.task.build(), local, step, topology.task.frozen)
    return step
