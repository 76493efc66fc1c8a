"""Tables of a plan, for `testbed plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.config import AccessLink, LocalTraining
from testbed.host.cpusets import cpuset
from testbed.plan.feasibility import gib
from testbed.plan.planned_devices import Plan, PlannedDevice, duration_text
from testbed.topology.units import format_duration, format_rate, format_size
from testbed.traits import Traits

_OPTIONAL = (
    *("cpu", "quota", "memory", "gpu", "gflops", "timing", "speed", "rtt", "jitter", "loss", "access"),
    *("compression", "byzantine", "origin", "node", "host"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """A device as it would be launched, and its expected round. Texts are written as in a topology."""

    device: str
    cpu: float | None = None
    """Share of one core of the host."""
    quota: str | None = None
    """CPU time per period, in ms."""
    memory: str | None = None
    """Memory limit."""
    gpu: str | None = None
    """GPU, or share of a GPU."""
    gflops: float | None = None
    """Speed of the device in Gflop/s, before the factor `speed`."""
    timing: str | None = None
    """Minimum duration of a training, before the factor `speed`."""
    speed: float | None = None
    """Speed factor that was drawn for the device."""
    up: str | None
    """Uplink rate."""
    down: str | None
    """Downlink rate."""
    rtt: str | None = None
    """Round-trip time."""
    jitter: str | None = None
    loss: str | None = None
    """Share of lost packets."""
    access: str | None = None
    """Segment that the device is attached to, which it may share with other devices."""
    think: str | None
    """Pause between trainings."""
    local: str
    """Local training: steps or epochs, batch size, and the optimizer unless it is SGD."""
    compression: str | None = None
    byzantine: str | None = None
    """Attack that the device carries out."""
    origin: str | None = None
    """Source of the keys of a drawn device, such as `survey.csv:7`."""
    host: str | None = None
    """Address of a real device; None if the device is emulated."""
    node: str | None = None
    """Name of the device's node, if there are several nodes."""
    samples: int | None
    """Number of training samples; None until the data is prepared."""
    transfer_s: float
    """Expected time to transfer model and update, in seconds of device time; infinite if unknown."""
    round_s: float
    """Expected time of a round (transfers and training), in seconds of device time; infinite if
    unknown."""
    lacks: Sequence[str]
    """Information that is missing for an estimate of the round's time."""
    idle_w: float | None = None
    """Power without work, in watts; None if the device's energy is not counted."""
    working_w: float | None = None
    """Mean power while the device trains round after round, in watts; None if unknown."""
    battery_idle_s: float | None = None
    """Seconds of device time until the first power-off without work; None if there is none within the
    time that was looked at, or no battery."""
    battery_working_s: float | None = None
    """Seconds of device time until the first power-off if the device trains round after round; None as
    in `battery_idle_s`, and if the power is unknown."""


def device_table(plan: Plan) -> list[dict[str, Any]]:
    """Columns in which no device has a value are left out."""
    names = {node.id: node.name for node in plan.nodes}
    rows = [
        {**_row(device.as_shaped, plan.traits), "node": names.get(plan.placement.get(device.name, ""))}
        for device in plan.devices
    ]
    unused = {name for name in _OPTIONAL if all(row[name] is None for row in rows)}
    return [{name: value for name, value in row.items() if name not in unused} for row in rows]


def node_table(plan: Plan) -> list[dict[str, Any]]:
    """Compare what the devices request with what the node has. The column `core` is the speed of the
    node's cores relative to this host's cores, if it was measured."""
    on: dict[str, list[PlannedDevice]] = {node.id: [] for node in plan.nodes}
    for device in plan.emulated_devices:
        on[plan.placement[device.name]].append(device)
    measured = any(node.core is not None for node in plan.nodes)
    return [
        {
            "node": node.name,
            "devices": len(on[node.id]),
            "cores": f"{math.fsum(one.host_cpu for one in on[node.id]):.3g} of {node.capacity:g}",
            **({"core": f"{node.core or 1.0:.2f}"} if measured else {}),
            "memory": f"{gib(sum(one.memory for one in on[node.id]))} of {gib(node.memory)}",
            "device cpus": cpuset(node.devices),
            "others": f"cpu {cpuset(node.infrastructure)}: "
            + ("broker, aggregator, router" if node.here else "router"),
        }
        for node in plan.nodes
    ]


def _row(device: PlannedDevice, traits: Traits) -> dict[str, Any]:
    link = device.link or AccessLink()
    real = device.host is not None
    is_limited = device.cpu is not None and not traits.simulated
    quota = f"{device.quota / 1000:g}/{device.period / 1000:g} ms" if is_limited else None
    return {
        "device": device.name,
        "cpu": device.cpu,
        "quota": quota,
        "memory": format_size(device.memory) if traits.cgroups and not real else None,
        "gpu": None if device.gpu is None else device.gpu.summary,
        "gflops": device.gflops,
        "timing": duration_text(device.timing),
        "speed": None if device.speed == 1 else round(device.speed, 3),
        "up": link.up and format_rate(link.up),
        "down": link.down and format_rate(link.down),
        "rtt": format_duration(link.rtt) if link.rtt else None,
        "jitter": format_duration(link.jitter) if link.jitter else None,
        "loss": f"{link.loss:.3g}" if link.loss else None,
        "access": device.segment,
        "think": duration_text(device.think),
        "local": _local(device.local),
        "compression": device.step_kind("compression"),
        "byzantine": device.step_kind("byzantine"),
        "origin": device.origin,
        "host": device.host,
    }


def _local(local: LocalTraining) -> str:
    number, unit = (local.steps, "step") if local.steps else (local.epochs, "epoch")
    last = "" if local.last_batch == "keep" else f", {local.last_batch} last"
    other = "" if local.optimizer == "sgd" else f", {local.optimizer}"
    return f"{number} {unit}{'' if number == 1 else 's'} x {local.batch_size}{last}{other}"
