"""Measurements of the controller itself: the load of hosts, and links before the run clock starts."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from typing import Any

from agents.timing.clock import in_device_time
from testbed.fidelity import LegClock, host_load, measure, requested
from testbed.fidelity.figures import Fidelity
from testbed.fidelity.host_load import HostSample, OtherWork, Sampler
from testbed.host import cpus
from testbed.host.cpus import CpuReading, cpu_numbers
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.live_files import Samples
from testbed.runtimes import Meter
from testbed.segments import measured as segments
from testbed.segments.measured import SegmentFidelity


class HostWatch:
    def __init__(self, spec: RunSpec, meter: Meter) -> None:
        self._spec, self._meter = spec, meter
        self._dilation = spec.plan.dilation
        self._sampler = Sampler(
            spec.plan.cpus,
            cpu_numbers(spec.plan.device_cpus),
            meter.server_pids,
            meter.device_cpu_seconds,
            dilation=spec.plan.dilation,
        )
        self.samples: list[HostSample] = []
        """One sample per second while the run clock is running."""
        self.clocks: dict[str, float] = {}
        """Other host -> largest error so far, in seconds, of times converted to this host's clock."""
        self.other_samples: dict[str, list[HostSample]] = {}
        """Other host with devices -> its load samples. The samples are taken less often than once per
        second."""
        self._others: dict[str, HostSample | None] = {}
        """Other host with devices -> its last sample; None if its load is unknown."""
        self._before_links: CpuReading | None = None
        """CPU times of all processes before the last measurement of links."""
        self._telemetry = Samples(spec.directory.telemetry, 0)
        self._probes: list[dict[str, Any]] = []
        """Measurements of links so far, as lines of telemetry."""

    def sample(self, at: float, lateness: float) -> None:
        """`at`: device time in seconds. `lateness`: of the controller's timers, in seconds."""
        sample = self._sampler.sample(at, lateness)
        if sample is not None:
            self.samples.append(sample)

    def sample_others(self, at: float, used: Mapping[str, float]) -> None:
        """`used`: CPU seconds of each device so far."""
        for host, reading in self._meter.other_hosts(at, used).items():
            self._others[host] = reading.load
            if reading.load is not None:
                self.other_samples.setdefault(host, []).append(reading.load)
            off = reading.clock_uncertainty / self._dilation
            self.clocks[host] = max(off, self.clocks.get(host, 0.0))

    def begin_run(self, used: Mapping[str, float]) -> None:
        """Forget clocks and load of the time before the run clock started."""
        self.clocks.clear()
        self.sample_others(0.0, used)
        self.other_samples.clear()

    def begin_links(self) -> None:
        """A measurement of links begins."""
        self._before_links = cpus.read_cpu_times()

    def link_figures(self, ended: Collection[str]) -> tuple[Fidelity, tuple[SegmentFidelity, ...]]:
        """Devices that are not in `ended`, and segments, by their last measurements."""
        lines = self._telemetry.read()
        self._probes += (in_device_time(one, self._dilation) for one in lines if "probe" in one)
        before_the_start = LegClock(0.0, begin=math.inf)
        wanted = [one for one in requested.devices(self._spec, ()) if one.device not in ended]
        found = measure(wanted, self._probes, before_the_start, {})
        return found, segments.of_run(self._spec, (), LegClock(0.0, end=0.0))

    def other_work(self) -> list[OtherWork]:
        """Work on each host with devices during the last measurement of links, before which and after
        which other hosts were sampled."""
        assert self._before_links is not None  # noqa: S101
        now = cpus.read_cpu_times()
        cores = os.cpu_count() or 1
        here = host_load.on_this_host(self._before_links, now, self._meter.groups(), cores)
        return [here, *(host_load.on_another_host(*other) for other in self._others.items())]
