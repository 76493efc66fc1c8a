"""Links and shares shown during a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load
from testbed.dashboard import feed
from tests.analysis.conftest import EVENTS, MANIFEST, write_run


def test_probe_is_compared_with_the_whole_path_to_the_server(tmp_path: Path) -> None:
    devices: dict[str, dict[str, Any]] = {name: dict(one) for name, one in MANIFEST["devices"].items()}
    devices["fast"]["link"] = {"up": 128_000, "down": 256_000, "rtt": 0.0, "jitter": 0.0, "loss": 0.0}
    path = write_run(tmp_path, EVENTS[:1], "name: cell\n", {**MANIFEST, "devices": devices})
    probe = {"up": 128_000, "down": 128_000.0, "rtt": 0.01}  # bit/s on the wire
    line = {"device": "fast", "at": 99.0, "probe": probe}
    (path / "telemetry.jsonl").write_text(json.dumps(line) + "\n")
    found = feed.provisional_fidelity(load(path)).query("device == 'fast' and figure != 'cpu'")
    assert found["figure"].tolist() == ["up", "down"]
    assert found["asked"].tolist() == [128_000, 256_000]
    assert found["got"].tolist() == pytest.approx([128_000, 128_000])
