"""What a large model needs of devices and connections: told, and set, before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.device import usage
from testbed.broker import Limits
from testbed.plan import Host, agent_configs, plan, resolution
from testbed.topology import Topology, parse
from testbed.topology.profiles import Profiles


def _resnet(device: str) -> Topology:
    return parse(
        "name: t\ntask: {name: cifar10-resnet18, local: {steps: 1}}\nrule: {name: fedavg}\n"
        f"stop: {{after: 1s}}\ndevices: [{{name: a, cpu: 0.1, {device}}}]\n"
    )


@pytest.mark.parametrize(("memory", "warned"), [("512MiB", True), ("1GiB", False)])
def test_plan_tells_what_a_device_needs_against_its_limit(memory: str, warned: bool) -> None:
    topology, host = _resnet(f"memory: {memory}"), Host(cores=(0, 1, 2, 3), memory=2**35)
    notes = resolution.notes(topology, plan(topology, "docker", host), Profiles(), host)
    told = [note for note in notes if "it would be killed" in note]
    assert bool(told) is warned
    if warned:
        assert "a has 512MiB of memory, and a client of cifar10-resnet18 needs about 664MiB" in told[0]
    unlimited = resolution.notes(topology, plan(topology, "process", host), Profiles(), host)
    assert "killed" not in " ".join(unlimited)


def test_the_brokers_limits_fit_models_in_parts() -> None:
    whole, parted = Limits.of(100_000, 2), Limits.of(110_000_000, 2)
    assert whole.packet == 400_000 + 2**17
    assert parted.packet == 2**20 + 2**17
    assert parted.queue > 4 * 440_000_000


def test_a_ping_may_wait_behind_a_model() -> None:
    assert agent_configs.keepalive(1.0) == 30
    assert agent_configs.keepalive(140.0) == 280
    assert agent_configs.keepalive(float("inf")) == 3600


@pytest.mark.parametrize(
    ("events", "limit"),
    [
        ("memory.events", "memory.max"),
        ("memory/memory.oom_control", "memory/memory.limit_in_bytes"),
    ],
    ids=["v2", "v1"],
)
def test_a_kill_for_lack_of_memory_is_told_from_others(
    events: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_CGROUP", tmp_path)
    assert usage.killed_for_memory() is None
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("536870912\n")
    (tmp_path / events).write_text("under_oom 0\noom_kill 0\n")
    assert usage.killed_for_memory() is None
    (tmp_path / events).write_text("under_oom 0\noom_kill 1\n")
    assert usage.killed_for_memory() == 2**29
