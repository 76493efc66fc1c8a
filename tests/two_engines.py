"""Docker engines in network namespaces of their own: one, or two made into a Swarm.

Each has a private mount namespace, with /run of its own, and its own data and exec roots, so that the
machine's engine is not touched, and nothing is left of them: neither process, mount, nor file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil

from testbed.host import docker_engine

_TIMEOUT_SECONDS = 120.0
_ENOUGH_MEMORY = 10 * 2**30
"""Bytes of free memory that suffice for the images of both engines. With less they are on the disk,
where writing and removing them takes much longer."""
_CHUNK = 2**20
"""Bytes of images, handed on at once."""
_START = """
set -e
folder=$1 in_memory=$2 root=$3 store=$4
shift 4
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock "$folder/data"
[ -z "$in_memory" ] || mount -t tmpfs tmpfs "$folder/data"
if [ -n "$store" ]; then
    tar -C "$store" -T "$folder/images/files" -c | tar -C "$folder/data" -x
    cp "$folder/images/repositories.json" "$folder/data/image/overlay2/"
    while read -r content; do
        mkdir "$folder/data/$content"
        mount --bind -o ro "$store/$content" "$folder/data/$content"
    done < "$folder/images/contents"
fi
ip link set lo up
[ -z "$root" ] || mount --bind "$root/etc" /etc
[ -z "$root" ] || mount --bind "$root/usr" /usr
exec dockerd --data-root "$folder/data" --exec-root /run/docker --pidfile "$folder/pid" \
    -H "unix://$folder/docker.sock" -H unix:///run/docker.sock "$@" > "$folder/log" 2>&1
"""


def lacking() -> str | None:
    """Return what this machine lacks for two engines; None if nothing."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [
        name for name in ("dockerd", "setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None
    ]
    return f"there is no {missing[0]}" if missing else None


@dataclass(frozen=True, slots=True)
class Engine:
    folder: Path
    client: docker.DockerClient
    address: str

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/docker.sock"


@dataclass(frozen=True, slots=True)
class StoredImages:
    """Files of images in the store of an engine of this machine, to begin the store of another with."""

    store: Path
    files: list[str]
    """Paths within the store of what is copied."""
    contents: list[str]
    """Paths within the store of the layers' contents, which are mounted: engines only read them."""
    repositories: dict[str, dict[str, str]]
    """What the engine knows of names: repository -> tag or digest -> image."""

    @classmethod
    def find(cls, images: Sequence[str]) -> StoredImages | None:
        """None where the engine keeps its images otherwise than in layers of overlay2."""
        with closing(docker_engine.connect()) as engine:
            store = Path(engine.info()["DockerRootDir"])
            inspected = {image: engine.images.get(image).attrs for image in images}
        known, layers = store / "image/overlay2", dict[str, None]()
        repositories: dict[str, dict[str, str]] = {}
        files, contents = list[str](), list[str]()
        for image, found in inspected.items():
            repositories.setdefault(image.partition(":")[0], {})[image] = found["Id"]
            kind, _, name = found["Id"].partition(":")
            files += [f"image/overlay2/imagedb/content/{kind}/{name}"]
            chain = ""
            for layer in found["RootFS"]["Layers"]:
                joined = f"{chain} {layer}".strip()
                chain = f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}" if chain else layer
                layers[chain.replace(":", "/")] = None
        try:
            for layer in layers:
                folder = "overlay2/" + (known / "layerdb" / layer / "cache-id").read_text()
                link = (store / folder / "link").read_text()
                files += [f"image/overlay2/layerdb/{layer}", f"overlay2/l/{link}"]
                about = ("link", "lower", "committed")
                files += [f"{folder}/{name}" for name in about if (store / folder / name).exists()]
                contents.append(f"{folder}/diff")
        except OSError:
            return None
        return cls(store, files, contents, repositories)

    def hand_to(self, folder: Path) -> None:
        """Write what is to be copied and mounted, for the start of an engine."""
        (folder / "images").mkdir()
        (folder / "images/files").write_text("\n".join(self.files))
        (folder / "images/contents").write_text("".join(f"{one}\n" for one in self.contents))
        (folder / "images/repositories.json").write_text(json.dumps({"Repositories": self.repositories}))


