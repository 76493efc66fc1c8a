"""Measurement of the speed of the cores of a Swarm's nodes, before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from testbed import images
from testbed.host import docker_engine
from testbed.host.nodes import Node
from testbed.plan import agent_configs
from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.swarm import node_images
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.node_images import Progress
from testbed.runtimes.swarm.removal import temporary_proxies
from testbed.speed import device_benchmark
from testbed.speed.calibration import (
    CalibratedHost,
    Calibration,
    cache_for_nodes,
    cached_for_nodes,
    calibrate,
    from_core,
)

_SECONDS = 2.0
"""Seconds for which each kind of work is measured."""
_COMPONENT = "node.calibration"


def calibrations(
    nodes: Sequence[Node], registry: str | None, progress: Progress
) -> dict[str, Calibration]:
    """Speed of a core, by node id. One that is not in the cache is measured on the node, in the agents'
    image, which is copied there if needed. Raises HostError."""
    others = [node for node in nodes if not node.here]
    image = images.current_tags(images.FOLDER, images.AGENTS)["libraries"]
    found = cached_for_nodes(others, image)
    if missing := [node for node in others if node.id not in found]:
        progress(f"Measuring the speed of a core of {', '.join(node.name for node in missing)}")
        with closing(docker_engine.connect()) as manager:
            built = images.ensure(manager, progress)
            built = node_images.push(manager, built, registry, progress)
            here = [node for node in nodes if node.here]
            with temporary_proxies(manager, [*here, *missing], built.base, "calibration") as proxies:
                node_images.copy(manager, proxies, [one.id for one in missing], built.agent, progress)
                with ThreadPoolExecutor(len(missing)) as pool:
                    speeds = pool.map(lambda node: _measure(proxies, node, built.agent), missing)
                    new = {node.id: one for node, one in zip(missing, speeds, strict=True)}
        cache_for_nodes(new, image)
        found |= new
    return {**{node.id: calibrate() for node in nodes if node.here}, **found}


def _measure(proxies: EngineProxies, node: Node, image: str) -> Calibration:
    """Measure the speed of a node's last core, which the plan uses for devices."""
    script = Path(device_benchmark.__file__).read_text("utf-8")
    output = docker_engine.run_output(
        proxies.engines[node.id],
        image,
        ["python3", "-c", script, "--core", "--seconds", f"{_SECONDS:g}"],
        {RUN_LABEL: proxies.run, COMPONENT_LABEL: _COMPONENT},
        user=f"{agent_configs.CLIENT_USER}:{agent_configs.CLIENT_USER}",
        network_mode="none",
        cpuset_cpus=f"{node.cores - 1}",
    )
    found = json.loads(output)
    return from_core(found, CalibratedHost(cpu=found["cpu"], cores=node.cores, torch=found["torch"]))
