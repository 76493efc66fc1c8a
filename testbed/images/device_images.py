"""Users' own images for device groups. The testbed checks each image. If a group names a Dockerfile, the
testbed builds the image on top of the testbed's image.

    devices:
      - {name: nano, cpu: 0.25, image: my-agent:1}        # built by the user, FROM the testbed's image
      - {name: cam, cpu: 0.25, image: camera/Dockerfile}  # built by the testbed; BASE is its image

Broker, aggregator and router always run in the testbed's images.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import APIError, ContainerError, ImageNotFound
from docker.utils import build as docker_build

from testbed import images
from testbed.errors import BadInputError, HostError
from testbed.host import cache, docker_engine
from testbed.images import ImageAdditions, Images, building, image_check
from testbed.images.building import Progress
from testbed.topology import Topology
from testbed.topology.devices import DeviceGroup

KIND = "device"
_MAX_BYTES = 512 * 2**20
_MAX_FILES = 20_000
_CLIENT = "10001:10001"
"""User and group of the devices' clients (`testbed.plan.agent_configs.CLIENT_USER`)."""


def additions(topology: Topology) -> ImageAdditions | None:
    code = topology.user_code
    if code is None:
        return None
    return ImageAdditions(str(code.path), code.digest, code.copy, topology.requirements)


def group_images(
    client: docker.DockerClient,
    topology: Topology,
    ours: Images,
    progress: Progress,
    labels: Mapping[str, str],
) -> dict[str, str]:
    """Return device group -> tag, for groups with an image of their own. Build missing images.

    `labels`: labels of the containers in which the images are checked. Raises BadInputError with all
    problems and their places. Raises HostError if the engine fails.
    """
    problems, tags = [], dict[str, str]()
    for index, group in enumerate(topology.devices):
        if group.image is None or group.group_name in tags:
            continue
        base = ours.agent if group.gpu is None else ours.gpu
        try:
            tag = _group_tag(client, group, base, progress, with_code=topology.code is not None)
            _check(client, tag, base, labels)
            tags[group.group_name] = tag
        except BadInputError as error:
            problems.append(topology.source.problem(("devices", index, "image"), str(error)))
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine failed on the image of {group.name}: {error}") from error
    if problems:
        raise topology.source.error(problems)
    return tags


def _group_tag(
    client: docker.DockerClient, group: DeviceGroup, base: str, progress: Progress, *, with_code: bool
) -> str:
    if group.dockerfile is not None:
        return _build(client, BuildContext.read(group.dockerfile), base, progress)
    tag = group.image or ""
    if with_code:
        raise BadInputError(
            f"{tag} does not contain this topology's code: give the path of a Dockerfile instead "
            "(its BASE contains the code)"
        )
    try:
        client.images.get(tag)
    except ImageNotFound:
        raise BadInputError(
            f"{group.name}: the engine has no image {tag}: build it (FROM {base}), or fetch it with "
            f"docker pull {tag}; to build from a file, give its path, as in sensor/Dockerfile"
        ) from None
    return tag


@dataclass(frozen=True, slots=True)
class BuildContext:
    dockerfile: Path
    files: tuple[str, ...]
    """Paths relative to the Dockerfile's folder."""
    digest: str

    @classmethod
    def read(cls, dockerfile: Path) -> BuildContext:
        """Leave out the files that .dockerignore names.

        Raises BadInputError if the folder is too large, or contains something other than files and
        links.
        """
        folder = dockerfile.parent
        if not dockerfile.is_file():
            raise BadInputError(f"there is no {dockerfile}: give its path from the topology's folder")
        ignored = folder / ".dockerignore"
        patterns = ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else []
        rules = [line.strip() for line in patterns if line.strip() and not line.startswith("#")]
        found = hashlib.sha256()
        size, names = 0, []
        for name in sorted(docker_build.exclude_paths(str(folder), rules, dockerfile=dockerfile.name)):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                continue
            if not (path.is_file() or path.is_symlink()):
                raise BadInputError(
                    f"{path} is neither a file nor a link and cannot be sent to the engine: remove it, "
                    "or name it in a .dockerignore"
                )
            names.append(name)
            size += path.lstat().st_size
            if size > _MAX_BYTES or len(names) > _MAX_FILES:
                raise BadInputError(
                    f"{folder} has more than {_MAX_FILES:,} files or {_MAX_BYTES >> 20} MiB, and all of "
                    "it would be sent to the engine: put the Dockerfile into a folder with only what it "
                    "copies, or name the rest in a .dockerignore"
                )
            found.update(f"\0{name}\0{path.lstat().st_mode & 0o111}\0".encode())
            found.update(str(path.readlink()).encode() if path.is_symlink() else path.read_bytes())
        return cls(dockerfile, tuple(names), found.hexdigest())

    def tag(self, base: str) -> str:
        made = hashlib.sha256(f"{base}\n{self.dockerfile.name}\n{self.digest}".encode())
        return f"testbed-{KIND}:{made.hexdigest()[:12]}"


