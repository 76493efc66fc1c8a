"""The container images, built where they are missing: base -> libraries -> agent, and base -> broker.
For a user's own code there are more on top: agent -> requirements -> code (`testbed.own_code`), as far
as a run has these. For devices with a GPU there is a second chain beside that, libraries-cuda ->
agent-cuda -> ..., which is built for a run that has such devices.

A tag is a hash of all that goes into the image, its parent's tag included: an image that exists is up to
date, and a change rebuilds only the images that depend on it. Everything goes through the Docker SDK and
the engine's own builder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import secrets
import shutil
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import docker
from docker.errors import APIError

from testbed import bundle
from testbed.errors import HostError
from testbed.host import cache, docker_engine
from testbed.host.signals import uninterrupted
from testbed.images import debian, wheels
from testbed.images.build_time import BuildTime

FOLDER, AGENTS = bundle.IMAGES, bundle.AGENTS
LABEL = "testbed.image"
"""Label of every image and layer of ours; its value is the kind: `base`, `libraries`, ..."""

_BUILD_LABEL = "testbed.build"
"""Label with one value for each build, by which the containers of an interrupted one are found."""

_REGISTER = "images-in-use"
"""Folder of the cache, with a file for each checkout: which images it uses."""

_SCRATCH = "build-"
"""What the names of folders in the cache for temporary files begin with."""

_DISCARD_TIMEOUT_SECONDS = 5.0

_OWN = ("requirements", "code")
"""Kinds of images with what a run adds."""

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures that torch has wheels for: Docker's (and Debian's) name, and pip's."""

_CUDA = "-cuda"
"""What the kinds of image for devices with a GPU end with."""

_PARENTS = {
    "libraries": "base",
    "agent": "libraries",
    "broker": "base",
    "requirements": "agent",
    "code": "requirements",
    "libraries-cuda": "base",
    "agent-cuda": "libraries-cuda",
    "requirements-cuda": "agent-cuda",
    "code-cuda": "requirements-cuda",
}
"""Kind of image -> the one that it is built on; without requirements, code is built on agent."""

Progress = Callable[[str], None]
Tags = Mapping[str, str]
"""Kind of image -> its tag, parents first."""


@dataclass(frozen=True, slots=True)
class Images:
    """Tags of the images that a run starts containers from."""

    agent: str
    """With own code, where the run has some."""
    broker: str
    base: str
    """What both are built on."""
    gpu: str = ""
    """As `agent`, with CUDA; empty where no device of the run has a GPU."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Of the device groups that have one of their own (`testbed.images.own`)."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a run adds to the agents' image."""

    name: str
    """Of what is kept of it: another version of the same supersedes it."""
    digest: str
    """Of the code."""
    copy: Callable[[Path], None]
    """Writes the code into a folder."""
    requirements: tuple[str, ...] = ()
    """Packages, as for pip."""


def ensure(
    client: docker.DockerClient,
    progress: Progress,
    own: Own | None = None,
    *,
    force: bool = False,
    cuda: bool = False,
) -> Images:
    """The images for this version of the code, with `cuda` also those for devices with a GPU, and for
    what a run adds to it; builds what is missing, or with `force` all of them with the newest packages,
    and reports each to `progress`.

    Raises HostError with the last lines of pip, mmdebstrap or the engine where one fails; BadInputError
    with those of pip where own requirements cannot be installed.
    """
    every = current_tags(FOLDER, AGENTS)
    register(every)  # those with CUDA too: another run's
    variants = ("", _CUDA) if cuda else ("",)
    tags = {kind: tag for kind, tag in every.items() if cuda or not kind.endswith(_CUDA)}
    if own is not None:
        added = {
            f"{kind}{variant}": tag
            for variant in variants
            for kind, tag in _own_tags(own, tags[f"agent{variant}"]).items()
        }
        tags |= added
        register(added, own.name)
    if force or _missing(client, tags):
        try:
            with one_at_a_time(), _scratch() as scratch:
                todo = set(tags) if force else _missing(client, tags)
                expected = BuildTime(todo)
                _Builder(client, tags, scratch, progress, expected, own, force=force).build(todo)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine failed on an image: {error}") from error
    gpu = tags[_of_agents(tags, _CUDA)] if cuda else ""
    return Images(tags[_of_agents(tags)], tags["broker"], tags["base"], gpu)


