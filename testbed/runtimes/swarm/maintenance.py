"""Work on the nodes of a Swarm outside of runs: measuring how fast their cores are, removing images."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import docker

from testbed import images
from testbed.host import docker_engine, swarm_nodes
from testbed.host.nodes import Node
from testbed.plan import agent_configs
from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.swarm import node_images, removal
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.node_images import Progress
from testbed.speed import device_benchmark
from testbed.speed.calibration import (
    Calibration,
    Host,
    calibrate,
    keep_of_nodes,
    kept_of_nodes,
    of_core,
)

_SECONDS = 2.0
_COMPONENT = "node.calibration"


@contextmanager
def engine_proxies(
    manager: docker.DockerClient, nodes: Sequence[Node], image: str, purpose: str
) -> Iterator[EngineProxies]:
    """Proxies to the engines of all nodes, until the end of the block; `testbed down` finds them by
    `purpose`. Raises HostError."""
    run = f"{purpose}-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        proxies = EngineProxies(manager, nodes, image, run, {RUN_LABEL: run}, Path(folder))
        try:
            with as_host_error("reach the other nodes"):
                proxies.open()
                yield proxies
        finally:
            removal.remove(manager, proxies, run, None)


def calibrations(
    nodes: Sequence[Node], registry: str | None, progress: Progress
) -> dict[str, Calibration]:
    """How fast a core of each node is, by the node's id: from the cache, else measured there, which
    takes the agents' image. Raises HostError."""
    others = [node for node in nodes if not node.here]
    image = images.current_tags(images.FOLDER, images.AGENTS)["libraries"]
    found = kept_of_nodes(others, image)
    if missing := [node for node in others if node.id not in found]:
        progress(f"Measuring how fast a core is of {', '.join(node.name for node in missing)}")
        with closing(docker_engine.connect()) as manager:
            built = images.ensure(manager, progress)
            built = node_images.pushed(manager, built, registry, progress)
            here = [node for node in nodes if node.here]
            with engine_proxies(manager, [*here, *missing], built.base, "calibration") as proxies:
                node_images.copy(manager, proxies, [one.id for one in missing], built.agent, progress)
                with ThreadPoolExecutor(len(missing)) as pool:
                    speeds = pool.map(lambda node: _measured(proxies, node, built.agent), missing)
                    new = {node.id: one for node, one in zip(missing, speeds, strict=True)}
        keep_of_nodes(new, image)
        found |= new
    return {**{node.id: calibrate() for node in nodes if node.here}, **found}


def _measured(proxies: EngineProxies, node: Node, image: str) -> Calibration:
    """Of a node: on its last core, which is for devices."""
    script = Path(device_benchmark.__file__).read_text("utf-8")
    told = docker_engine.output(
        proxies.engines[node.id],
        image,
        ["python3", "-c", script, "--core", "--seconds", f"{_SECONDS:g}"],
        {RUN_LABEL: proxies.run, COMPONENT_LABEL: _COMPONENT},
        user=f"{agent_configs.CLIENT_USER}:{agent_configs.CLIENT_USER}",
        network_mode="none",
        cpuset_cpus=f"{node.cores - 1}",
    )
    found = json.loads(told)
    return of_core(found, Host(cpu=found["cpu"], cores=node.cores, torch=found["torch"]))


def prune(manager: docker.DockerClient, progress: Progress) -> None:
    """Remove what was copied to the other nodes of the Swarm that this engine manages, if it does: the
    next run copies it again. Raises HostError."""
    with as_host_error("remove images"):
        nodes = swarm_nodes.nodes(manager) if swarm_nodes.manages(manager.info()) else []
        if len(nodes) > 1 and node_images.have_copies():
            base = images.current_tags(images.FOLDER, images.AGENTS)["base"]
            with engine_proxies(manager, nodes, base, "images") as proxies:
                node_images.prune(proxies, progress)
