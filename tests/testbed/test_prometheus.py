"""Figures for Prometheus, read back by its own parser."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agents import events
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower
from testbed.watching.prometheus import RunCollector
from tests.analysis.conftest import EVENTS, MANIFEST


def registered(directory: RunDirectory) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunCollector(directory))
    return registry


def scraped(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_of_a_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_manifest(run="t-1", rule="fedbuff", task="digits", runtime="docker", **MANIFEST)
    registry = registered(directory)
    assert scraped(registry)["testbed_version",] == 0  # nothing is there yet
    directory.events.write_text("".join(line + "\n" for line in EVENTS))
    samples = [(100.0, 1.0, 10), (102.0, 1.5, 20), (103.0, 0.25, 5)]  # the third: started anew
    lines = [{"device": "fast", "at": at, "cpu": cpu, "sent": sent} for at, cpu, sent in samples]
    directory.telemetry.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    found = scraped(registry)
    assert found["testbed_run_info", "fedbuff", "t-1", "docker", "digits"] == 1
    assert found["testbed_updates_total", "fast"] == 2
    assert found["testbed_update_bytes_total", "fast"] == 5200
    assert found["testbed_last_staleness_versions", "slow"] == 2
    assert found["testbed_rejected_updates_total", "fast", "duplicate: sequence 2"] == 1
    assert found["testbed_accuracy_ratio",] == 0.8
    assert found["testbed_version",] == 3
    assert found["testbed_running",] == 0
    assert found["testbed_staleness_versions_sum",] == 2
    buckets = [found["testbed_staleness_versions_bucket", bound] for bound in ("0", "1", "2", "+Inf")]
    assert buckets == [2, 2, 3, 3]
    assert found["testbed_cpu_asked_cores", "mute"] == 0.1
    assert found["testbed_cpu_seconds_total", "fast"] == 1.75
    assert found["testbed_cpu_used_cores", "fast"] == pytest.approx(0.25)
    assert found["testbed_sent_bytes_total", "fast"] == 25
    assert ("testbed_received_bytes_total", "fast") not in found  # nobody counts them
    assert scraped(registry)["testbed_updates_total", "fast"] == 2  # asking twice counts nothing twice


def test_device_missing_at_a_start_is_offline(tmp_path: Path) -> None:
    """This includes the start of a later segment, so that an alert on 0 fires."""
    directory = RunDirectory(tmp_path)
    records = [events.RunStarted(0.0, 1e9, ("a",), ("b",)), events.RunStarted(9.0, 2e9, ("b",), ("a",))]
    registry = registered(directory)
    for count, online in ((1, {"a": 1, "b": 0}), (2, {"a": 0, "b": 1})):
        directory.events.write_text("".join(map(events.to_line, records[:count])))
        assert {name: scraped(registry)["testbed_online", name] for name in "ab"} == online


def test_number_of_reason_series_is_bounded(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_manifest(run="t-1", **MANIFEST)
    rejected = (events.UpdateRejected(1.0, "a", f"duplicate: sequence {n}") for n in range(5000))
    directory.events.write_text("".join(map(events.to_line, rejected)))
    registry = registered(directory)
    found = scraped(registry)
    assert sum(name == "testbed_rejected_updates_total" for name, *_ in found) == 1001
    assert found["testbed_rejected_updates_total", "a", "other"] == 4000


def test_simultaneous_scrapes_are_serialised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read = threading.Lock(), RecordFollower.read

    def slowly(follower: RecordFollower, most: int = -1) -> list[events.Record]:
        assert reading.acquire(blocking=False), "two at once"
        time.sleep(0.05)
        reading.release()
        return read(follower, most)

    monkeypatch.setattr(RecordFollower, "read", slowly)
    collector = RunCollector(RunDirectory(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        assert len([*pool.map(lambda _: [*collector.collect()], range(2))]) == 2


def test_controller_does_not_import_bokeh_pandas_or_prometheus() -> None:
    code = (
        "import sys, testbed.cli.main, testbed.run.controller; "
        "print({'bokeh', 'pandas', 'prometheus_client'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_energy_has_metrics_only_if_it_is_counted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    devices = {"a": {"energy": {"battery": {"capacity": 9}}}, "b": {"energy": {"battery": None}}}
    directory.write_manifest(run="t-1", devices=devices)
    acted = [
        events.Acted(5.0, "a", "battery", 0.0, {"action": f"power{way}"}) for way in ("off", "on", "off")
    ]
    directory.events.write_text("".join(map(events.to_line, acted)))
    figures = {"a": {"consumed": 7, "power": 2, "level": 0.05}, "b": {"consumed": 3, "power": 1}}
    lines = [{"device": name, "at": 1.0, "energy": own} for name, own in figures.items()]
    directory.telemetry.write_text("".join(json.dumps(line) + "\n" for line in lines))
    registry = registered(directory)
    found = scraped(registry)
    assert (found["testbed_energy_joules_total", "a"], found["testbed_power_watts", "b"]) == (7, 1)
    assert found["testbed_battery_level_ratio", "a"] == 0.05
    assert (found["testbed_powered", "a"], found["testbed_power_offs_total", "a"]) == (0, 2)
    assert {("testbed_battery_level_ratio", "b"), ("testbed_powered", "b")}.isdisjoint(found)
    directory.write_manifest(run="t-1", devices={"a": {}, "b": {}})
    assert not [name for name, *_ in scraped(registry) if "power" in name or "energy" in name]