def are_built(client: docker.DockerClient) -> bool:
    """Whether the images for this version of the code are there, for devices without a GPU."""
    tags = current_tags(FOLDER, AGENTS)
    return not _missing(client, {kind: tag for kind, tag in tags.items() if not kind.endswith(_CUDA)})


def current_tags(folder: Path, sources: Path) -> dict[str, str]:
    """The tag of each image, from the inputs in `folder` (as `images/`) and the package `sources`."""
    base = _tag("base", _inputs(folder / "base"), repr(debian.OPTIONS))
    libraries = _tag("libraries", _inputs(folder / "libraries"), base)
    agent = _tag("agent", _inputs(folder / "agent") | _sources(sources), libraries)
    broker = _tag("broker", _inputs(folder / "broker"), base)
    of_cuda = _tag("libraries-cuda", _recipe(folder, "libraries-cuda"), base)
    agent_of_cuda = _tag("agent-cuda", _recipe(folder, "agent-cuda") | _sources(sources), of_cuda)
    return {
        "base": base,
        "libraries": libraries,
        "agent": agent,
        "broker": broker,
        "libraries-cuda": of_cuda,
        "agent-cuda": agent_of_cuda,
    }


def _recipe(folder: Path, kind: str) -> dict[str, Path]:
    """The files that an image of that kind is built by. One with CUDA has those of the kind without,
    except where it has its own."""
    own = folder / kind
    return _inputs(folder / kind.removesuffix(_CUDA)) | (_inputs(own) if own.is_dir() else {})


def _own_tags(own: Own, agent: str) -> dict[str, str]:
    """Of the images that `own` adds on top of `agent`."""
    tags, parent = {}, agent
    if own.requirements:
        parent = tags["requirements"] = _tag(
            "requirements", _inputs(FOLDER / "requirements"), f"{parent}\n{own.requirements}"
        )
    tags["code"] = _tag("code", _inputs(FOLDER / "code"), f"{parent}\n{own.digest}")
    return tags


def _of_agents(tags: Tags, variant: str = "") -> str:
    """The kind that clients and aggregator are started from."""
    return f"code{variant}" if f"code{variant}" in tags else f"agent{variant}"


def _parent(kind: str, tags: Tags) -> str | None:
    parent = _PARENTS.get(kind)
    return parent if parent is None or parent in tags else _PARENTS[parent]


def _tag(kind: str, files: Mapping[str, Path], parent: str) -> str:
    digest = hashlib.sha256(parent.encode())
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return f"testbed-{kind}:{digest.hexdigest()[:12]}"