@contextmanager
def swarm(folder: Path, images: Sequence[str] = ()) -> Iterator[tuple[Engine, Engine]]:
    """The manager and a worker, with `images` of this machine's engine; their files are in `folder`, a
    short path, which is theirs."""
    with ExitStack() as stack:
        stored = StoredImages.find(images) if images else None
        processes = [
            stack.enter_context(
                engine_process(folder / name, options=("--bridge", "none"), images=stored)
            )
            for name in ("1", "2")
        ]
        engines = []
        for number in (1, 2):  # before one answers, it may not be in its namespaces yet
            url = f"unix://{folder}/{number}/docker.sock"
            client = docker_engine.connect_to(url, _TIMEOUT_SECONDS)
            stack.callback(client.close)
            engines.append(Engine(folder / f"{number}", client, f"10.77.0.{number}"))
        pids = [str(process.pid) for process in processes]
        _run("ip", "link", "add", "swarm0", "netns", pids[0], "type", "veth", "peer", "name", "swarm0",
             "netns", pids[1])  # fmt: skip
        for pid, engine in zip(pids, engines, strict=True):
            inside = ("nsenter", "-t", pid, "-n", "ip")
            _run(*inside, "addr", "add", f"{engine.address}/24", "dev", "swarm0")
            _run(*inside, "link", "set", "swarm0", "up")
        first, second = engines
        first.client.swarm.init(advertise_addr=first.address, listen_addr=f"{first.address}:2377")
        token = first.client.swarm.attrs["JoinTokens"]["Worker"]
        second.client.swarm.join(
            [f"{first.address}:2377"],
            token,
            advertise_addr=second.address,
            listen_addr=f"{second.address}:2377",
        )
        carry(images, [one.url for one in engines if not has_all(one, images)])
        yield first, second


def has_all(engine: Engine, images: Sequence[str]) -> bool:
    tags = {tag for image in engine.client.api.images() for tag in image["RepoTags"] or ()}
    return tags >= set(images)


def carry(images: Sequence[str], urls: Sequence[str]) -> None:
    """Give `images` of this machine's engine to those at `urls`, by `docker save` and `docker load`.

    It takes much more CPU time than to begin an engine's store with their files (`StoredImages`).
    """
    if not urls:
        return
    with ExitStack() as stack:
        saving = stack.enter_context(
            subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE)
        )
        loading = [
            stack.enter_context(
                subprocess.Popen(
                    ["docker", "-H", url, "load", "--quiet"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                )
            )
            for url in urls
        ]
        assert saving.stdout is not None
        while chunk := saving.stdout.read(_CHUNK):
            for each in loading:
                assert each.stdin is not None
                each.stdin.write(chunk)
    assert [each.returncode for each in (saving, *loading)] == [0] * (1 + len(loading))


@contextmanager
def engine_process(
    folder: Path,
    *,
    root: Path | None = None,
    binaries: Path | None = None,
    options: Sequence[str] = (),
    images: StoredImages | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A `dockerd` in network and mount namespaces of its own, with `options`; its files are in `folder`.

    With `root`, the engine is the one of the Debian release that is unpacked there: its /usr and /etc
    take the place of this host's for the engine alone. All other paths are the host's, so that
    containers can mount files of the host. Programs in the folder `binaries` come before all others. The
    engine begins with `images`, if it keeps them as the one does that has them.
    `setpriv` becomes the engine, so that it has its process id.
    The engine ends in order, its containers first, also where this process is killed.
    """
    folder.mkdir(parents=True)
    in_memory = "yes" if psutil.virtual_memory().available > _ENOUGH_MEMORY else ""
    namespaces = ["setpriv", "--pdeathsig", "TERM", "unshare", "--net", "--mount"]
    if images is not None:
        images.hand_to(folder)
    store = "" if images is None else str(images.store)
    arguments = [str(folder), in_memory, str(root or ""), store, *options]
    process = subprocess.Popen(
        [*namespaces, "sh", "-c", _START, "sh", *arguments],
        start_new_session=True,
        env=_environment(binaries),
    )
    try:
        yield process
    finally:
        # What it has mounted and the interfaces it has made go with the namespaces.
        inside = _processes_beside(process.pid)
        process.terminate()
        try:
            process.wait(_TIMEOUT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for each in inside:
                with suppress(psutil.NoSuchProcess):
                    each.kill()  # psutil sees to it that no other process has the id by now
            process.wait()


def _environment(binaries: Path | None) -> dict[str, str]:
    """The environment of an engine, which looks for programs in `binaries` first."""
    environment = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    if binaries is not None:
        environment["PATH"] = f"{binaries}:{environment['PATH']}"
    return environment


def _processes_beside(pid: int) -> list[psutil.Process]:
    """The processes that share the network namespace of `pid`, with all their descendants.

    None while the engine is still in this host's own namespace.
    """
    namespace = _network_namespace(pid)
    if namespace is None or namespace == _network_namespace(os.getpid()):
        return []
    found = [each for each in psutil.process_iter() if _network_namespace(each.pid) == namespace]
    with suppress(psutil.NoSuchProcess):
        found += [child for each in found for child in each.children(recursive=True)]
    return [each for each in set(found) if each.pid != pid]


def _network_namespace(pid: int) -> str | None:
    """The kernel's name of the network namespace of `pid`; None if that has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
