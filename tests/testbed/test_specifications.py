"""What the docker runtime launches, held against files that can be read.

After a change that is meant, `python -m tests.testbed.test_specifications` writes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.host.gpus import Gpus, HostGpu
from testbed.images import Images
from testbed.plan import HostResources, plan
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker.specifications import ContainerLaunch, launch, planned_limits
from testbed.topology import RESERVED, parse

GOLDEN = Path(__file__).parent / "golden"
FLEET = """
name: fleet
task: {name: digits-logreg, local: {steps: 20}}
stop: {after: 60s}
"""
TOPOLOGIES = {
    "direct": FLEET
    + """
rule: {name: fedbuff, buffer_size: 1}
devices: [{name: pi, cpu: 1.5}, {name: nano, cpu: 0.25, image: "my-agent:1"}]
""",
    "routed": FLEET
    + """
evaluate: {cores: 1, devices: 20}
rule: {name: area, criterion: every, every: 1}
devices:
  - {name: pi, cpu: 0.5, memory: 1GiB, link: {up: 1mbit, rtt: 80ms}}
  - {name: nano, cpu: 0.02}
dilation: 2
durability: recording
""",
    "gpus": FLEET
    + """
rule: {name: fedbuff, buffer_size: 1}
devices:
  - {name: whole, cpu: 0.5, gpu: true}
  - {name: part, cpu: 0.5, gpu: {share: 25%, memory: 2GiB}}
  - {name: half, cpu: 0.5, gpu: {share: 50%}}
  - {name: none, cpu: 0.5}
""",
}
GPUS = Gpus((HostGpu("GPU-1", "A40", 48 * 2**30, (8, 6)), HostGpu("GPU-2", "A40", 48 * 2**30, (8, 6))))


def launched(name: str) -> tuple[ContainerLaunch, RunSpec]:
    """The launch of TOPOLOGIES[name] on a host of four cores."""
    topology = parse(TOPOLOGIES[name])
    host = HostResources((0, 1, 2, 3), 2**34, "this kernel has no netem", gpus=GPUS)
    planned = plan(topology, "docker", host)
    spec = RunSpec(RunDirectory(Path("/runs/fleet-1")), topology, planned, {})
    ours = Images("testbed-agent:1", "testbed-broker:1", "testbed-base:1", "testbed-agent-cuda:1")
    images = replace(ours, groups={"nano": "my-agent:1"} if name == "direct" else {})
    cubic, driver = ("cubic", "systemd") if name == "routed" else (None, "cgroupfs")
    return launch(spec, images, owner=(1000, 100), congestion_control=cubic, cgroup_driver=driver), spec


def described(name: str) -> str:
    """The launch of TOPOLOGIES[name], as YAML; what is not given is left out."""
    made, spec = launched(name)
    limits = {device.name: asdict(planned_limits(device)) for device in spec.plan.devices}
    told = _plain({**asdict(made), "limits of devices once they are ready": limits})
    return yaml.safe_dump(told, sort_keys=False, width=100, default_flow_style=None)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain = {key: _plain(inner) for key, inner in value.items()}
        return {key: inner for key, inner in plain.items() if inner not in (None, [], {})}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_launched_containers_match_the_golden_files(name: str) -> None:
    assert described(name) == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_device_names_cannot_equal_infrastructure_host_names(name: str) -> None:
    """Docker answers with a container's own name, too."""
    made, _ = launched(name)
    others = [one for one in (made.broker, made.aggregator, made.router, made.mps) if one is not None]
    names = {one.component for one in others}
    names |= {alias for one in others for network in one.networks for alias in network.aliases}
    assert names <= set(RESERVED)


if __name__ == "__main__":
    for each in TOPOLOGIES:
        (GOLDEN / f"{each}.yaml").write_text(described(each), encoding="utf-8")
