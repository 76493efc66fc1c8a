"""Cores kept awake by the kernel's PM QoS."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from testbed.host.cpus import LATENCY, keep_awake


def _bearable() -> int:
    """The wake-up time in µs that this host's cores now keep to."""
    microseconds: int = struct.unpack("i", LATENCY.read_bytes()[:4])[0]
    return microseconds


@pytest.mark.timed  # runs keep them awake, too
@pytest.mark.skipif(not os.access(LATENCY, os.W_OK), reason="needs to write /dev/cpu_dma_latency")
def test_cores_are_kept_awake_during_a_run() -> None:
    before = _bearable()
    with keep_awake() as awake:
        assert awake
        assert _bearable() == 0
    assert _bearable() == before


def test_host_that_refuses_to_stay_awake_is_reported(tmp_path: Path) -> None:
    with keep_awake(tmp_path / "no such device") as awake:
        assert not awake
