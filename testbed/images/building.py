"""Build images with the engine's own builder, over the Docker SDK, with an estimate of the time; list
the images with their users, and remove those that nobody uses.

`python -m testbed.images.building`, which set-up starts, builds missing images while packages are
installed. Only packages of `testbed.installing.BUILDERS` may be imported here. Set-up writes a line to
standard input when all packages are installed. The download of the libraries waits for it, because the
build of PyTorch follows from the installed one. If set-up ends early, standard input ends, and the build
with it. Without an engine that can run devices nothing is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import APIError

from testbed import console
from testbed.errors import HostError, TestbedError
from testbed.host import cache, docker_engine, processes
from testbed.host.processes import StoppedError, uninterrupted
from testbed.images import (
    AGENTS,
    CUDA,
    DEBIAN_IMAGE,
    FOLDER,
    LABEL,
    OWN,
    ImageAdditions,
    Images,
    Tags,
    added_tags,
    agent_kind,
    bootstrap_debian,
    build_files,
    current_tags,
    module_files,
    parent_of,
    register_images,
    registered_images,
    wheels,
)

_FILE = "image-seconds.json"
"""Seconds that the last build of each kind of image took, in the cache."""


class BuildTime:
    """`str` returns the time left as text, such as `about 90 s left`. The text is empty if one of the
    images was never built on this host."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._left = set(kinds)
        self._seconds: dict[str, float] = {}
        with suppress(OSError, ValueError, TypeError):
            self._seconds = dict(json.loads((cache.folder() / _FILE).read_bytes()))
        self._mark = time.monotonic()

    def record_built(self, kind: str) -> None:
        """The build time is the time since the previous image was finished, or since the start of the
        build."""
        now = time.monotonic()
        self._left.discard(kind)
        self._seconds[kind], self._mark = round(now - self._mark, 1), now
        cache.keep(cache.folder() / _FILE, json.dumps(self._seconds))

    def __str__(self) -> str:
        if not self._left <= self._seconds.keys():
            return ""
        return console.time_left_text(sum(self._seconds[kind] for kind in self._left))


_BUILD_LABEL = "testbed.build"
"""Has a different value for each build, and so identifies the containers of an interrupted build."""
_SCRATCH = "build-"
"""Folders for temporary files in the cache."""
_DISCARD_TIMEOUT_SECONDS = 5.0
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures for which PyTorch has wheels: Docker's (and Debian's) name -> pip's name."""
Progress = Callable[[str], None]


def missing_kinds(client: docker.DockerClient, tags: Tags) -> set[str]:
    """Missing images, and missing parents of missing images."""
    found: set[str] = set()
    with_cuda = (agent_kind(tags, CUDA),) if f"agent{CUDA}" in tags else ()
    for used in (agent_kind(tags), *with_cuda, "broker"):
        kind: str | None = used
        while kind is not None and kind not in found and not image_exists(client, tags[kind]):
            found.add(kind)
            kind = parent_of(kind, tags)
    return found


def image_exists(client: docker.DockerClient, tag: str) -> bool:
    return bool(client.images.list(name=tag))


@contextlib.contextmanager
def build_lock() -> Iterator[None]:
    """If two runs start at once, the second run waits for the images of the first."""
    cache.folder().mkdir(parents=True, exist_ok=True)
    with (cache.folder() / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """The folder is in the cache, because /tmp may be in memory. Leftovers of killed builds are removed
    first, so the caller must hold the build lock."""
    for left in cache.folder().glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache.folder()))
    try:
        yield folder
    finally:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)  # report the error that ended the build


