"""Build images with the engine's own builder, over the Docker SDK, with an estimate of the time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import shutil
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
from docker.errors import APIError

from testbed import console
from testbed.errors import HostError
from testbed.host import cache, docker_engine
from testbed.host.signals import uninterrupted
from testbed.host.subprocesses import StoppedError
from testbed.images import tags, wheels
from testbed.images.tags import (
    AGENTS,
    CUDA,
    FOLDER,
    LABEL,
    OWN,
    ImageAdditions,
    Tags,
    agent_kind,
    build_files,
    module_files,
    parent_of,
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
        if image_exists(self.client, tags.DEBIAN_IMAGE) or docker_engine.registry_has(tags.DEBIAN_IMAGE):
            self._image("base", self._context("base", {packages.name: packages}))
            return
        with self._step("base", "bootstrapped from Debian's packages, as no registry answers"):
            names = packages.read_text(encoding="utf-8").split()
            archive = tags.bootstrap_debian(names, architecture, self.scratch, stop)
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
    with contextlib.suppress(*docker_engine.ERRORS):  # report the error that ended the build
        while time.monotonic() < deadline:
            containers = client.containers.list(
                all=True, filters={"label": f"{_BUILD_LABEL}={token}"}, ignore_removed=True
            )
            for container in containers:
                with contextlib.suppress(APIError):  # the engine has removed it already
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
