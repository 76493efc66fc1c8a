"""The nodes of a Swarm before a run: their images, and the speed of their cores."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.errors import APIError, ImageNotFound

from testbed import images
from testbed.errors import HostError
from testbed.host import cache, docker_engine
from testbed.host.nodes import Node, manages_swarm, swarm_nodes
from testbed.images import Images, building
from testbed.plan import agent_configs
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.removal import temporary_proxies
from testbed.speed import (
    CalibratedHost,
    Calibration,
    cache_for_nodes,
    cached_for_nodes,
    calibrate,
    device_benchmark,
    from_core,
)

# Images on the nodes of a Swarm.
#
# If the topology names a registry, the nodes pull the images from that registry. Otherwise the images
# are copied by the engines' save and load. Copied images are recorded, so that they can be removed from
# the nodes later.

Progress = Callable[[str], None]


class Push(NamedTuple):
    """An image of this host, with its name in a registry."""

    tag: str
    repository: str
    version: str


def images_to_push(built: Images, registry: str) -> list[Push]:
    """Broker and aggregator run on this host, but they are services like all others, so their images are
    included."""
    found = []
    for tag in dict.fromkeys((built.base, built.agent, built.broker, *built.groups.values())):
        repository, _, version = registry_name(tag, registry).rpartition(":")
        found.append(Push(tag, repository, version))
    return found


def registry_name(tag: str, registry: str) -> str:
    """`latest` without a version. If a user's image has a registry or a digest, `:` and `@` become
    `-`."""
    path, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    return f"{registry.rstrip('/')}/{path.replace(':', '-').replace('@', '-')}:{version}"


def push_images(
    manager: docker.DockerClient, built: Images, registry: str | None, progress: Progress
) -> Images:
    """Return the images with their names in the registry; unchanged without a registry. Raises
    HostError."""
    if registry is None:
        return built
    for tag, repository, version in images_to_push(built, registry):
        with as_host_error(f"push {tag} to {registry}"):
            manager.api.tag(tag, repository, version)
            answer = list(manager.api.push(repository, version, stream=True, decode=True))
        if why := next((entry["error"] for entry in answer if "error" in entry), None):
            raise HostError(
                f"the registry {registry} rejects {tag}: {why}. The engine's own login is used: run "
                "docker login, or set insecure-registries in its configuration"
            )
        progress(f"Pushed {repository}:{version}")
    names = {
        field: registry_name(getattr(built, field), registry) for field in ("base", "agent", "broker")
    }
    groups = {group: registry_name(tag, registry) for group, tag in built.groups.items()}
    return replace(built, **names, groups=groups)


def copy_images(
    manager: docker.DockerClient,
    proxies: EngineProxies,
    nodes: Iterable[str],
    tag: str,
    progress: Progress,
) -> None:
    """Copy the image to each node that lacks it, or has a different one of that name. Remove earlier
    copies that no checkout uses any more."""
    wanted = _content(manager, tag)
    for node in nodes:
        if _content(proxies.engines[node], tag) != wanted:
            api: Any = proxies.engines[node].api
            progress(f"Copying {tag} to {proxies.names[node]}")
            for _ in api.load_image(manager.api.get_image(tag)):
                pass
            _record_copied(node, {*_read_copied().get(node, ()), tag})
            # Images whose names begin otherwise are the user's own.
            built = {one for one in _read_copied()[node] if one.startswith("testbed-")}
            _remove(proxies, node, built - {*images.registered_images()} - {tag})


def _content(engine: docker.DockerClient, tag: str) -> tuple[Any, Any] | None:
    """Layers and environment, which do not depend on how an engine stores the image; None if there is
    none."""
    try:
        found = engine.images.get(tag).attrs
    except ImageNotFound:
        return None
    return found["RootFS"]["Layers"], found["Config"].get("Env")


def common_ids(
    manager: docker.DockerClient, proxies: EngineProxies, nodes: Iterable[str], tag: str
) -> dict[str, str]:
    """Id by tag; empty if it differs between nodes, as with engines that store images in different
    ways."""
    found = str(manager.images.get(tag).id)
    try:
        for node in nodes:
            proxies.engines[node].images.get(found)
    except ImageNotFound:
        return {}
    return {tag: found}


def prune_images(manager: docker.DockerClient, progress: Progress) -> None:
    """Remove copied images that no container uses from the other nodes. The next run copies them again.
    No effect if this engine manages no Swarm. Raises HostError."""
    with as_host_error("remove images"):
        nodes = swarm_nodes(manager) if manages_swarm(manager.info()) else []
        if len(nodes) < 2 or not _read_copied():
            return
        base = images.current_tags(images.FOLDER, images.AGENTS)["base"]
        with temporary_proxies(manager, nodes, base, "images") as proxies:
            for node in proxies.others:
                for tag in sorted(_remove(proxies, node.id, _read_copied().get(node.id, ()))):
                    progress(f"Removed {tag} from {node.name}")


def _remove(proxies: EngineProxies, node: str, tags: Collection[str]) -> set[str]:
    """Return the tags of the removed images; those in use stay."""
    removed = set()
    for tag in tags:
        with suppress(APIError):  # in use
            with suppress(ImageNotFound):
                proxies.engines[node].images.remove(tag)
            removed.add(tag)
    _record_copied(node, set(_read_copied().get(node, ())) - removed)
    return removed


def _read_copied() -> dict[str, list[str]]:
    """Images that this user has copied to nodes, by node id."""
    try:
        found = json.loads(_path().read_bytes())
        return {str(node): [str(tag) for tag in tags] for node, tags in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _record_copied(node: str, tags: Collection[str]) -> None:
    copied = {**_read_copied(), node: sorted(tags)}
    cache.keep(_path(), json.dumps({one: tags for one, tags in copied.items() if tags}))


def _path() -> Any:
    return cache.folder() / "images-on-nodes.json"


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
            built = building.ensure(manager, progress)
            built = push_images(manager, built, registry, progress)
            here = [node for node in nodes if node.here]
            with temporary_proxies(manager, [*here, *missing], built.base, "calibration") as proxies:
                copy_images(manager, proxies, [one.id for one in missing], built.agent, progress)
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
