"""The catalog: everything that a plan uses in addition to topology and host.

`read` reads the catalog from files. `with_cpu` adds the CPU shares that follow from device profiles and
the speeds of the machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from agents import config
from agents.tasks.interface import Task
from testbed.errors import BadInputError
from testbed.plan import model_check
from testbed.plan.features import PARTS
from testbed.plan.machines import Measurements
from testbed.plan.part import FileToRead
from testbed.segments.schema import TracedTraffic
from testbed.speed import KINDS, Calibration, Work, cpu_share, work_seconds
from testbed.topology import Topology, link_traces, profiles
from testbed.topology.link_traces import LinkSeries
from testbed.topology.links import LinkSettings, LinkTrace
from testbed.topology.profiles import DeviceProfile, LinkClass, Profiles
from testbed.topology.yamlfile import Problem, Where

T = TypeVar("T")
HERE = ""
"""Id of this host if it is the only machine."""
_WORDS = {
    "convolution": "convolutions",
    "depthwise": "depthwise convolutions",
    "matrix": "matrix products",
    "memory": "memory traffic",
}
_SMALL_S = 1e-3
"""Threshold for the time of the work in a step, in seconds. In a shorter step, calling the operations
takes longer than the work itself (docs/evidence/profiles.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    profiles: Profiles = field(default_factory=Profiles)
    contents: Mapping[Hashable, object] = field(default_factory=dict)
    """Settings that name a file -> what was read from it."""
    measured: Measurements = field(default_factory=Measurements)
    """Measurements that are stored next to the topology, for example in the directory of an earlier run.
    They are used instead of new ones."""
    cpu: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Device group -> machine's id -> CPU share in cores that follows from the group's profile."""
    cpu_notes: tuple[str, ...] = ()
    model: int = 0
    """Size of the task's model in bytes."""

    def profile(self, name: str | None) -> DeviceProfile | None:
        return self.profiles.devices.get(name or "")

    def content(self, settings: Hashable, kind: type[T]) -> T | None:
        """Return the content of the file that `settings` name; None if they name none."""
        found = self.contents.get(settings)
        return found if isinstance(found, kind) else None

    def series(self, trace: LinkTrace | None) -> tuple[LinkSeries, ...]:
        """Content of the files of a link's trace or of traced traffic."""
        return self.content(trace, tuple) or ()

    def link(self, link: LinkSettings | None) -> config.AccessLink | None:
        """Return a group's `link` at the start of the run, without its trace. Values that the topology
        leaves out come from the link class."""
        if link is None or link.kind is None:
            return None if link is None else link.plain()
        by_class: LinkClass = self.profiles.link(link.kind)
        return config.AccessLink(
            by_class.up if link.up is None else link.up,
            by_class.down if link.down is None else link.down,
            (by_class.rtt if link.rtt is None else link.rtt) or 0.0,
            (by_class.jitter if link.jitter is None else link.jitter) or 0.0,
            (by_class.loss if link.loss is None else link.loss) or 0.0,
        )

    def used_profiles(self, topology: Topology) -> Profiles:
        devices = {group.profile for group in topology.devices}
        links = {group.link.kind for group in topology.devices if group.link is not None}
        return Profiles(
            devices={name: one for name, one in self.profiles.devices.items() if name in devices},
            links={name: one for name, one in self.profiles.links.items() if name in links},
        )


def read(topology: Topology) -> Catalog:
    """Read the profiles, traces and measurements that `topology` needs, and check the task's model.

    Raises BadInputError for an unknown profile or link class, for unreadable files, and if the model or
    its initial state is invalid.
    """
    folder = Path(topology.source.name).parent
    measured = Measurements.read(folder)
    named = any(group.profile or (group.link and group.link.kind) for group in topology.devices)
    catalog = Catalog(profiles=profiles.load(folder) if named else Profiles(), measured=measured)
    problems = [*_unknown(topology, catalog), *_no_dockerfiles(topology)]
    problems += [problem for part in PARTS for problem in part.lacks(topology, catalog)]
    contents: dict[Hashable, object] = {}
    files = [_traces(topology), *(part.files(topology) for part in PARTS)]
    for where, settings, load in itertools.chain.from_iterable(files):
        try:
            if settings not in contents:
                contents[settings] = load(folder)
        except (ValueError, OSError) as error:
            problems.append(topology.source.problem(where, _reason(error)))
    if problems:
        raise topology.source.error(problems)
    model = 4 * model_check.check(topology)
    if topology.task.initial is not None:
        from testbed.plan import models  # imports torch, which takes a second

        models.check_initial(topology)
    return replace(catalog, contents=contents, model=model)


def _traces(topology: Topology) -> Iterator[FileToRead]:
    for index, group in enumerate(topology.devices):
        if group.link is not None and (trace := group.link.trace) is not None:
            yield ("devices", index, "link", "trace"), trace, partial(_series, trace)
    for name, segment in topology.network.items():
        for number, traffic in enumerate(segment.background):
            if isinstance(traffic, TracedTraffic):
                where: Where = ("network", name, "background", number)
                yield where, traffic, partial(_background, traffic)


def _series(trace: LinkTrace, folder: Path) -> tuple[LinkSeries, ...]:
    return tuple(link_traces.read(trace, folder))


def _background(traffic: TracedTraffic, folder: Path) -> tuple[LinkSeries, ...]:
    traces = _series(traffic, folder)
    if not any(trace.columns.get(way) for trace in traces for way in config.WAYS):
        raise ValueError(f"{folder / (traffic.csv or '')}: found neither column up nor down")
    return traces


def _reason(error: ValueError | OSError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _unknown(topology: Topology, catalog: Catalog) -> Iterator[Problem]:
    known = catalog.profiles
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index)
        given = group.cpu is not None or group.name in catalog.measured.cpu
        if group.profile is not None and not given and group.profile not in known.devices:
            guess = profiles.suggestion(group.profile, known.devices)
            yield topology.source.problem((*where, "profile"), f"there is no such profile; {guess}")
        kind = None if group.link is None else group.link.kind
        if kind is not None and kind not in known.links:
            guess = profiles.suggestion(kind, known.links)
            yield topology.source.problem(
                (*where, "link", "class"), f"there is no such link class; {guess}"
            )


def _no_dockerfiles(topology: Topology) -> Iterator[Problem]:
    for index, group in enumerate(topology.devices):
        if group.dockerfile is not None and not group.dockerfile.is_file():
            message = f"the file {group.dockerfile} does not exist"
            yield topology.source.problem(("devices", index, "image"), message)


def needs_speeds(topology: Topology, catalog: Catalog, *, many_hosts: bool) -> bool:
    """Shares that were measured on one host are reused only on that host."""
    known = {} if many_hosts else catalog.measured.cpu
    return any(group.has_profile_speed and group.name not in known for group in topology.devices)


def with_cpu(
    catalog: Catalog, topology: Topology, speeds: Mapping[str, Calibration], here: str = HERE
) -> Catalog:
    """Return `catalog` with the CPU shares that devices with a profile need on each machine.

    `speeds`: machine's id -> its calibration. `here`: id of this machine. Raises BadInputError if a
    share cannot be computed.
    """
    task: Task = topology.task.build()
    problems, sentences, found = [], [], {}
    known: dict[tuple[str, str, int], dict[str, float]] = {}
    for index, group in enumerate(topology.devices):
        profile = catalog.profile(group.profile)
        if not group.has_profile_speed or group.profile is None or profile is None:
            continue
        kind = (group.group_name, group.profile, group.local.build().batch_size)
        if kind in known:  # another device of the same draw
            found[group.name] = known[kind]
            continue
        work = None
        if profile.training is not None:
            work = model_check.count_step_work(
                task, group.local.build().batch_size, topology.task.frozen
            )
        try:
            cpu = {
                node: round(cpu_share(group.profile, profile, speed, work), 4)
                for node, speed in speeds.items()
            }
        except BadInputError as error:
            problems.append(topology.source.problem(("devices", index, "profile"), str(error)))
            continue
        found[group.name] = known[kind] = cpu
        why = _why(group.profile, profile, speeds[here], work, topology.task.name)
        sentences.append(f"{group.group_name}: {cpu[here]:g} cpu {why}")
        if others := [one for node, one in cpu.items() if node != here]:
            least, most = min(others), max(others)
            span = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            sentences[-1] += f" On other nodes: {span} cpu."
    if problems:
        raise topology.source.error(problems)
    return replace(catalog, cpu=found, cpu_notes=tuple(sentences))


def _why(name: str, profile: DeviceProfile, host: Calibration, work: Work | None, task: str) -> str:
    if profile.training is None:
        return (
            f"for {name} by HPL alone (double-precision matrix products): its training times are not "
            "known, and training may be several times as slow or as fast."
        )
    if work is None:
        return f"for {name} by HPL alone: the work in a step of {task} is not known."
    spent = work_seconds(work, host.training)
    parts = sorted(((spent[kind], kind) for kind in KINDS), reverse=True)
    mix = ", ".join(
        f"{_WORDS[kind]} {part / sum(spent.values()):.0%}" for part, kind in parts if part > 0
    )
    error = profile.training.error
    tested = "" if error is None else f" (predicted training times were off by {error:.0%})"
    small = " The step is small: calls of operations take most of it, and the speeds do not cover calls."
    return (
        f"is as fast as {name} in training {task}, by its training speeds{tested}. A step's time "
        f"on this host: {mix}.{small if sum(spent.values()) < _SMALL_S else ''}"
    )
