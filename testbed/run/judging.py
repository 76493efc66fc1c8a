"""Judgement of an emulated run: comparison of the resources that devices got with the requested
resources."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from agents import events
from agents.timing.clock import in_device_time
from testbed.fidelity import SegmentClock, measure, real_devices, requested, segments
from testbed.fidelity.validity import Judgement, Validity, verdict
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.tail import Samples

if TYPE_CHECKING:
    from testbed.run.controller import Controller


def judge(spec: RunSpec, controller: Controller, epoch: float) -> tuple[Judgement, int]:
    """Return the number of segments that the judgement covers, too. Each start of the run clock begins a
    segment.

    The fidelity is that of the last segment, and is saved in the run directory. The validity is that of
    the whole run. `epoch`: reading of the monotonic clock at device time 0.
    """
    records = list(events.read(spec.directory.events))
    begins = [record.at for record in records if isinstance(record, events.RunStarted)]
    begin = begins[-1] if begins else 0.0
    end = max((record.at for record in records), default=math.inf)
    dilation = spec.plan.dilation
    devices = requested.devices(spec, records)
    trainings = requested.trainings(devices, records)
    fidelity = measure(
        devices,
        (in_device_time(one, dilation) for one in Samples(spec.directory.telemetry).read()),
        SegmentClock(epoch / dilation, begin=begin, end=end),
        trainings,
    )
    fidelity = replace(
        fidelity,
        clocks=controller.clocks,
        energy=controller.energy_comparison,
        segments=segments.of_run(spec, records, epoch / dilation, begin, end),
        real=real_devices.of_run(
            {one.name: str(one.host) for one in spec.plan.real_devices},
            records,
            Samples(spec.directory.telemetry).read(),
            controller.clocks,
            controller.other_samples,
        ),
    )
    fidelity.save(spec.directory.fidelity)
    if fidelity.real:
        spec.directory.write_manifest(real={one.device: one.as_dict() for one in fidelity.real})
    steps = tuple(requested.steps(records))
    last = verdict(
        controller.host_samples,
        fidelity,
        steps=steps,
        trainings=trainings.values(),
        failures=controller.failures,
        others=controller.other_samples,
        disruptions=[
            replace(one, at=min(one.at, end))
            for one in (*records, *controller.disruptions)  # most are in both
            if isinstance(one, events.Disrupted) and one.at >= begin and one.since <= end
        ],
        wrong_sums=[
            record for record in records if isinstance(record, events.WrongSum) and record.at >= begin
        ],
    )
    former = spec.directory.read_manifest()
    earlier = former.get("validity")
    covered = 0 if earlier is None else former.get("judged_segments", 1)
    whole = last.after(Validity.from_dict(earlier or {}), max(0, len(begins) - 1 - covered))
    return Judgement(fidelity, whole, steps), len(begins)