def _inputs(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def _sources(package: Path) -> dict[str, Path]:
    """The modules of `package` alone: no byte code, no editor's backups. Path in the image -> here."""
    return {str(path.relative_to(package.parent)): path for path in package.rglob("*.py")}


def _missing(client: docker.DockerClient, tags: Tags) -> set[str]:
    """The kinds that have to be built; one that no missing image is built on is not needed."""
    missing: set[str] = set()
    with_cuda = (_of_agents(tags, _CUDA),) if f"agent{_CUDA}" in tags else ()
    for used in (_of_agents(tags), *with_cuda, "broker"):
        kind: str | None = used
        while kind is not None and kind not in missing and not exists(client, tags[kind]):
            missing.add(kind)
            kind = _parent(kind, tags)
    return missing


def exists(client: docker.DockerClient, tag: str) -> bool:
    """Whether the engine has the image."""
    return bool(client.images.list(name=tag))


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lock for building: of two runs started at once, the second waits for the first one's images."""
    cache.folder().mkdir(parents=True, exist_ok=True)
    with (cache.folder() / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for all temporary files, in the cache, since /tmp may be in memory. What a killed build
    has left there goes first: take the lock before."""
    for left in cache.folder().glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache.folder()))
    try:
        yield folder
    finally:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)  # the error to report is what ended the build


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds images in the order of their dependence; `scratch` is for temporary files."""

    client: docker.DockerClient
    tags: Tags
    scratch: Path
    progress: Progress
    expected: BuildTime
    own: Own | None = None
    force: bool = False
    """Whether libraries are downloaded again, in their newest versions."""

    def build(self, kinds: set[str]) -> None:
        names = ", ".join(kind for kind in self.tags if kind in kinds)
        self._tell(f"Container images to build: {names}")
        architecture = self.client.version()["Arch"]
        if architecture not in _MACHINES:
            raise HostError(f"There is no torch wheel for the engine's architecture, {architecture}.")
        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                machine = _MACHINES[architecture]
                libraries: dict[
                    str, Future[Path]
                ] = {  # while the base image is built: each takes half a minute or more
                    kind: pool.submit(self._libraries_context, kind, machine, stop)
                    for kind in ("libraries", "libraries-cuda")
                    if kind in kinds
                }
                if "base" in kinds:
                    self._base(architecture, stop)
                if "broker" in kinds:
                    self._image("broker", self._context("broker", {}), "base")
                for variant in ("", _CUDA):
                    if (kind := f"libraries{variant}") in kinds:
                        self._image(kind, libraries[kind].result(), "base")
                    if (kind := f"agent{variant}") in kinds:
                        context = self._context(kind, _sources(AGENTS))
                        self._image(kind, context, f"libraries{variant}")
                    for kind in (f"{own}{variant}" for own in _OWN):
                        if kind in kinds and self.own is not None:
                            made = pool.submit(self._own_context, kind, self.own, machine, stop)
                            self._image(kind, made.result(), _parent(kind, self.tags))
            except BaseException:
                stop.set()  # at which the pool's thread, which the pool waits for, ends pip
                raise

    def _libraries_context(self, kind: str, machine: str, stop: threading.Event) -> Path:
        inputs = FOLDER / kind
        fetched = self._fetched(kind, machine, stop, again=self.force)
        context = self._context(kind, {})
        with tarfile.open(context, "a") as archive:
            wheels.unpack(fetched, inputs / "trim.txt", archive, stop)
        return context

    def _fetched(self, kind: str, machine: str, stop: threading.Event, *, again: bool = False) -> Path:
        """The folder with the wheels of `libraries`, or of that with CUDA."""
        requirements = FOLDER / kind / "requirements.txt"
        cuda = kind.endswith(_CUDA)
        return wheels.fetch(requirements, machine, self.scratch, stop, cuda=cuda, again=again)

    def _own_context(self, kind: str, own: Own, machine: str, stop: threading.Event) -> Path:
        plain = kind.removesuffix(_CUDA)
        libraries = kind.replace(plain, "libraries")
        if plain == "code":
            folder = self.scratch / kind
            own.copy(folder)
            return self._context(kind, {"code": folder})
        inputs = FOLDER / libraries
        ours = self._fetched(libraries, machine, stop)
        fetched = wheels.fetch_more(own.requirements, ours, machine, self.scratch, stop)
        context = self._context(kind, {})
        with tarfile.open(context, "a") as archive:
            wheels.unpack(fetched, inputs / "trim.txt", archive, stop)
        return context

    def _context(self, kind: str, files: Mapping[str, Path]) -> Path:
        """The tar archive that the engine builds from: Dockerfile and `files` (path in it -> here)."""
        context = self.scratch / f"{kind}.tar"
        with tarfile.open(context, "w") as archive:
            dockerfile = _recipe(FOLDER, kind)["Dockerfile"]
            for name, path in {"Dockerfile": dockerfile, **files}.items():
                archive.add(path, name, filter=_readable_by_all)
        return context

    def _base(self, architecture: str, stop: threading.Event) -> None:
        """Pull and extend Debian's image; bootstrap it where no registry answers."""
        packages = FOLDER / "base" / "packages.txt"
        if exists(self.client, debian.IMAGE) or docker_engine.registry_has(debian.IMAGE):
            self._image("base", self._context("base", {packages.name: packages}))
            return
        with self._step("base", "bootstrapped from Debian's packages, as no registry answers"):
            names = packages.read_text(encoding="utf-8").split()
            archive = debian.bootstrap(names, architecture, self.scratch, stop)
            repository, tag = self.tags["base"].split(":")
            self.client.api.import_image_from_file(
                str(archive), repository, tag, changes=[f"LABEL {LABEL}=base"]
            )
            archive.unlink()

    def _image(self, kind: str, context: Path, parent: str | None = None) -> None:
        """Build one image; its Dockerfile knows the parent's tag under the parent's name."""
        arguments = {}
        if parent is not None:
            name = "parent" if kind.removesuffix(_CUDA) in _OWN else parent.removesuffix(_CUDA)
            arguments[name.upper()] = self.tags[parent]
        with self._step(kind, "built"), context.open("rb") as file:
            network = "none" if parent else None  # only the base image fetches something
            engine_build(self.client, self.tags[kind], file, arguments, network)
        context.unlink()

    @contextlib.contextmanager
    def _step(self, kind: str, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        size = self.client.images.get(self.tags[kind]).attrs["Size"]
        seconds = time.monotonic() - start
        self.expected.built(kind)
        self._tell(f"{self.tags[kind]}: {what}, {size / 1e6:.0f} MB, in {seconds:.0f} s")

    def _tell(self, text: str) -> None:
        """With the time left, where that is known."""
        self.progress("; ".join(filter(None, (text, str(self.expected)))))


def _readable_by_all(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Root owns it and all may read it, whoever checked the sources out under whatever umask."""
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
    """Let the engine build `context`, without a network unless `network` is another Docker network mode
    (None: the engine's default). Whatever ends it early leaves no container and no layer, where the
    Dockerfile labels its own with BUILD. Raises HostError with the engine's last lines.
    """
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
    """Remove the containers and layers of an unfinished build, until there are none left.

    The engine ends a build whose connection is closed, but within a second or so rather than at once,
    and it keeps the layers made so far.
    """
    deadline = time.monotonic() + _DISCARD_TIMEOUT_SECONDS
    with contextlib.suppress(*docker_engine.ERRORS):  # the error to report is what ended the build
        while time.monotonic() < deadline:
            containers = client.containers.list(
                all=True, filters={"label": f"{_BUILD_LABEL}={token}"}, ignore_removed=True
            )
            for container in containers:
                with contextlib.suppress(APIError):  # the engine was faster
                    container.remove(force=True, v=True)
            if not containers and not remove_untagged(client, f"{_BUILD_LABEL}={token}"):
                return
            time.sleep(0.3)


def register(tags: Tags, own: str = "") -> None:
    """Keep in the cache which images this checkout uses, or with it the `own` code or Dockerfile of that
    path: `prune` leaves them."""
    name = hashlib.sha256(f"{FOLDER}{own}".encode()).hexdigest()[:12]
    entry = {"folder": own or str(FOLDER), "tags": [*tags.values()]}
    cache.keep(cache.folder() / _REGISTER / f"{name}.json", json.dumps(entry))


def registered() -> dict[str, str]:
    """What this user's checkouts, own code and Dockerfiles use, as far as these are still there: the
    path of one of them, by tag."""
    registers = [json.loads(path.read_bytes()) for path in (cache.folder() / _REGISTER).glob("*.json")]
    return {
        tag: one["folder"] for one in registers if Path(one["folder"]).exists() for tag in one["tags"]
    }


def remove_untagged(client: docker.DockerClient, label: str, **filters: str) -> bool:
    """Remove the layers with that label that no tag leads to and no container uses; whether there were
    any. `filters` are more of the engine's."""
    pruned = client.images.prune(filters={"label": label, "dangling": True, **filters})
    return bool(pruned["ImagesDeleted"])