@dataclass(frozen=True, slots=True)
class Builder:
    """A parent is built before its children."""

    client: docker.DockerClient
    tags: Tags
    """Parents come before their children."""
    scratch: Path
    """Folder for temporary files."""
    progress: Progress
    expected: BuildTime
    own: ImageAdditions | None = None
    force: bool = False
    """Whether libraries are downloaded again, in their newest versions."""
    installed: threading.Event | None = None
    """Set when the Python packages of this host are installed; None if they are."""

    def build(self, kinds: set[str]) -> None:
        """Raises HostError, BadInputError."""
        names = ", ".join(kind for kind in self.tags if kind in kinds)
        self._report(f"Container images to build: {names}")
        architecture = self.client.version()["Arch"]
        if architecture not in _MACHINES:
            raise HostError(
                f"PyTorch has no wheels for the engine's architecture {architecture}: use an engine on "
                f"{' or '.join(_MACHINES)}."
            )
        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                machine = _MACHINES[architecture]
                # Downloaded while the base image is built: each takes half a minute or more.
                libraries: dict[str, Future[Path]] = {
                    kind: pool.submit(self._libraries_context, kind, machine, stop)
                    for kind in ("libraries", "libraries-cuda")
                    if kind in kinds
                }
                # First, so that an error in the run's requirements is reported before anything is built.
                for kind in (f"{OWN[0]}{variant}" for variant in ("", CUDA)):
                    if kind in kinds and self.own is not None:
                        pool.submit(self._fetch_own_wheels, kind, self.own, machine, stop).result()
                if "base" in kinds:
                    self._base(architecture, stop)
                if "broker" in kinds:
                    self._image("broker", self._context("broker", {}), "base")
                for variant in ("", CUDA):
                    if (kind := f"libraries{variant}") in kinds:
                        self._image(kind, libraries[kind].result(), "base")
                    if (kind := f"agent{variant}") in kinds:
                        context = self._context(kind, module_files(AGENTS))
                        self._image(kind, context, f"libraries{variant}")
                    for kind in (f"{own}{variant}" for own in OWN):
                        if kind in kinds and self.own is not None:
                            made = pool.submit(self._own_context, kind, self.own, machine, stop)
                            self._image(kind, made.result(), parent_of(kind, self.tags))
            except BaseException:
                stop.set()  # ends pip in the pool's thread, which the pool waits for
                raise

    def _libraries_context(self, kind: str, machine: str, stop: threading.Event) -> Path:
        inputs = FOLDER / kind
        while self.installed is not None and not self.installed.wait(0.1):
            if stop.is_set():
                raise StoppedError
        fetched = self._fetch_wheels(kind, machine, stop, again=self.force)
        context = self._context(kind, {})
        with tarfile.open(context, "a") as archive:
            wheels.unpack(fetched, inputs / "trim.txt", archive, stop)
        return context

    def _fetch_wheels(
        self, kind: str, machine: str, stop: threading.Event, *, again: bool = False
    ) -> Path:
        requirements = FOLDER / kind / "requirements.txt"
        cuda = kind.endswith(CUDA)
        return wheels.fetch_wheels(requirements, machine, self.scratch, stop, cuda=cuda, again=again)

    def _own_context(self, kind: str, own: ImageAdditions, machine: str, stop: threading.Event) -> Path:
        if kind.removesuffix(CUDA) == "code":
            folder = self.scratch / kind
            own.copy(folder)
            return self._context(kind, {"code": folder})
        fetched = self._fetch_own_wheels(kind, own, machine, stop)
        context = self._context(kind, {})
        with tarfile.open(context, "a") as archive:
            wheels.unpack(fetched, FOLDER / _libraries(kind) / "trim.txt", archive, stop)
        return context

    def _fetch_own_wheels(
        self, kind: str, own: ImageAdditions, machine: str, stop: threading.Event
    ) -> Path:
        """`kind`: `requirements` or `requirements-cuda`. The wheels of the agents' libraries are left
        out."""
        ours = self._fetch_wheels(_libraries(kind), machine, stop)
        return wheels.fetch_more_wheels(own.requirements, ours, machine, self.scratch, stop)

    def _context(self, kind: str, files: Mapping[str, Path]) -> Path:
        """Write a tar archive of the Dockerfile and `files`: path in the archive -> path on this
        host."""
        context = self.scratch / f"{kind}.tar"
        with tarfile.open(context, "w") as archive:
            dockerfile = build_files(FOLDER, kind)["Dockerfile"]
            for name, path in {"Dockerfile": dockerfile, **files}.items():
                archive.add(path, name, filter=_readable_by_all)
        return context

    def _base(self, architecture: str, stop: threading.Event) -> None:
        """Start from Debian's image. If no registry answers, bootstrap from Debian's packages."""
        packages = FOLDER / "base" / "packages.txt"
        if image_exists(self.client, DEBIAN_IMAGE) or docker_engine.registry_has(DEBIAN_IMAGE):
            self._image("base", self._context("base", {packages.name: packages}))
            return
        with self._step("base", "bootstrapped from Debian's packages, as no registry answers"):
            names = packages.read_text(encoding="utf-8").split()
            archive = bootstrap_debian(names, architecture, self.scratch, stop)
            repository, tag = self.tags["base"].split(":")
            self.client.api.import_image_from_file(
                str(archive), repository, tag, changes=[f"LABEL {LABEL}=base"]
            )
            archive.unlink()

    def _image(self, kind: str, context: Path, parent: str | None = None) -> None:
        """A build argument of the Dockerfile holds the tag of the image `parent`.

        The argument is PARENT if `kind` is in `OWN`. For other kinds, the argument is named after the
        parent, such as LIBRARIES. The suffix `CUDA` is ignored in both cases.
        """
        arguments = {}
        if parent is not None:
            name = "parent" if kind.removesuffix(CUDA) in OWN else parent.removesuffix(CUDA)
            arguments[name.upper()] = self.tags[parent]
        with self._step(kind, "built"), context.open("rb") as file:
            network = "none" if parent else None  # only the base image downloads something
            engine_build(self.client, self.tags[kind], file, arguments, network)
        context.unlink()

    @contextlib.contextmanager
    def _step(self, kind: str, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        size = self.client.images.get(self.tags[kind]).attrs["Size"]
        seconds = time.monotonic() - start
        self.expected.record_built(kind)
        self._report(f"{self.tags[kind]}: {what}, {size / 1e6:.0f} MB, in {seconds:.0f} s")

    def _report(self, text: str) -> None:
        self.progress("; ".join(filter(None, (text, str(self.expected)))))


def _libraries(kind: str) -> str:
    return f"libraries{CUDA}" if kind.endswith(CUDA) else "libraries"


def _readable_by_all(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The result does not depend on the user's umask at checkout."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def engine_build(
    client: docker.DockerClient,
    tag: str,
    context: IO[bytes],
    arguments: Mapping[str, str],
    network: str | None = "none",
    dockerfile: str = "Dockerfile",
) -> None:
    """`network`: Docker's network mode for the build; None for the engine's default mode. By default a
    build has no network. If the Dockerfile labels its containers and layers with the build argument
    BUILD, a build that fails or is interrupted leaves no containers and no layers. Raises HostError with
    the engine's last lines."""
    token = secrets.token_hex(6)
    output: deque[str] = deque(maxlen=15)
    try:
        for entry in client.api.build(
            fileobj=context,
            custom_context=True,
            tag=tag,
            dockerfile=dockerfile,
            buildargs={"BUILD": token, **arguments},
            network_mode=network,
            nocache=True,  # the tags are the cache
            rm=True,
            forcerm=True,
            decode=True,
        ):
            output.extend(str(entry.get("stream", "")).rstrip().splitlines())
            if "error" in entry:
                lines = "\n".join(f"    {line}" for line in output)
                raise HostError(f"Building {tag} failed: {entry['error'].strip()}\n{lines}")
    except BaseException:
        with uninterrupted():
            _discard(client, token)
        raise


def _discard(client: docker.DockerClient, token: str) -> None:
    """Repeat until no container and no layer of the build is left.

    When the connection of a build is closed, the engine ends the build about a second later. The engine
    keeps the layers that the build has made.
    """
    deadline = time.monotonic() + _DISCARD_TIMEOUT_SECONDS
    with suppress(*docker_engine.ERRORS):  # report the error that ended the build
        while time.monotonic() < deadline:
            containers = client.containers.list(
                all=True, filters={"label": f"{_BUILD_LABEL}={token}"}, ignore_removed=True
            )
            for container in containers:
                with suppress(APIError):  # the engine has removed it already
                    container.remove(force=True, v=True)
            if not containers and not remove_untagged(client, f"{_BUILD_LABEL}={token}"):
                return
            time.sleep(0.3)


def remove_untagged(client: docker.DockerClient, label: str, **filters: str) -> bool:
    """Layers that a container uses are kept. Return whether there were any.

    `filters`: further filters of the engine's prune command.
    """
    pruned = client.images.prune(filters={"label": label, "dangling": True, **filters})
    return bool(pruned["ImagesDeleted"])


def ensure(
    client: docker.DockerClient,
    progress: Progress,
    own: ImageAdditions | None = None,
    *,
    force: bool = False,
    cuda: bool = False,
    installed: threading.Event | None = None,
) -> Images:
    """Build missing images, and report each build to `progress`.

    `own`: code and packages that the run adds. `cuda`: whether to build the images for devices with a
    GPU, too. `force`: whether to build all images again, with the newest packages. `installed`: set when
    the Python packages of this host are installed; None if they are.

    Raises HostError, with the last lines of pip, mmdebstrap or the engine, if a build fails. Raises
    BadInputError, with pip's last lines, if the run's own requirements cannot be installed.
    """
    every = current_tags(FOLDER, AGENTS)
    register_images(every)  # with the CUDA images: another run may use them
    variants = ("", CUDA) if cuda else ("",)
    tags = {kind: tag for kind, tag in every.items() if cuda or not kind.endswith(CUDA)}
    if own is not None:
        added = {
            f"{kind}{variant}": tag
            for variant in variants
            for kind, tag in added_tags(own, tags[f"agent{variant}"]).items()
        }
        tags |= added
        register_images(added, own.name)
    if force or missing_kinds(client, tags):
        try:
            with build_lock(), scratch_folder() as scratch:
                todo = set(tags) if force else missing_kinds(client, tags)
                expected = BuildTime(todo)
                builder = Builder(client, tags, scratch, progress, expected, own, force, installed)
                builder.build(todo)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine failed on an image: {error}") from error
    gpu = tags[agent_kind(tags, CUDA)] if cuda else ""
    return Images(tags[agent_kind(tags)], tags["broker"], tags["base"], gpu)


def are_built(client: docker.DockerClient) -> bool:
    """Whether the images of this version for devices without a GPU exist."""
    tags = current_tags(FOLDER, AGENTS)
    return not missing_kinds(
        client, {kind: tag for kind, tag in tags.items() if not kind.endswith(CUDA)}
    )


# Building never removes an image, because another checkout, version or user may need it.

_OURS = re.compile(r"testbed-.*|.+/(testbed-[a-z-]+:[0-9a-f]{12})", re.DOTALL)
"""A registry's name may come first, as in the tags that a Swarm's nodes pull."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One tag of one of the testbed's images."""

    image: str
    size: int
    """Bytes, including layers shared with other images."""
    alone: int
    """Bytes of the layers that no other image shares."""
    user: str
    """`containers`, `this checkout`, or the path of the checkout, code or Dockerfile that the image was
    built for. Empty if the image is unused."""
    is_kept: bool
    """Whether `prune_images` always keeps the image, because a container uses it, or because it belongs
    to this checkout and version."""

    @property
    def row(self) -> dict[str, Any]:
        sizes = {"size MB": round(self.size / 1e6), "of it alone MB": round(self.alone / 1e6)}
        return {"image": self.image, **sizes, "used by": self.user or "nobody"}


def list_images(client: docker.DockerClient) -> list[StoredImage]:
    """Largest first. Raises HostError."""
    here = set(current_tags(FOLDER, AGENTS).values())
    with _as_host_error("list the images"):
        found = client.df()["Images"] or []
        in_containers = {str(one["ImageID"]) for one in client.api.containers(all=True)}
    return image_entries(found, here, registered_images(), in_containers)


def image_entries(
    found: Sequence[Mapping[str, Any]],
    here: Collection[str],
    registered: Mapping[str, str],
    in_containers: Collection[str],
) -> list[StoredImage]:
    """Select the testbed's images from the engine's list with disk usage.

    `here`: tags of this checkout. `registered`: tags in use -> path of their user. `in_containers`: ids
    of images that any container was started from.
    """
    ours = []
    for one in found:
        used = one["Id"] in in_containers
        size, shared = int(one["Size"]), max(0, int(one["SharedSize"]))  # -1: unknown
        for tag in one.get("RepoTags") or ():
            if (match := _OURS.fullmatch(tag)) is not None:
                plain = match[1] or tag
                user = "containers" if used else registered.get(plain, "")
                if plain in here and not used:
                    user = "this checkout"
                ours.append(StoredImage(tag, size, size - shared, user, used or plain in here))
    return sorted(ours, key=lambda one: (-one.size, one.image))


def prune_images(client: docker.DockerClient, *, everything: bool) -> tuple[list[StoredImage], int]:
    """Remove unused images, and unused layers that are more than an hour old.

    `everything`: whether to remove images of other checkouts, code and Dockerfiles, too. Images that a
    container uses are kept. Returns the removed images and the number of bytes freed. Raises HostError.
    """
    with _as_host_error("remove images"), build_lock():
        before = int(client.df()["LayersSize"])
        gone = remove_images(client, removable_images(list_images(client), everything=everything))
        remove_untagged(client, LABEL, until="1h")  # others may be building
        return gone, max(0, before - int(client.df()["LayersSize"]))


def remove_images(client: docker.DockerClient, chosen: Sequence[StoredImage]) -> list[StoredImage]:
    """Return the removed images. Images that a container has begun to use are kept. Raises one of
    `docker_engine.ERRORS`."""
    gone = []
    for one in chosen:
        with suppress(APIError):  # a container uses it by now
            client.images.remove(one.image)
            gone.append(one)
    return gone


def removable_images(found: Sequence[StoredImage], *, everything: bool) -> list[StoredImage]:
    return [one for one in found if not one.is_kept and (everything or not one.user)]


@contextlib.contextmanager
def _as_host_error(what: str) -> Iterator[None]:
    try:
        yield
    except docker_engine.ERRORS as error:
        raise HostError(f"The Docker engine could not {what}: {error}") from error


def main() -> None:
    processes.interrupt_once()
    installed = threading.Event()
    try:
        threading.Thread(target=_listen, args=(installed,), daemon=True).start()
        if docker_engine.is_available():
            with docker_engine.connect_fit() as client:
                ensure(client, _print_line, installed=installed)
    except TestbedError as error:
        sys.exit(f"  images: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _listen(installed: threading.Event) -> None:
    # Not by sys.stdin: a thread that waits in its buffer would disturb the interpreter's end.
    if os.read(0, 1):
        installed.set()
        os.read(0, 1)
    # To the main thread: it may wait for a lock, which a signal to another thread would not end.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _print_line(line: str) -> None:
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
