"""Images on the nodes of a Swarm: by a registry, where the topology names one, else by the engines' own
save and load. What was copied to a node is remembered, so that it can be removed there again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import docker
from docker.errors import APIError, ImageNotFound

from testbed import images
from testbed.errors import HostError
from testbed.host import cache, swarm_nodes
from testbed.images import Images
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.removal import temporary_proxies

Progress = Callable[[str], None]


class Push(NamedTuple):
    """An image of this machine, and what it is called in a registry."""

    tag: str
    repository: str
    version: str


def pushes(built: Images, registry: str) -> list[Push]:
    """What nodes pull; broker and aggregator are on this machine, but are services as all others."""
    found = []
    for tag in dict.fromkeys((built.base, built.agent, built.broker, *built.groups.values())):
        repository, _, version = named(tag, registry).rpartition(":")
        found.append(Push(tag, repository, version))
    return found


def named(tag: str, registry: str) -> str:
    """What an image of this machine is called in `registry`; one without a version is its `latest`. A
    user's own may name a registry, or a digest, which have no place in a path."""
    path, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    return f"{registry.rstrip('/')}/{path.replace(':', '-').replace('@', '-')}:{version}"


def pushed(
    manager: docker.DockerClient, built: Images, registry: str | None, progress: Progress
) -> Images:
    """`built` by the names in the registry, where there is one, and it has them. Raises HostError."""
    if registry is None:
        return built
    for tag, repository, version in pushes(built, registry):
        with as_host_error(f"push {tag} to {registry}"):
            manager.api.tag(tag, repository, version)
            told = list(manager.api.push(repository, version, stream=True, decode=True))
        if why := next((entry["error"] for entry in told if "error" in entry), None):
            raise HostError(
                f"the registry {registry} does not take {tag}: {why}. The engine's own login is used: "
                "docker login, or insecure-registries of its configuration"
            )
        progress(f"{repository}:{version} is in the registry")
    names = {field: named(getattr(built, field), registry) for field in ("base", "agent", "broker")}
    groups = {group: named(tag, registry) for group, tag in built.groups.items()}
    return replace(built, **names, groups=groups)


def copy(
    manager: docker.DockerClient,
    proxies: EngineProxies,
    nodes: Iterable[str],
    tag: str,
    progress: Progress,
) -> None:
    """Copy an image to those of `nodes` that lack it, or have another of that name; what was copied
    before and no checkout uses any more is removed there."""
    wanted = _content(manager, tag)
    for node in nodes:
        if _content(proxies.engines[node], tag) != wanted:
            api: Any = proxies.engines[node].api
            progress(f"Copying {tag} to {proxies.names[node]}")
            for _ in api.load_image(manager.api.get_image(tag)):
                pass
            _remember(node, {*_copied().get(node, ()), tag})
            ours = {one for one in _copied()[node] if one.startswith("testbed-")}  # else a user's own
            _remove(proxies, node, ours - {*images.registered_images()} - {tag})


def _content(engine: docker.DockerClient, tag: str) -> tuple[Any, Any] | None:
    """Its layers and environment, which are the same however an engine keeps it; None: it has none of
    that name."""
    try:
        found = engine.images.get(tag).attrs
    except ImageNotFound:
        return None
    return found["RootFS"]["Layers"], found["Config"].get("Env")


def ids(
    manager: docker.DockerClient, proxies: EngineProxies, nodes: Iterable[str], tag: str
) -> dict[str, str]:
    """The id of an image by its tag, where all of `nodes` know it by the same: engines that keep images
    in different ways do not."""
    found = str(manager.images.get(tag).id)
    try:
        for node in nodes:
            proxies.engines[node].images.get(found)
    except ImageNotFound:
        return {}
    return {tag: found}


def prune(manager: docker.DockerClient, progress: Progress) -> None:
    """Remove what was copied to the other nodes of the Swarm that this engine manages, if it does, and
    no container there uses: the next run copies it again. Raises HostError."""
    with as_host_error("remove images"):
        nodes = swarm_nodes.nodes(manager) if swarm_nodes.manages(manager.info()) else []
        if len(nodes) < 2 or not _copied():
            return
        base = images.current_tags(images.FOLDER, images.AGENTS)["base"]
        with temporary_proxies(manager, nodes, base, "images") as proxies:
            for node in proxies.others:
                for tag in sorted(_remove(proxies, node.id, _copied().get(node.id, ()))):
                    progress(f"{tag}: removed from {node.name}")


def _remove(proxies: EngineProxies, node: str, tags: Collection[str]) -> set[str]:
    """Remove images from a node, but for those in use; return which are gone."""
    gone = set()
    for tag in tags:
        with suppress(APIError):  # in use
            with suppress(ImageNotFound):
                proxies.engines[node].images.remove(tag)
            gone.add(tag)
    _remember(node, set(_copied().get(node, ())) - gone)
    return gone


def _copied() -> dict[str, list[str]]:
    """Tags of what this user has copied to nodes, by the node's id."""
    try:
        found = json.loads(_path().read_bytes())
        return {str(node): [str(tag) for tag in tags] for node, tags in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(node: str, tags: Collection[str]) -> None:
    kept = {**_copied(), node: sorted(tags)}
    cache.keep(_path(), json.dumps({one: tags for one, tags in kept.items() if tags}))


def _path() -> Any:
    return cache.folder() / "images-on-nodes.json"
