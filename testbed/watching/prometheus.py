"""Metrics of a run for Prometheus, on a port of the loopback interface (`testbed up --metrics-port`).

Each request reads the new records of the run directory. Without requests, nothing is read. All times are
device time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import isnan, nan
from threading import Lock
from typing import TYPE_CHECKING, Any

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
from agents.device_actions import PowerOff, PowerOn, SetCpu
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import RecordFollower, Samples
from testbed.watching.hosts import HOST, OwnHosts
from testbed.watching.usage import EnergyUse, number

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

STALENESS = (0, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the histogram's buckets, in versions."""


_MAX_REASONS = 1000
"""Maximum number of time series of rejected updates. A limit is needed, because reasons may quote texts
from devices."""


@contextmanager
def serve_metrics(directory: RunDirectory, port: int) -> Iterator[str]:
    """Yield the URL of the metrics, and serve them until the context ends. Raises BadInputError if
    `port` is in use."""
    registry = CollectorRegistry()
    registry.register(RunCollector(directory))
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise BadInputError(f"--metrics-port {port}: {error.strerror}. Choose another port") from error
    server.set_app(_only_own_hosts(OwnHosts(server.server_port), server.get_app()))
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _only_own_hosts(hosts: OwnHosts, app: WSGIApplication | None) -> WSGIApplication:
    """Return `app`, restricted to requests that are sent to this server's own names and do not come from
    foreign pages."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if app and hosts.includes(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN")):
            return app(environ, start_response)
        start_response("403 Forbidden", [])
        return []

    return answer


_COUNTERS = ("cpu", "sent", "received")
_Values = Mapping[str, float | None] | Mapping[tuple[str, str], float]


@dataclass(slots=True)
class _DeviceMetrics:
    """Metrics of one device from its telemetry. When the device restarts, its counters restart from 0,
    but `totals` do not."""

    at: float = nan
    used: float = nan
    """Share of a core used between the last two samples; NaN before the second sample."""
    memory: float = nan
    """Memory in use, in bytes."""
    totals: Counter[str] = field(default_factory=Counter)
    """Totals of `_COUNTERS`. Counters without values are left out."""
    energy: EnergyUse = field(default_factory=EnergyUse)
    _last: Mapping[str, float] = field(default_factory=dict)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. Devices may send anything, so that a sample without valid CPU time or energy is
        ignored."""
        if isinstance(energy := sample.get("energy"), Mapping):
            self.energy.add(float(sample["at"]), energy)
            return
        counters = {name: number(sample.get(name)) for name in _COUNTERS}
        if not counters["cpu"] >= 0:
            return
        counters = {name: now for name, now in counters.items() if now >= 0}
        grown = {name: _grown(self._last.get(name, 0.0), now) for name, now in counters.items()}
        at = float(sample["at"])
        self.used = grown["cpu"] / (at - self.at) if at > self.at else nan
        self.totals.update(grown)
        self.at, self._last = at, counters
        self.memory = number(sample.get("memory")) or nan


def _grown(last: float, now: float) -> float:
    return now - last if now >= last else now


