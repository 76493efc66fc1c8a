"""A run directory written by hand: twelve records of two devices under fedbuff, ten seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agents import events
from analysis.load import Run, load

# Client, sequence, base version, applied version, staleness, then the seven times.
_UPDATE = (
    '{{"event":"update","client":"{}","sequence":{},"kind":"delta","base_version":{},'
    '"applied_version":{},"staleness":{},"weight":0.5,"samples":100,"steps":20,"loss":1.5,"bytes":2600,'
    '"dispatched":{},"downloaded":{},"train_start":{},"train_end":{},"sent":{},"arrived":{},"applied":{}}}'
)

EVENTS = [
    '{"event":"run_started","at":0.0,"wall_clock":1.7e9,"clients":["fast","slow"],"missing":[],"format":1}',
    '{"event":"evaluation","at":0.0,"version":0,"loss":2.3,"accuracy":0.1}',
    _UPDATE.format("fast", 1, 0, 1, 0, 0.0, 0.5, 0.5, 1.5, 1.5, 2.0, 2.0),
    '{"event":"version","at":2.0,"version":1,"updates":1}',
    # the second download began while the first upload was still going on
    _UPDATE.format("fast", 2, 1, 2, 0, 1.75, 2.5, 3.0, 4.0, 4.5, 5.0, 5.0),
    '{"event":"version","at":5.0,"version":2,"updates":1}',
    '{"event":"evaluation","at":5.0,"version":2,"loss":0.9,"accuracy":0.85}',
    '{"event":"rejected","at":6.0,"client":"fast","reason":"duplicate: sequence 2"}',
    _UPDATE.format("slow", 1, 0, 3, 2, 0.0, 1.0, 1.0, 7.0, 7.0, 8.0, 8.0),
    '{"event":"version","at":8.0,"version":3,"updates":1}',
    '{"event":"evaluation","at":10.0,"version":3,"loss":1.1,"accuracy":0.8}',
    '{"event":"run_ended","at":10.0,"reason":"after","version":3,"updates":3}',
]


def _device(group: str, profile: str, **numbers: float) -> dict[str, object]:
    return {"group": group, "profile": profile, **numbers}


MANIFEST: dict[str, Any] = {
    "format": 1,
    "created": 2.0,
    "monotonic_zero": 1.7e9 - 100,  # the run clock started when the host's showed 100 s
    "devices": {
        "fast": _device("pi", "0.5 cpu, 512 MiB", cpu=0.5, samples=100, importance=0.5),
        "slow": _device("pi", "0.1 cpu, 512 MiB", cpu=0.1, samples=100, importance=0.3),
        "mute": _device("nano", "0.1 cpu, 256 MiB", cpu=0.1, samples=50, importance=0.2),
    },
}


def write_run(folder: Path, lines: Sequence[str], topology: str, manifest: Mapping[str, Any]) -> Path:
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "topology.yaml").write_text(topology)
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def with_records(directory: Path, *records: events.Record) -> Run:
    """The run by hand, with more records before its end."""
    lines = [*EVENTS[:-1], *(events.to_line(record).strip() for record in records), EVENTS[-1]]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    return load(directory)


def write_by_hand(folder: Path) -> Path:
    write_run(folder, EVENTS, "name: by-hand\nrule: {name: fedbuff, buffer_size: 1}\n", MANIFEST)
    sample = {"device": "fast", "at": 107.5, "cpu": 1.25, "memory": 300_000_000}
    (folder / "telemetry.jsonl").write_text(json.dumps(sample) + '\n{"device": "fa')
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_by_hand(tmp_path)
