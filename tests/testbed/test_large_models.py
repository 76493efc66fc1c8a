"""Needs of a large model in devices and connections: reported, and set, before launch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from testbed.broker import BrokerLimits
from testbed.errors import BadInputError
from testbed.plan import Catalog, HostResources, agent_configs, model_check, plan
from testbed.plan.catalog import read
from testbed.plan.planned_devices import lowest_rates
from testbed.topology import Topology, parse


def _resnet(device: str) -> Topology:
    return parse(
        "name: t\ntask: {name: cifar10-resnet18, local: {steps: 1}}\nrule: {name: fedavg}\n"
        f"stop: {{after: 1s}}\ndevices: [{{name: a, cpu: 0.1, {device}}}]\n"
    )


@pytest.mark.parametrize(("memory", "warned"), [("512MiB", True), ("1GiB", False)])
def test_plan_compares_needed_memory_with_the_limit(memory: str, warned: bool) -> None:
    topology, host = _resnet(f"memory: {memory}"), HostResources(cores=(0, 1, 2, 3), memory=2**35)
    catalog = Catalog(model=4 * model_check.check(topology))
    notes = plan(topology, "docker", host, catalog).notes
    told = [note for note in notes if "it would be killed" in note]
    assert bool(told) is warned
    if warned:
        assert "a has 512MiB of memory, but a client of cifar10-resnet18 needs about 536MiB" in told[0]
    unlimited = plan(topology, "process", host, catalog).notes
    assert "killed" not in " ".join(unlimited)


def test_broker_limits_fit_chunked_models() -> None:
    whole, parted = BrokerLimits.for_run(100_000, 2), BrokerLimits.for_run(110_000_000, 2)
    assert whole.packet == 400_000 + 2**17
    assert parted.packet == 2**20 + 2**17
    assert parted.queue > 4 * 440_000_000


def test_patience_for_a_request_covers_a_model_transfer() -> None:
    assert agent_configs.longest_silence(440_000_000, math.inf) == 45
    assert agent_configs.longest_silence(440_000_000, 262_144) == pytest.approx(6 * 13_428, rel=1e-4)


def test_slowest_rate_of_the_whole_run_counts(tmp_path: Path) -> None:
    (tmp_path / "walk.csv").write_text("time,up,down\n0,9000,8000\n1,0,700\n")
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "stop: {after: 9s}\ndevices:\n"
        "- {name: a, count: 2, cpu: 0.1, link: {up: 1mbit, down: 2mbit}}\n"
        "- {name: b, cpu: 0.1, link: {up: 1mbit}, access: {name: x, up: 3mbit, down: 500kbit}}\n"
        f"- {{name: c, cpu: 0.1, link: {{trace: {{csv: {tmp_path}/walk.csv}}}}}}\n"
        "- {name: d, cpu: 0.1}\n"
        "scenario: [{at: 1s, set: a-2, link: {up: 20kbit, down: 40kbit}}]\n"
    )
    made = plan(topology, "docker", HostResources(cores=(0, 1, 2, 3), memory=2**35), read(topology))
    assert lowest_rates(topology, made) == {"a-1": 1e6, "a-2": 2e4, "b": 5e5, "c": 700, "d": math.inf}


def test_plan_reserves_memory_for_models_under_way() -> None:
    topology = _resnet("memory: 1GiB, count: 8")
    host = HostResources(cores=(0, 1, 2, 3), memory=9 * 2**30)
    plan(topology, "docker", host)
    with pytest.raises(BadInputError, match=r"broker and aggregator need 1\.1 GiB"):  # 15 models
        plan(topology, "docker", host, Catalog(model=44_700_000))