@dataclass(slots=True)
class _Totals:
    at: float = 0.0
    version: int = 0
    accuracy: float = nan
    loss: float = nan
    ended: bool = False
    updates: Counter[str] = field(default_factory=Counter)
    """Number of applied updates, by client."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Payload size of all applied updates in bytes, by client."""
    last_staleness: dict[str, int] = field(default_factory=dict)
    """Staleness of the last update in versions, by client."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of updates, by bucket of the histogram."""
    staleness_sum: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of rejected updates, by client and reason."""
    online: dict[str, bool] = field(default_factory=dict)
    requested_cpu: dict[str, float] = field(default_factory=dict)
    """Share of a core by device, as last set by an action."""
    powered: dict[str, bool] = field(default_factory=dict)
    """Whether the device has power, by device; only devices that have powered off or returned."""
    power_offs: Counter[str] = field(default_factory=Counter)
    """Number of power-offs, by device."""

    def add(self, record: events.Record) -> None:
        """Count `record`."""
        self.at = max(self.at, record.at)
        match record:
            case events.RunStarted():
                self.online |= dict.fromkeys(record.clients, True)
                self.online |= dict.fromkeys(record.missing, False)
            case events.ClientStatus(client=client, state="ready" | "offline" as state):
                self.online[client] = state == "ready"
            case events.UpdateApplied(client=client, staleness=staleness):
                self.updates[client] += 1
                self.bytes[client] += record.bytes
                self.last_staleness[client] = staleness
                self.staleness[bisect_left(STALENESS, staleness)] += 1
                self.staleness_sum += staleness
            case events.UpdateRejected(client=client, reason=reason):
                known = (client, reason) in self.rejected or len(self.rejected) < _MAX_REASONS
                self.rejected[client, reason if known else "other"] += 1
            case events.VersionMade():
                self.version = record.version
            case events.Evaluated():
                self.accuracy, self.loss = record.accuracy, record.loss
            case events.Acted(device=device, action=SetCpu(share)):
                self.requested_cpu[device] = share
            case events.Acted(device=device, action=PowerOff()):
                self.powered[device] = False
                self.power_offs[device] += 1
            case events.Acted(device=device, action=PowerOn()):
                self.powered[device] = True
            case events.RunEnded():
                self.ended = True


class RunCollector(Collector):
    """Collector of the metrics of one run, from its files."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records = RecordFollower(directory.events)
        self._samples = Samples(directory.telemetry)
        self._lock = Lock()
        """Lock for the collector's state, because each scrape runs in its own thread."""
        self._totals = _Totals()
        self._devices: dict[str, _DeviceMetrics] = {}

    def describe(self) -> Iterator[Metric]:
        """Return nothing. Without this method, the registration would collect all metrics once."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read new records, and return all metrics."""
        with self._lock:
            with suppress(OSError, ValueError):  # the controller reads the same file, and reports errors
                for record in self._records.read():
                    self._totals.add(record)
            for sample in self._samples.read():
                self._devices.setdefault(sample["device"], _DeviceMetrics()).add(sample)
            return iter(list(self._figures()))

    def _figures(self) -> Iterator[Metric]:
        manifest = self._directory.read_manifest()
        facts = {key: str(manifest.get(key, "")) for key in ("run", "rule", "task", "runtime")}
        yield InfoMetricFamily("testbed_run", "Name, rule, task and runtime of the run.", facts)
        yield from self._of_the_run()
        yield from self._of_clients()
        planned = {name: one.get("cpu") for name, one in manifest.get("devices", {}).items()}
        yield from self._of_devices(planned | self._totals.requested_cpu, manifest.get("dilation", 1.0))
        yield from self._of_energy(
            {name: one.get("energy") for name, one in manifest.get("devices", {}).items()}
        )

    def _of_the_run(self) -> Iterator[Metric]:
        totals = self._totals
        for name, documentation, value in (
            ("device_time_seconds", "Device time of the run's newest record.", totals.at),
            ("running", "1 while the run is running, 0 after its end.", not totals.ended),
            ("version", "Version of the newest global model.", totals.version),
            ("accuracy_ratio", "Accuracy on the test set, from 0 to 1.", totals.accuracy),
            ("loss", "Loss on the test set.", totals.loss),
        ):
            yield GaugeMetricFamily(f"testbed_{name}", documentation, value)
        bounds = [*map(str, STALENESS), "+Inf"]
        counts = accumulate(totals.staleness[bucket] for bucket in range(len(bounds)))
        yield HistogramMetricFamily(
            "testbed_staleness_versions",
            "Staleness of the updates applied, in versions.",
            list(zip(bounds, counts, strict=True)),
            totals.staleness_sum,
        )

    def _of_clients(self) -> Iterator[Metric]:
        totals = self._totals
        yield _counter("updates", "Updates of the client that were applied.", totals.updates, "client")
        documentation = "Payload bytes of the client's applied updates."
        yield _counter("update_bytes", documentation, totals.bytes, "client")
        documentation = "Staleness of the client's last applied update, in versions."
        yield _gauge("last_staleness_versions", documentation, totals.last_staleness, "client")
        yield _gauge("online", "1 while the client is online, else 0.", totals.online, "client")
        documentation = "Updates of the client that were rejected, by reason."
        yield _counter("rejected_updates", documentation, totals.rejected, "client", "reason")

    def _of_devices(self, requested_cpu: dict[str, float | None], dilation: float) -> Iterator[Metric]:
        devices = self._devices.items()
        documentation = "Requested CPU share of the device, in cores."
        yield _gauge("cpu_asked_cores", documentation, requested_cpu, "device")
        documentation = "CPU that the device used since its last sample, in cores."
        used = {name: device.used * dilation for name, device in devices}
        yield _gauge("cpu_used_cores", documentation, used, "device")
        memory = {name: device.memory for name, device in devices}
        yield _gauge("memory_bytes", "Memory that the device uses.", memory, "device")
        for counter, name, documentation in (
            ("cpu", "cpu_seconds", "CPU time that the device used, in seconds of a host core."),
            ("sent", "sent_bytes", "Bytes that the device sent, headers included."),
            ("received", "received_bytes", "Bytes that the device received, headers included."),
        ):
            counted = {device: one.totals.get(counter) for device, one in devices}
            yield _counter(name, documentation, counted, "device")

    def _of_energy(self, settings: Mapping[str, Mapping[str, Any] | None]) -> Iterator[Metric]:
        """Yield the metrics of energy; nothing if no energy is counted. `settings`: energy settings by
        device, as in the manifest."""
        if not any(settings.values()):
            return
        energy = {name: device.energy for name, device in self._devices.items()}
        batteries = [name for name, own in settings.items() if own and own.get("battery")]
        for name, documentation, make, values in (
            (
                "energy_joules",
                "Energy that the device has consumed, in joules.",
                _counter,
                {name: one.consumed for name, one in energy.items()},
            ),
            (
                "power_watts",
                "Mean power of the device since its last sample, in watts.",
                _gauge,
                {name: one.power for name, one in energy.items()},
            ),
            (
                "battery_level_ratio",
                "Level of the device's battery, from 0 to 1.",
                _gauge,
                {name: one.level for name, one in energy.items()},
            ),
            (
                "powered",
                "1 while the device with a battery has power, else 0.",
                _gauge,
                {name: self._totals.powered.get(name, True) for name in batteries},
            ),
            (
                "power_offs",
                "Number of times that the battery was too low and the device powered off.",
                _counter,
                {name: self._totals.power_offs[name] for name in batteries},
            ),
        ):
            yield make(name, documentation, values, "device")


def _counter(name: str, documentation: str, values: _Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"testbed_{name}", documentation, labels=labels), values)


def _gauge(name: str, documentation: str, values: _Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"testbed_{name}", documentation, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
    """Add the known values to `family`. The keys of `values` are the label values."""
    for key, value in values.items():
        if value is not None and not isnan(value):
            family.add_metric([key] if isinstance(key, str) else key, value)
    return family
