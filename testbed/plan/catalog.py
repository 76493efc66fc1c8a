"""The catalog: all that a plan takes from beside the topology and the host.

`read` reads what lies in files; `with_cpu` adds the CPU shares of device profiles, by the speeds of the
machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agents import config
from agents.tasks.interface import Task
from testbed.errors import BadInputError
from testbed.plan.measured import Measured
from testbed.plan.work import of_step
from testbed.speed.calibration import Calibration, seconds, share
from testbed.speed.kinds import KINDS, Work
from testbed.topology import Topology, link_traces, profiles
from testbed.topology.devices import DeviceGroup
from testbed.topology.link_traces import Trace
from testbed.topology.profiles import DeviceProfile, LinkClass, Profiles
from testbed.topology.yamlfile import Problem, Where

HERE = ""
"""Id of this host in `Catalog.cpu`, where it is the only one."""
_WORDS = {
    "convolution": "convolutions",
    "depthwise": "depthwise convolutions",
    "matrix": "matrix products",
    "memory": "memory traffic",
}
"""The kinds of work, for people."""
_SMALL_S = 1e-3
"""Of work in a step here: of less, the calls of operations take longer (docs/evidence/profiles.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All that a plan takes from beside the topology and the host."""

    profiles: Profiles = field(default_factory=Profiles)
    traces: Mapping[str, tuple[Trace, ...]] = field(default_factory=dict)
    """The link traces of each group that has some."""
    hints: tuple[str, ...] = ()
    """Sentences on words of the version before this one in the files of these."""
    measured: Measured = field(default_factory=Measured)
    """What lies beside the topology, as it does in a run's directory: it is not measured again."""
    cpu: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """CPU shares that follow from profiles, by group and id of the machine."""
    cpu_notes: tuple[str, ...] = ()
    """Sentences on how these were found."""
    model: int = 0
    """Bytes of the task's model."""

    def profile(self, group: DeviceGroup) -> DeviceProfile | None:
        """None where it has none, or one that nobody needs to know."""
        return self.profiles.devices.get(group.profile or "")

    def link(self, group: DeviceGroup) -> config.AccessLink | None:
        """The group's own link, without what its trace does: what the topology gives, else its class."""
        link = group.link
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

    def used_by(self, topology: Topology) -> Profiles:
        """The profiles and link classes that `topology` names."""
        devices = {group.profile for group in topology.devices}
        links = {group.link.kind for group in topology.devices if group.link is not None}
        return Profiles(
            devices={name: one for name, one in self.profiles.devices.items() if name in devices},
            links={name: one for name, one in self.profiles.links.items() if name in links},
        )


def read(topology: Topology) -> Catalog:
    """The profiles, traces and measurements that `topology` needs. Raises BadInputError for a name that
    no profile has, and for files that cannot be read."""
    folder = Path(topology.source.name).parent
    measured = Measured.read(folder)
    named = any(group.profile or (group.link and group.link.kind) for group in topology.devices)
    catalog = Catalog(profiles=profiles.load(folder) if named else Profiles(), measured=measured)
    problems = [*_unknown(topology, catalog), *_no_dockerfiles(topology)]
    found, hints = {}, []
    for index, group in enumerate(topology.devices):
        if group.link is None or group.link.trace is None:
            continue
        try:
            found[group.name] = tuple(link_traces.read(group.link.trace, folder))
            file = group.link.trace.csv
            hints += [f"{file}: {hint}" for trace in found[group.name] for hint in trace.hints]
        except (ValueError, OSError) as error:
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            where: Where = ("devices", index, "link", "trace")
            problems.append(topology.source.problem(where, reason))
    if problems:
        raise topology.source.error(problems)
    return replace(catalog, traces=found, hints=tuple(hints))


def _unknown(topology: Topology, catalog: Catalog) -> Iterator[Problem]:
    known = catalog.profiles
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index)
        given = group.cpu is not None or group.name in catalog.measured.cpu
        if group.profile is not None and not given and group.profile not in known.devices:
            guess = profiles.guess(group.profile, known.devices)
            yield topology.source.problem((*where, "profile"), f"no profile is called this; {guess}")
        kind = None if group.link is None else group.link.kind
        if kind is not None and kind not in known.links:
            guess = profiles.guess(kind, known.links)
            yield topology.source.problem(
                (*where, "link", "class"), f"no link class is called this; {guess}"
            )


def _no_dockerfiles(topology: Topology) -> Iterator[Problem]:
    for index, group in enumerate(topology.devices):
        if group.dockerfile is not None and not group.dockerfile.is_file():
            message = f"there is no file {group.dockerfile}"
            yield topology.source.problem(("devices", index, "image"), message)


def needs_speeds(topology: Topology, catalog: Catalog, *, many_hosts: bool) -> bool:
    """Whether some device's CPU share follows from its profile and the speed of the machines. Shares
    that were found for one host count on it alone."""
    known = {} if many_hosts else catalog.measured.cpu
    return any(_by_profile(group) and group.name not in known for group in topology.devices)


def _by_profile(group: DeviceGroup) -> bool:
    return group.profile is not None and group.cpu is None


def with_cpu(
    catalog: Catalog, topology: Topology, speeds: Mapping[str, Calibration], here: str = HERE
) -> Catalog:
    """`catalog` with the CPU shares that the profiles' speeds make on each machine, by the `speeds` of
    these, of which one is `here`. Raises BadInputError."""
    task: Task = topology.task.build()
    problems, sentences, found = [], [], {}
    for index, group in enumerate(topology.devices):
        profile = catalog.profile(group)
        if not _by_profile(group) or group.profile is None or profile is None:
            continue
        work = None
        if profile.training is not None:
            work = of_step(task, group.local.build().batch_size, topology.task.frozen)
        try:
            cpu = {
                node: round(share(group.profile, profile, speed, work), 4)
                for node, speed in speeds.items()
            }
        except BadInputError as error:
            problems.append(topology.source.problem(("devices", index, "profile"), str(error)))
            continue
        found[group.name] = cpu
        why = _why(group.profile, profile, speeds[here], work, topology.task.name)
        sentences.append(f"{group.name}: {cpu[here]:g} cpu {why}")
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
            f"for {name} by HPL alone (double-precision matrix products): no training times of it are "
            "known, and training may be several times as slow or as fast."
        )
    if work is None:
        return f"for {name} by HPL alone: what a step of {task} consists of is not known."
    spent = seconds(work, host.training)
    parts = sorted(((spent[kind], kind) for kind in KINDS), reverse=True)
    mix = ", ".join(
        f"{_WORDS[kind]} {part / sum(spent.values()):.0%}" for part, kind in parts if part > 0
    )
    error = profile.training.error
    tested = "" if error is None else f" (times that these predict were off by {error:.0%})"
    small = " It is small: calls of operations, of which training times tell nothing, take most of it."
    return (
        f"is as fast as {name} in training {task}, by its speeds in training{tested}. A step's time "
        f"on this host: {mix}.{small if sum(spent.values()) < _SMALL_S else ''}"
    )