def _build(client: docker.DockerClient, context: BuildContext, base: str, progress: Progress) -> str:
    """Build the image on top of `base` if it is missing. Raises BadInputError, with the engine's last
    lines, if the build fails."""
    tag, folder = context.tag(base), str(context.dockerfile.parent)
    images.register_images({KIND: tag}, str(context.dockerfile))
    if building.image_exists(client, tag):
        return tag
    progress(f"Building {tag} by {context.dockerfile}")
    # The archive goes to the disk: it may be larger than the free memory.
    with building.build_lock(), tempfile.TemporaryFile(dir=cache.folder()) as file:
        docker_build.create_archive(folder, [*context.files], fileobj=file)
        file.seek(0)
        try:
            building.engine_build(
                client,
                tag,
                file,
                {"BASE": base},
                network=None,  # the user's build steps may download
                dockerfile=context.dockerfile.name,
            )
        except HostError as error:
            raise BadInputError(f"{context.dockerfile}: {error}") from error
        except APIError as error:
            raise BadInputError(f"{context.dockerfile}: {error.explanation or error}") from error
    return tag


def _check(client: docker.DockerClient, tag: str, base: str, labels: Mapping[str, str]) -> None:
    """Check the image in a container, once per image and version of the testbed. Raises BadInputError if
    it cannot run a device."""
    image = client.images.get(tag)
    expected = image_check.digest(images.AGENTS)
    known = cache.folder() / "checked-images" / f"{str(image.id).partition(':')[2][:16]}-{expected[:16]}"
    if known.is_file():
        return
    if entrypoint := image.attrs["Config"].get("Entrypoint"):
        raise BadInputError(
            f"{tag} has an ENTRYPOINT ({' '.join(entrypoint)}), but the testbed starts devices by its "
            "own command: write ENTRYPOINT [] at the end of its Dockerfile"
        )
    if faults := list(_faults(_inspect_inside(client, tag, labels), expected)):
        raise BadInputError(
            f"{tag} cannot run a device: it lacks {', '.join(faults)}. Build it on top of the testbed's "
            "image: give here the path of a Dockerfile with ARG BASE and FROM ${BASE}, or use "
            f"FROM {base}"
        )
    cache.keep(known, "")


def _inspect_inside(
    client: docker.DockerClient, tag: str, labels: Mapping[str, str]
) -> dict[str, object]:
    script = Path(image_check.__file__).read_text(encoding="utf-8")
    try:
        output = docker_engine.run_output(
            client, tag, ["python3", "-c", script], labels, user=_CLIENT, network_mode="none"
        )
        found = json.loads(output.decode("utf-8", "replace").splitlines()[-1])
    except ContainerError as error:
        said = (error.stderr or "").strip().splitlines()[-1:]
        return {"lacks": [f"a working Python ({' '.join(said) or f'exit {error.exit_status}'})"]}
    except APIError as error:
        if "executable file not found" not in str(error) and "no such file" not in str(error):
            raise
        return {"lacks": ["Python (it has no python3)"]}
    except (ValueError, IndexError):
        return {"lacks": ["a working Python (python3 printed something unexpected)"]}
    return found if isinstance(found, dict) else {}


def _faults(seen: dict[str, object], expected: str) -> Iterator[str]:
    """Yield what the image lacks. `seen`: output of the check. `expected`: hash of the agents' code."""
    lacks = seen.get("lacks")
    yield from map(str, lacks) if isinstance(lacks, list) else ("an answer",)
    if seen.get("agents") not in (expected, None):
        yield "the agents' code of this version of the testbed (it has another version's)"
