"""How long a round of each device is expected to take, and whether one fits into the run.

Figures are device time, with the links, shares and speeds that the run begins with, for a device that is
alone on what it shares with others. They are means, without TCP's start and acknowledgements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from agents import pipeline
from agents.config import AccessLink, DrawnDuration
from agents.device.link import burst
from agents.timing.durations import DISTRIBUTIONS
from testbed.errors import listed
from testbed.plan import costs
from testbed.plan.costs import (
    HOPS,
    StepCost,
    StepTime,
    goodput,
    kept_step_time,
    message_sizes,
    on_link,
)
from testbed.plan.plan_tables import describe
from testbed.plan.planned import Plan, PlannedDevice
from testbed.topology import Topology

_MAX_NAMED = 4
"""A sentence that is about many devices names so many of them."""
_PATIENCE = 20
"""Times its mean that a round may take: an exponential duration does so once in 5e8 times."""

Lack = Literal["step time", "samples", "mean"]
"""What an estimate lacks: the time of a step, the samples that an epoch has, a finite mean of `think` or
`timing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Of a device."""

    samples: int | None
    """None: not known yet."""
    transfer: float
    """Seconds of the model down and the update up."""
    seconds: float
    """All of the round that is known, `transfer` included."""
    lacks: frozenset[Lack] = frozenset()


def expected(
    topology: Topology, plan: Plan, parameters: int, samples: Mapping[str, int] | None
) -> dict[str, Round]:
    """A round of each device. `parameters` of the model; `samples` of each device, if known."""
    w, common = np.zeros(parameters, np.float32), topology.update_steps
    exchanged = sum(pipeline.build_step(step).exchanged_bytes(parameters) for step in common)
    sizes: dict[str, tuple[int, int]] = {}
    for device in plan.devices:
        if repr(device.steps) not in sizes:
            names = topology.device_names
            steps = [*device.steps, *common]
            down, up = message_sizes("run", "0" * 64, w, steps=steps, clients=names)
            sizes[repr(device.steps)] = down + exchanged, up + exchanged
    server = AccessLink() if topology.server.link is None else topology.server.link.plain()
    one_step = topology.rule.build().client_side.kind == "gradient"
    flops = topology.task.flops_per_step if plan.traits.simulated else None  # else the share decides
    cost = replace(costs.of(plan.virtual, flops), time=_step_time(topology, plan))
    rounds = {}
    for device in plan.devices:
        own = None if samples is None else samples[device.name]
        training, lacks = _training(device, cost, own, one_step=one_step)
        think = _mean(device.think)
        transfer = _transfer(device, server, sizes[repr(device.steps)], in_packets=plan.packets)
        rounds[device.name] = Round(
            samples=own,
            transfer=transfer,
            seconds=transfer + training + (think or 0.0),
            lacks=lacks if think is not None else lacks | {"mean"},
        )
    return rounds


def _step_time(topology: Topology, plan: Plan) -> StepTime | None:
    """As given, else as last measured in virtual time."""
    if (own := costs.step_time(plan.virtual)) is not None:
        return own
    shares = (device for device in plan.devices if device.cpu is not None)
    first = next(shares, None)
    if first is None:
        return None
    return kept_step_time(topology.task.build(), first.local, topology.task.frozen)


def _training(
    device: PlannedDevice, cost: StepCost, samples: int | None, *, one_step: bool
) -> tuple[float, frozenset[Lack]]:
    """Seconds of local training, as far as known, and what is not known. `timing` is the least."""
    lacks: set[Lack] = set()
    least, computed = _mean(device.timing), 0.0
    if least is None:
        lacks.add("mean")
    if step := cost.per_step(device):
        local = device.local
        if one_step or local.steps is not None:
            computed = step * (1 if one_step else local.count(0)) + cost.per_update(device)
        elif samples is not None:
            computed = step * local.count(samples) + cost.per_update(device)
        else:
            lacks.add("samples")
    elif device.timing is None or device.cpu is not None:
        lacks.add("step time")
    return max(computed, (least or 0.0) / device.speed), frozenset(lacks)


def _mean(duration: DrawnDuration | None) -> float | None:
    """In seconds; None where it is not finite."""
    if duration is None:
        return 0.0
    mean = DISTRIBUTIONS[duration.distribution](**duration.params).expectation
    return mean if math.isfinite(mean) else None


def _transfer(
    device: PlannedDevice, server: AccessLink, sizes: tuple[int, int], *, in_packets: bool
) -> float:
    """Seconds of the model down and the update up, whose bytes are `sizes`. `in_packets`: as in
    `testbed.virtual.network`, after a pause."""
    link, access = device.link or AccessLink(), device.access or AccessLink()
    seconds = link.rtt + (2 * HOPS if in_packets and not device.direct else 0.0)
    ways = zip(
        sizes, (link.down, link.up), (access.down, access.up), (server.up, server.down), strict=True
    )
    for size, own, *shared in ways:
        bits = 8 * (on_link(size) if in_packets else size)
        rate = goodput(own, link.rtt, link.loss)
        at_once = 8 * burst(int(rate)) if rate and in_packets else 0
        passes = [(rate, max(0, bits - at_once)), *((each, bits) for each in shared)]
        seconds += max((_seconds(left, rate) for rate, left in passes if rate is not None), default=0.0)
    return seconds


def _seconds(bits: int, rate: float) -> float:
    return bits / rate if rate else math.inf


def patience(plan: Plan, rounds: Mapping[str, Round]) -> dict[str, float]:
    """By device: for how many seconds it may be silent, whatever its rounds took. For ever, where they
    differ by chance and their mean is not known; without an entry, its rounds have to tell."""
    found = {}
    for device in plan.devices:
        one, delays = rounds[device.name], (device.think, device.timing)
        if not one.lacks:
            found[device.name] = _PATIENCE * one.seconds
        elif any(delay is not None and delay.distribution != "constant" for delay in delays):
            found[device.name] = math.inf
    return found


def by_device(plan: Plan, rounds: Mapping[str, Round]) -> list[dict[str, Any]]:
    """The rows of `testbed.plan.describe` with each device's `samples`, `transfer_s` and `round_s`, and
    what the last one `lacks`. For programs."""
    return [{**row, **_figures(rounds[row["device"]])} for row in describe(plan)]


def _figures(one: Round) -> dict[str, Any]:
    known = {"transfer_s": one.transfer, "round_s": one.seconds}
    rounded = {name: value if value < math.inf else None for name, value in known.items()}
    return {"samples": one.samples, **rounded, "lacks": sorted(one.lacks)}


def by_group(plan: Plan, rounds: Mapping[str, Round]) -> list[dict[str, Any]]:
    """A row per group: how many `devices`, and from which to which figure theirs go: `samples`,
    `transfer` (both ways) and `round`; a round of which not all is known is `> 12s`. For people."""
    members: dict[str, list[Round]] = {}
    for device in plan.devices:
        members.setdefault(device.group, []).append(rounds[device.name])
    return [{"group": group, **_row(own)} for group, own in members.items()]


def _row(own: Sequence[Round]) -> dict[str, Any]:
    samples = [one.samples for one in own if one.samples is not None]
    low, high = min(samples, default=0), max(samples, default=0)
    lacking = any(one.lacks for one in own)
    seconds = [one.seconds for one in own]
    return {
        "devices": len(own),
        "samples": None if not samples else str(low) if low == high else f"{low} to {high}",
        "transfer": _span([one.transfer for one in own]) if any(one.transfer for one in own) else None,
        "round": f"{'> ' if lacking else ''}{_span(seconds)}" if any(seconds) else None,
    }


def remarks(topology: Topology, rounds: Mapping[str, Round]) -> Iterator[str]:
    """Sentences on what is not known, then on devices that will not finish a round within the run."""
    if any(one.samples is None for one in rounds.values()):
        yield "How many samples a device has is known once the first run has prepared the data."
    for lack, sentence in _LACKS.items():
        if names := [name for name, one in rounds.items() if lack in one.lacks]:
            yield sentence.format(listed(names, _MAX_NAMED))
    if (end := topology.stop.build().after) is None:
        return
    links = {name: one.transfer for name, one in rounds.items() if one.transfer > end}
    late = {name: one.seconds for name, one in rounds.items() if one.seconds > end >= one.transfer}
    if links:
        yield (
            f"Warning: {listed(list(links), _MAX_NAMED)} will not finish one round: model and update "
            f"alone take {_span(links.values())} over the link, and the run ends after {_about(end)} "
            "(stop.after). Raise stop.after or the rates."
        )
    if late:
        yield (
            f"Warning: {listed(list(late), _MAX_NAMED)} will not finish one round: it takes about "
            f"{_span(late.values())}, and the run ends after {_about(end)} (stop.after). Raise "
            "stop.after, or give less work (task.local)."
        )


_LACKS: Mapping[Lack, str] = {
    "step time": "How long a step of {} takes on this host is not known: a round takes longer than "
    "shown. Give virtual.step_time, or run it once with --runtime virtual, which measures it.",
    "samples": "How many steps an epoch of {} has is known with the samples: a round takes longer than "
    "shown.",
    "mean": "think or timing of {} has no finite mean: a round takes longer than shown.",
}


def _span(seconds: Collection[float]) -> str:
    """`12s`, or `12s to 40s`."""
    low, high = _about(min(seconds)), _about(max(seconds))
    return low if low == high else f"{low} to {high}"


def _about(seconds: float) -> str:
    """With three digits: `12.3s`, `45ms`."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 1000 else f"{seconds:.0f}s"
