"""A run's figures for Prometheus, on a port of the loopback interface (`testbed up --metrics-port`).

They come from the run directory's files, read as far as they are new when somebody asks: a run that
nobody asks about has no work with it. All times are device time.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import isnan, nan
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from agents import events
from testbed.errors import BadInputError
from testbed.follow import Follower
from testbed.rundir import RunDirectory

HOST = "127.0.0.1"
STALENESS = (0, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the histogram's buckets, in versions."""


@contextmanager
def served(directory: RunDirectory, port: int) -> Iterator[str]:
    """Inside, the figures are at the URL yielded. Raises BadInputError where `port` is taken."""
    registry = CollectorRegistry()
    registry.register(RunCollector(directory))
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise BadInputError(f"--metrics-port {port}: {error.strerror}. Choose another one") from error
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_COUNTERS = ("cpu", "sent", "received")


@dataclass(slots=True)
class _Device:
    """What telemetry comes to. Its counters begin anew with the device; ours go on."""

    at: float = nan
    used: float = nan
    """Share of a core since the sample before."""
    memory: float = nan
    totals: Counter[str] = field(default_factory=Counter)
    _last: Mapping[str, float] = field(default_factory=dict)

    def take(self, sample: Mapping[str, Any]) -> None:
        counters = {name: float(sample.get(name) or 0.0) for name in _COUNTERS}
        anew = counters["cpu"] < self._last.get("cpu", 0.0)
        grown = {
            name: now - (0.0 if anew else self._last.get(name, 0.0)) for name, now in counters.items()
        }
        at = float(sample["at"])
        self.used = grown["cpu"] / (at - self.at) if at > self.at else nan
        self.totals.update(grown)
        self.at, self._last = at, counters
        self.memory = float(sample.get("memory") or nan)


@dataclass(slots=True)
class _Totals:
    at: float = 0.0
    version: int = 0
    accuracy: float = nan
    loss: float = nan
    ended: bool = False
    updates: Counter[str] = field(default_factory=Counter)
    """By client, as are the next two."""
    bytes: Counter[str] = field(default_factory=Counter)
    staleness_of: dict[str, int] = field(default_factory=dict)
    """Of the last update."""
    staleness: Counter[int] = field(default_factory=Counter)
    """By bucket."""
    staleness_sum: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    online: dict[str, bool] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    """Share of a core, as last set."""

    def take(self, record: events.Record) -> None:
        self.at = max(self.at, record.applied if isinstance(record, events.UpdateApplied) else record.at)
        match record:
            case events.RunStarted():
                self.online |= dict.fromkeys(record.clients, True)
            case events.ClientStatus(client=client, state="ready" | "offline" as state):
                self.online[client] = state == "ready"
            case events.UpdateApplied(client=client, staleness=staleness):
                self.updates[client] += 1
                self.bytes[client] += record.bytes
                self.staleness_of[client] = staleness
                self.staleness[bisect_left(STALENESS, staleness)] += 1
                self.staleness_sum += staleness
            case events.UpdateRejected(client=client, reason=reason):
                self.rejected[client, reason] += 1
            case events.VersionMade():
                self.version = record.version
            case events.Evaluated():
                self.accuracy, self.loss = record.accuracy, record.loss
            case events.Acted(device=device, details={"action": "set", "cpu": share}):
                self.asked[device] = share
            case events.RunEnded():
                self.ended = True


