"""Metrics of a run for Prometheus, on a port of the loopback interface (`testbed up --metrics-port`).

Each request reads the new records; without requests, nothing is read. All times are device time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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

from analysis.features import NEEDS
from analysis.figures import FIGURES
from analysis.part import DeviceFigure
from analysis.tally import DeviceTally, Tally
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower, Samples
from testbed.watching.hosts import HOST, OwnHosts

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

STALENESS = (0, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the histogram's buckets, in versions."""


@contextmanager
def serve_metrics(directory: RunDirectory, port: int) -> Iterator[str]:
    """Yield the URL. Raises BadInputError if `port` is in use."""
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
    """Answer only requests to this server's own names that do not come from foreign pages."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if app and hosts.includes(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN")):
            return app(environ, start_response)
        start_response("403 Forbidden", [])
        return []

    return answer


_Values = Mapping[str, float | None] | Mapping[tuple[str, str], float]


class RunCollector(Collector):
    """Collector of the metrics of one run, from its files."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records = RecordFollower(directory.events)
        self._samples = Samples(directory.telemetry)
        self._lock = Lock()
        """Lock for the collector's state, because each scrape runs in its own thread."""
        self._tally = Tally({})

    def describe(self) -> Iterator[Metric]:
        """Nothing: without this method, the registration would collect all metrics once."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            manifest = self._directory.read_manifest()
            for name, one in manifest.get("devices", {}).items():
                self._tally.devices.setdefault(name, DeviceTally(planned_cpu=one.get("cpu")))
            with suppress(OSError, ValueError):  # the controller reads the same file, and reports errors
                for record in self._records.read():
                    self._tally.add(record)
            for sample in self._samples.read():  # host times will do: only their differences count
                self._tally.sample(sample["device"], sample["at"] / manifest.get("dilation", 1), sample)
            return iter(list(self._figures(manifest)))

    def _figures(self, manifest: Mapping[str, Any]) -> Iterator[Metric]:
        facts = {key: str(manifest.get(key, "")) for key in ("run", "rule", "task", "runtime")}
        yield InfoMetricFamily("testbed_run", "Name, rule, task and runtime of the run.", facts)
        yield from self._of_the_run()
        yield from self._of_clients()
        yield from self._of_devices(manifest.get("devices", {}))

    def _of_the_run(self) -> Iterator[Metric]:
        tally, last = self._tally, self._tally.evaluation
        for name, documentation, value in (
            ("device_time_seconds", "Device time of the run's newest record.", tally.at),
            ("running", "1 while the run is running, 0 after its end.", tally.ended is None),
            ("version", "Version of the newest global model.", tally.version),
            ("accuracy_ratio", "Accuracy on the test set, from 0 to 1.", last.accuracy if last else nan),
            ("loss", "Loss on the test set.", last.loss if last else nan),
        ):
            yield GaugeMetricFamily(f"testbed_{name}", documentation, value)
        buckets = Counter[int]()
        for staleness, count in tally.staleness.items():
            buckets[bisect_left(STALENESS, staleness)] += count
        bounds = [*map(str, STALENESS), "+Inf"]
        counts = accumulate(buckets[bucket] for bucket in range(len(bounds)))
        yield HistogramMetricFamily(
            "testbed_staleness_versions",
            "Staleness of the updates applied, in versions.",
            list(zip(bounds, counts, strict=True)),
            tally.staleness_sum,
        )

    def _of_clients(self) -> Iterator[Metric]:
        tally = self._tally
        worked = {name: one for name, one in tally.devices.items() if one.updates}
        updates = {name: one.updates for name, one in worked.items()}
        documentation = "Updates of the client that were applied."
        yield _metric("updates", documentation, updates, "client", is_total=True)
        documentation = "Payload bytes of the client's applied updates."
        sizes = {name: one.bytes for name, one in worked.items()}
        yield _metric("update_bytes", documentation, sizes, "client", is_total=True)
        online = {name: one.state == "online" for name, one in tally.devices.items() if tally.started}
        yield _metric("online", "1 while the client is online, else 0.", online, "client")
        documentation = "Updates of the client that were rejected, by reason."
        labels = ("client", "reason")
        yield _metric("rejected_updates", documentation, tally.rejections, *labels, is_total=True)

    def _of_devices(self, devices: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        """Yield the metrics of `analysis.figures`. `devices`: as in the manifest."""
        tallies = self._tally.devices
        having = {
            part: [name for name in tallies if holds(devices.get(name, {}))]
            for part, holds in NEEDS.items()
        }
        for figure in FIGURES.values():
            if figure.metric and (names := having.get(figure.needs, [*tallies])):
                own = {name: self._value(figure, tallies[name]) for name in names}
                yield _metric(figure.metric, figure.about, own, "device", is_total=figure.is_total)
        usage = {name: one.usage for name, one in tallies.items() if one.has_details}
        for counter, name, documentation in (
            ("cpu", "cpu_seconds", "CPU time that the device used, in seconds of a host core."),
            ("sent", "sent_bytes", "Bytes that the device sent, headers included."),
            ("received", "received_bytes", "Bytes that the device received, headers included."),
        ):
            counted = {device: one.totals.get(counter) for device, one in usage.items()}
            yield _metric(name, documentation, counted, "device", is_total=True)

    def _value(self, figure: DeviceFigure, device: DeviceTally) -> float:
        if figure.metric_of is not None:
            return figure.metric_of(device) if device.has_details else nan
        return figure.of(device, self._tally, self._tally.at)


def _metric(
    name: str, documentation: str, values: _Values, *labels: str, is_total: bool = False
) -> Metric:
    """Return the metric of the known `values`. Their keys are the labels' values."""
    kind = CounterMetricFamily if is_total else GaugeMetricFamily
    family = kind(f"testbed_{name}", documentation, labels=labels)
    for key, value in values.items():
        if value is not None and not isnan(value):
            family.add_metric([key] if isinstance(key, str) else key, value)
    return family
