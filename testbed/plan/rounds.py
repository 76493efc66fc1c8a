"""Estimate of each device's round, and check whether a round fits into the run.

Figures are means in device time. The figures are computed from the links, shares and speeds at the start
of the run, as if no device shared its access link. TCP's slow start and acknowledgements are not
included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from agents.config import AccessLink, DrawnDuration
from agents.device.link import burst
from agents.pipeline.steps import build_step
from agents.rules.interface import ClientSide
from agents.texts import name_list
from agents.timing.durations import DISTRIBUTIONS
from testbed.plan import costs
from testbed.plan.costs import (
    HOPS,
    StepCost,
    StepTime,
    bytes_on_link,
    cached_step_time,
    goodput,
    message_sizes,
)
from testbed.plan.features import PARTS
from testbed.plan.plan_tables import DeviceRow, device_table
from testbed.plan.planned_devices import Plan, PlannedDevice
from testbed.topology import Topology

_MAX_NAMED = 4
_ID_SUFFIX, _SCHEMA = "-20260101-120000-abcd", "0123456789ab"
"""Texts as long as the end of a run's id and the hash of a model's schema. Each message has both."""
_PATIENCE = 20
"""Longest expected round, as a multiple of the mean round. An exponentially distributed duration exceeds
20 times its mean once in 5e8 times."""

Lack = Literal["step time", "samples", "mean"]
"""Inputs that an estimate may lack: the time of a step, the number of samples per epoch, or a finite
mean of `think` or `timing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Estimate of download of the model, training, upload of the update."""

    samples: int | None
    """None if not known yet."""
    transfer: float
    """Seconds to download the model and to upload the update."""
    seconds: float
    """`transfer` included, without the unknown parts."""
    computing: float = 0.0
    """Known seconds in which the CPU computes."""
    sent: int = 0
    """Bytes."""
    received: int = 0
    """Bytes."""
    lacks: frozenset[Lack] = frozenset()


def estimate_rounds(
    topology: Topology, plan: Plan, parameters: int, samples: Mapping[str, int] | None
) -> dict[str, Round]:
    """`samples`: device -> number of training samples; None if the numbers are not known yet."""
    w, common = np.zeros(parameters, np.float32), topology.update_steps
    side: ClientSide = topology.rule.build().client_side
    exchanged = sum(build_step(step).exchanged_bytes(parameters) for step in common)
    sizes: dict[str, tuple[int, int]] = {}
    for device in plan.devices:
        if repr(device.steps) not in sizes:
            names = topology.device_names
            steps = [*device.steps, *common]
            run = topology.name + _ID_SUFFIX
            down, up = message_sizes(run, _SCHEMA, w, steps=steps, clients=names, side=side)
            sizes[repr(device.steps)] = down + exchanged, up + exchanged
    server = AccessLink() if topology.server.link is None else topology.server.link.plain()
    one_step = side.kind == "gradient"
    flops = topology.task.flops_per_step if plan.traits.simulated else None  # else the CPU share decides
    cost = replace(costs.step_cost(plan.virtual, flops), time=_step_time(topology, plan))
    idle = {*topology.idle_devices(samples or {})}
    rounds = {}
    for device in plan.devices:
        own = None if samples is None else samples[device.name]
        if device.name in idle:
            rounds[device.name] = Round(samples=own, transfer=0.0, seconds=0.0)
            continue
        training, computing, lacks = _training(device, cost, own, one_step=one_step)
        think = _mean(device.think)
        transfer = _transfer(
            device, server, sizes[repr(device.steps)], in_packets=plan.simulates_packets
        )
        rounds[device.name] = Round(
            samples=own,
            transfer=transfer,
            seconds=transfer + training + (think or 0.0),
            computing=computing,
            received=sizes[repr(device.steps)][0],
            sent=sizes[repr(device.steps)][1],
            lacks=lacks if think is not None else lacks | {"mean"},
        )
    return rounds


def _step_time(topology: Topology, plan: Plan) -> StepTime | None:
    """From the plan, or from the last measurement on this host for virtual time."""
    if (own := costs.step_time(plan.virtual)) is not None:
        return own
    shares = (device for device in plan.devices if device.cpu is not None)
    first = next(shares, None)
    if first is None:
        return None
    return cached_step_time(topology.task.build(), first.local, topology.task.frozen)


def _training(
    device: PlannedDevice, cost: StepCost, samples: int | None, *, one_step: bool
) -> tuple[float, float, frozenset[Lack]]:
    """Return the known seconds, those in which the CPU computes, and the unknown parts. The training
    takes at least the mean of the device's `timing`, divided by the device's speed factor. The CPU
    computes for all of that time if nothing else is known of its speed."""
    lacks: set[Lack] = set()
    least, computed = _mean(device.timing), 0.0
    if least is None:
        lacks.add("mean")
    if step := cost.per_step(device):
        local = replace(device.local, steps=1, epochs=None) if one_step else device.local
        if samples is not None:
            computed = step * local.work(samples) + cost.per_update(device)
        elif local.steps is not None:
            computed = step * local.steps + cost.per_update(device)
        else:
            lacks.add("samples")
    elif device.timing is None or device.cpu is not None:
        lacks.add("step time")
    training = max(computed, (least or 0.0) / device.speed)
    computing = training if device.cpu is None and device.gflops is None else computed
    return training, computing, frozenset(lacks)


def _mean(duration: DrawnDuration | None) -> float | None:
    """Mean in seconds; None if it is not finite."""
    if duration is None:
        return 0.0
    mean = DISTRIBUTIONS[duration.distribution](**duration.params).expectation
    return mean if math.isfinite(mean) else None


def _transfer(
    device: PlannedDevice, server: AccessLink, sizes: tuple[int, int], *, in_packets: bool
) -> float:
    """Seconds for both directions. `sizes`: model and update in bytes.

    `in_packets`: whether to count packets as `testbed.virtual.network` does. The links are assumed to be
    idle before the transfer.
    """
    if (timed := device.transfers) is not None:
        return sum(_mean(one) or 0.0 for one in (timed.download, timed.upload))
    link = device.link or AccessLink()
    seconds = link.through(device.path).rtt + (2 * HOPS if in_packets and not device.is_direct else 0.0)
    path = device.path
    ways = (
        (sizes[0], link.down, [server.up, *(one.down for one in path)]),
        (sizes[1], link.up, [server.down, *(one.up for one in path)]),
    )
    for size, own, shared in ways:
        bits = 8 * (bytes_on_link(size) if in_packets else size)
        rate = goodput(own, link.rtt, link.loss)
        at_once = 8 * burst(int(rate)) if rate and in_packets else 0
        passes = [(rate, max(0, bits - at_once)), *((each, bits) for each in shared)]
        seconds += max((_seconds(left, rate) for rate, left in passes if rate is not None), default=0.0)
    return seconds


def _seconds(bits: int, rate: float) -> float:
    return bits / rate if rate else math.inf


def patience(plan: Plan, rounds: Mapping[str, Round]) -> dict[str, float]:
    """Return device -> seconds for which the device may be silent.

    The value is infinite if the device's rounds vary at random and the mean of the rounds is unknown. A
    device without an entry is judged by its own past rounds.
    """
    found = {}
    for device in plan.devices:
        one, delays = rounds[device.name], (device.think, device.timing)
        if not one.lacks:
            found[device.name] = _PATIENCE * one.seconds
        elif any(delay is not None and delay.distribution != "constant" for delay in delays):
            found[device.name] = math.inf
    return found


def device_rows(plan: Plan, rounds: Mapping[str, Round]) -> list[DeviceRow]:
    more = [part.columns(plan, rounds) for part in PARTS]
    return [
        DeviceRow(
            **row,
            samples=one.samples,
            transfer_s=one.transfer,
            round_s=one.seconds,
            lacks=sorted(one.lacks),
            **{name: value for one in more for name, value in one.get(row["device"], {}).items()},
        )
        for row in device_table(plan)
        for one in [rounds[row["device"]]]
    ]


def group_rows(plan: Plan, rounds: Mapping[str, Round]) -> list[dict[str, Any]]:
    """One row per group, for people: `devices` (number), and ranges of `samples`, `transfer` (both
    directions) and `round`. `> 12s` means that part of the round is unknown. Columns of features
    follow."""
    members: dict[str, list[str]] = {}
    for device in plan.devices:
        members.setdefault(device.group, []).append(device.name)
    more = [part.group_columns(plan, rounds, members) for part in PARTS]
    return [
        {
            "group": group,
            **_row([rounds[name] for name in own]),
            **{name: value for one in more for name, value in one.get(group, {}).items()},
        }
        for group, own in members.items()
    ]


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
    """Sentences on what is unknown, then on devices that will not train or will not finish a round
    within the run."""
    if any(one.samples is None for one in rounds.values()):
        yield "The number of samples per device is known once a run has prepared the data."
    known = {name: one.samples for name, one in rounds.items() if one.samples is not None}
    if idle := topology.idle_devices(known):
        yield (
            f"{name_list(idle, _MAX_NAMED)} will not train: too few samples for a mini-batch. No rule "
            "sends them a model."
        )
    for lack, sentence in _LACKS.items():
        if names := [name for name, one in rounds.items() if lack in one.lacks]:
            yield sentence.format(name_list(names, _MAX_NAMED))
    if (end := topology.stop.build().after) is None:
        return
    links = {name: one.transfer for name, one in rounds.items() if one.transfer > end}
    late = {name: one.seconds for name, one in rounds.items() if one.seconds > end >= one.transfer}
    if links:
        yield (
            f"Warning: {name_list(list(links), _MAX_NAMED)} will not finish one round: model and update "
            f"alone take {_span(links.values())} over the link, but the run ends after {_about(end)} "
            "(stop.after). Raise stop.after or the rates."
        )
    if late:
        yield (
            f"Warning: {name_list(list(late), _MAX_NAMED)} will not finish one round: it takes about "
            f"{_span(late.values())}, but the run ends after {_about(end)} (stop.after). Raise "
            "stop.after, or give less work (task.local)."
        )


_LACKS: Mapping[Lack, str] = {
    "step time": "The time of a step of {} on this host is unknown: a round takes longer than shown. "
    "Give virtual.step_time, or run it once with --runtime virtual, which measures it.",
    "samples": "The number of steps per epoch of {} is unknown until the number of samples is known: a "
    "round takes longer than shown.",
    "mean": "think or timing of {} has no finite mean: a round takes longer than shown.",
}


def _span(seconds: Collection[float]) -> str:
    """Format a range such as `12s to 40s`."""
    low, high = _about(min(seconds)), _about(max(seconds))
    return low if low == high else f"{low} to {high}"


def _about(seconds: float) -> str:
    """Format seconds with three digits: `12.3s`, `45ms`."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 1000 else f"{seconds:.0f}s"