class RunCollector(Collector):
    """What the files of one run come to."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records = Follower(directory.events)
        self._offset = 0
        self._totals = _Totals()
        self._devices: dict[str, _Device] = {}

    def describe(self) -> Iterator[Metric]:
        return iter(())  # without it, registering asks for all figures

    def collect(self) -> Iterator[Metric]:
        for record in self._records.read():
            self._totals.take(record)
        for sample in self._samples(self._directory.telemetry):
            self._devices.setdefault(sample["device"], _Device()).take(sample)
        manifest = self._directory.read_manifest()
        told = {key: str(manifest.get(key, "")) for key in ("run", "rule", "task", "runtime")}
        yield InfoMetricFamily("testbed_run", "The run.", told)
        yield from self._of_the_run()
        yield from self._of_clients()
        planned = {name: one.get("cpu") for name, one in manifest.get("devices", {}).items()}
        yield from self._of_devices(planned | self._totals.asked, manifest.get("dilation", 1.0))

    def _samples(self, path: Path) -> Iterator[dict[str, Any]]:
        """New lines of telemetry; what is torn, or tells no CPU time, is left out."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().rpartition(b"\n")[0]
        self._offset += len(lines) + 1 if lines else 0
        for line in lines.split(b"\n") if lines else ():
            try:
                sample = json.loads(line)
                if isinstance(sample["device"], str) and float(sample["cpu"]) >= 0 <= float(
                    sample["at"]
                ):
                    yield sample
            except (ValueError, KeyError, TypeError):
                continue

    def _of_the_run(self) -> Iterator[Metric]:
        totals = self._totals
        yield GaugeMetricFamily("testbed_device_time_seconds", "Of the newest record.", totals.at)
        yield GaugeMetricFamily("testbed_running", "1 until the run has ended.", int(not totals.ended))
        yield GaugeMetricFamily("testbed_version", "The newest global model.", totals.version)
        yield GaugeMetricFamily("testbed_accuracy_ratio", "On the test set, 0 to 1.", totals.accuracy)
        yield GaugeMetricFamily("testbed_loss", "On the test set.", totals.loss)
        bounds = [*map(str, STALENESS), "+Inf"]
        counts = accumulate(totals.staleness[bucket] for bucket in range(len(bounds)))
        buckets = list(zip(bounds, counts, strict=True))
        yield HistogramMetricFamily(
            "testbed_staleness_versions", "Of updates applied.", buckets, totals.staleness_sum
        )

    def _of_clients(self) -> Iterator[Metric]:
        totals = self._totals
        updates = CounterMetricFamily("testbed_updates", "Updates applied.", labels=["client"])
        payload = CounterMetricFamily("testbed_update_bytes", "Their payload.", labels=["client"])
        stale = GaugeMetricFamily(
            "testbed_last_staleness_versions", "Of the client's last update.", labels=["client"]
        )
        online = GaugeMetricFamily("testbed_online", "1 where the client is there.", labels=["client"])
        rejected = CounterMetricFamily(
            "testbed_rejected_updates", "Updates rejected.", labels=["client", "reason"]
        )
        for client, count in totals.updates.items():
            updates.add_metric([client], count)
            payload.add_metric([client], totals.bytes[client])
            stale.add_metric([client], totals.staleness_of[client])
        for client, there in totals.online.items():
            online.add_metric([client], int(there))
        for labels, count in totals.rejected.items():
            rejected.add_metric(labels, count)
        yield from (updates, payload, stale, online, rejected)

    def _of_devices(self, asked: dict[str, float | None], dilation: float) -> Iterator[Metric]:
        label = ["device"]
        asks = GaugeMetricFamily("testbed_cpu_asked_cores", "Share asked for.", labels=label)
        used = GaugeMetricFamily(
            "testbed_cpu_used_cores", "From the last sample but one to the last.", labels=label
        )
        spent = CounterMetricFamily("testbed_cpu_seconds", "CPU time, of the host.", labels=label)
        memory = GaugeMetricFamily("testbed_memory_bytes", "In use.", labels=label)
        sent = CounterMetricFamily("testbed_sent_bytes", "On the link.", labels=label)
        received = CounterMetricFamily("testbed_received_bytes", "On the link.", labels=label)
        for name, share in asked.items():
            if share is not None:
                asks.add_metric([name], share)
        for name, device in self._devices.items():
            spent.add_metric([name], device.totals["cpu"])
            sent.add_metric([name], device.totals["sent"])
            received.add_metric([name], device.totals["received"])
            if not isnan(device.used):
                used.add_metric([name], device.used * dilation)
            if not isnan(device.memory):
                memory.add_metric([name], device.memory)
        yield from (asks, used, spent, memory, sent, received)
