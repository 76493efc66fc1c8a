"""The agents' Python libraries: wheels downloaded with the user's own pip configuration, then unpacked,
and packages that are compiled for one version and build of PyTorch."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testbed import installing
from testbed.errors import BadInputError, HostError
from testbed.host import cache
from testbed.host.processes import StoppedError, run
from testbed.images import FOLDER

# A user's requirements must accept the PyTorch of the images, and the packages that pip finds must be
# for the same build: a torchvision that is linked to CUDA cannot be imported beside a CPU build of
# PyTorch.

CONSTRAINTS = FOLDER / "requirements" / "companions.txt"
_CUDA_LIBRARIES = (b"libtorch_cuda.so", b"libc10_cuda.so")
"""Libraries in PyTorch's builds with CUDA. A compiled file that is linked to one of them contains its
name."""
_COMPILED = ".so"


def pinned_versions() -> dict[str, str]:
    """Return name -> version, for torch and its companions in the images."""
    lines = (FOLDER / "libraries" / "requirements.txt", CONSTRAINTS)
    texts = [line for path in lines for line in path.read_text(encoding="utf-8").splitlines()]
    pins = (line.partition("==") for line in texts if line.startswith("torch"))
    return {name: version for name, _, version in pins if version}


def companions_refusal(requirement: Requirement) -> str | None:
    """Return why `requirement` cannot be installed beside the PyTorch of the images, with what to write
    instead; None for other packages, and if the pinned version satisfies `requirement`."""
    pins = pinned_versions()
    name = canonicalize_name(requirement.name)
    if name not in pins:
        return None
    if requirement.url is None and requirement.specifier.contains(pins[name], prereleases=True):
        return None
    torch = pins["torch"]
    if name == "torch":
        return f"would replace PyTorch {torch} of the testbed: write torch, without a version"
    return (
        f"is for another PyTorch than {torch}, which the testbed has: write {name}, or "
        f"{name}=={pins[name]}"
    )


def companions_command(*requirements: str, again: bool = False) -> str:
    """Command for this environment that does not replace PyTorch. Companions of PyTorch get the version
    and the build that fit this environment's torch.

    `again`: whether the packages are installed already, but in another build.
    """
    pins = pinned_versions()
    names = {text: canonicalize_name(Requirement(text).name) for text in requirements}
    words = [sys.executable, "-m", "pip", "install"]
    if again:
        words += ["--force-reinstall", "--no-deps"]
    if any(name in pins for name in names.values()) and _is_cpu_build(_installed_torch()):
        words += ["--extra-index-url", installing.CPU_INDEX]
    words += [f"'{name}=={pins[name]}'" if name in pins else f"'{text}'" for text, name in names.items()]
    return " ".join(words)


def cuda_wheels(wheels: Sequence[Path]) -> list[str]:
    """Names and versions of the wheels with libraries that are linked to CUDA builds of PyTorch."""
    found = []
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            compiled = (name for name in wheel.namelist() if name.endswith(_COMPILED))
            if any(_is_linked_to_cuda(wheel.read(name)) for name in compiled):
                found.append(" ".join(path.name.split("-")[:2]))
    return found


def unfit_installed() -> dict[str, str]:
    """Return name -> version of companions of PyTorch that need another version or build than the
    installed PyTorch."""
    found = {}
    for name, version in pinned_versions().items():
        if name == "torch":
            continue
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        files = (Path(str(file.locate())) for file in installed.files or () if file.suffix == _COMPILED)
        is_other_version = installed.version.partition("+")[0] != version
        if is_other_version or (
            _is_cpu_build(_installed_torch())
            and any(_is_linked_to_cuda(file.read_bytes()) for file in files)
        ):
            found[name] = installed.version
    return found


def cpu_wheels(wheels: Sequence[Path]) -> list[str]:
    """Names and versions of the wheels with a version that ends with `+cpu`."""
    named = (path.name.split("-")[:2] for path in wheels)
    return [f"{name} {version}" for name, version in named if _is_cpu_build(version)]


def _is_cpu_build(version: str | None) -> bool:
    return version is not None and version.endswith("+cpu")


def _is_linked_to_cuda(library: bytes) -> bool:
    return any(name in library for name in _CUDA_LIBRARIES)


# The wheels are for Python 3.11, glibc, and the engine's architecture, even if this host has another
# Python or architecture. The wheels are unpacked on the host while the base image is built, so neither
# pip nor a wheel enters a layer.

_PYTHON = "3.11"
_PIP = (sys.executable, "-m", "pip", "--quiet")
_GLIBC = 36
"""Minor version of glibc 2.x in Debian bookworm."""


def fetch_wheels(
    requirements: Path,
    machine: str,
    scratch: Path,
    stop: threading.Event,
    *,
    cuda: bool = False,
    again: bool = False,
) -> Path:
    """`machine`: such as `x86_64`. Return the folder of the wheels.

    Wheels of an earlier download are reused unless `again` is true. Raises HostError if pip fails, if
    `cuda` is false and torch would bring CUDA libraries, or if `cuda` is true and torch would bring
    none.
    """
    torch = _installed_torch()
    wanted = significant_lines(requirements.read_text(encoding="utf-8"))
    wanted = wanted if cuda else prefer_cpu(wanted, torch)
    options = platform_options(machine)
    digest = hashlib.sha256("\n".join([*options, *wanted]).encode()).hexdigest()[:12]
    folder = cache.folder() / f"wheels-{digest}"
    if folder.is_dir() and not again:
        return folder
    partial = Path(tempfile.mkdtemp(dir=scratch))
    command = [*_PIP, "download", "--dest", str(partial), *options, *wanted]
    if cuda:
        run(command, temporary=scratch, stop=stop)
        require_cuda([wheel.name for wheel in partial.glob("*.whl")])
    else:
        index = installing.cpu_source()
        if not any(line.endswith("+cpu") for line in wanted):
            refuse_cuda(_resolve([*index.options, *options, *wanted], scratch, stop), index.reason)
        try:
            run([*command, *index.options], temporary=scratch, stop=stop)
        except HostError as error:
            raise HostError(f"{error}\nPyTorch: {index.reason}") from error
    if folder.is_dir():
        shutil.rmtree(folder)
    partial.rename(folder)  # in one step: an interrupted download leaves no folder that looks complete
    return folder


def fetch_more_wheels(
    requirements: Sequence[str], ours: Path, machine: str, scratch: Path, stop: threading.Event
) -> Path:
    """Return the folder of the wheels for a user's `requirements`, which may be in the cache.

    `ours`: folder with the agents' wheels. These wheels are not downloaded again, and pip must not
    choose other versions of the same packages. Raises BadInputError, with pip's last lines, if the
    requirements cannot be satisfied, or if a wheel is for another build of PyTorch than the wheel of
    torch in `ours`.
    """
    there = {wheel.name for wheel in ours.glob("*.whl")}
    versions = ["==".join(name.split("-")[:2]) for name in sorted(there)]
    torch = next((pin for pin in versions if pin.startswith("torch==")), "torch")
    versions += significant_lines(CONSTRAINTS.read_text(encoding="utf-8"))
    options = platform_options(machine)
    digest = hashlib.sha256("\n".join([*options, *requirements, *versions]).encode()).hexdigest()[:12]
    folder = cache.folder() / f"wheels-{digest}"
    if folder.is_dir():
        return folder
    constraints = scratch / "constraints.txt"
    constraints.write_text("\n".join(versions), encoding="utf-8")
    partial = Path(tempfile.mkdtemp(dir=scratch))
    where = [f"--dest={partial}", f"--find-links={ours}", f"--constraint={constraints}"]
    index = installing.cpu_source() if torch.endswith("+cpu") else None
    try:
        command = [*_PIP, "download", *where, *options, *(index.options if index else ())]
        run([*command, "--", *requirements], temporary=scratch, stop=stop)
    except HostError as error:
        raise BadInputError(
            f"requirements cannot be installed in the agents' image, which has {torch}: {error}"
        ) from error
    for wheel in partial.glob("*.whl"):
        if wheel.name in there:
            wheel.unlink()
    _refuse_other_builds([*partial.glob("*.whl")], torch, index)
    partial.rename(folder)
    return folder


def _refuse_other_builds(
    added: Sequence[Path], torch: str, index: installing.TorchSource | None
) -> None:
    """Raises BadInputError if a wheel is for another build of PyTorch than `torch` (such as
    `torch==2.13.0+cpu`). `index`: source of the wheels; None if `torch` is no CPU build."""
    if index is None:
        if cpu := cpu_wheels(added):
            raise BadInputError(
                f"requirements: pip finds {', '.join(cpu)}, a CPU build, but devices with a GPU have "
                f"{torch}: let pip find PyTorch's wheels with CUDA, such as those of the Python Package "
                "Index (pip config list shows where it looks), then run it again"
            )
    elif cuda := cuda_wheels(added):
        raise BadInputError(
            f"requirements: pip finds {', '.join(cuda)}, a build for CUDA, but the agents' image has "
            f"{torch}. Source of the wheels: {index.reason}. Let pip find the CPU build: export "
            f"PIP_EXTRA_INDEX_URL={installing.CPU_INDEX}, then run it again"
        )


def _resolve(arguments: Sequence[str], scratch: Path, stop: threading.Event) -> list[str]:
    """Return the names of all packages that pip would download. Nothing is downloaded, because the
    packages may have a size of gigabytes."""
    report = scratch / "report.json"
    options = ["--dry-run", "--ignore-installed", f"--report={report}", f"--target={scratch / 'none'}"]
    run([*_PIP, "install", *options, *arguments], temporary=scratch, stop=stop)
    packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [package["metadata"]["name"] for package in packages]


def unpack(wheels: Path, trim: Path, archive: tarfile.TarFile, stop: threading.Event) -> None:
    """Leave out paths that match a glob in `trim`. In `archive`, the content is below `site/`."""
    unwanted = significant_lines(trim.read_text(encoding="utf-8"))
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as source:
            for entry in source.infolist():
                if stop.is_set():
                    raise StoppedError
                path = installed_path(entry.filename)
                if path and not any(fnmatch.fnmatchcase(path, glob) for glob in unwanted):
                    _copy(source, entry, archive, f"site/{path}")


def installed_path(name: str) -> str | None:
    """Path under site-packages; None for folders, scripts and other data.

    A wheel has the content of site-packages, and a `*.data` folder. The `*.data` folder has one folder
    per place of installation (Python packaging's binary distribution format).
    """
    if name.endswith("/"):
        return None
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    place, _, path = rest.partition("/")
    return path if place in ("purelib", "platlib") else None


def _copy(source: zipfile.ZipFile, entry: zipfile.ZipInfo, to: tarfile.TarFile, path: str) -> None:
    member = tarfile.TarInfo(path)
    member.size = entry.file_size
    member.mode = 0o755 if entry.external_attr >> 16 & 0o100 else 0o644
    with source.open(entry) as content:
        to.addfile(member, content)


def significant_lines(text: str) -> list[str]:
    """Lines that are neither comments nor blank."""
    return [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]


def prefer_cpu(requirements: Sequence[str], torch: str | None) -> list[str]:
    """Replace the pinned torch by the CPU build `torch` (such as `2.13.0+cpu`).

    `torch`: the version on this host. If `torch` is None or not a CPU build, nothing is replaced,
    because pip may not find a CPU build. Without the replacement, pip might choose a build with CUDA.
    """
    if torch is None or not _is_cpu_build(torch):
        return list(requirements)
    pin = f"torch=={torch.removesuffix('+cpu')}"
    return [f"torch=={torch}" if line == pin else line for line in requirements]


def platform_options(machine: str) -> list[str]:
    """pip's options for wheels that run in the image. They name the tags of older glibc versions, too,
    because pip does not add these tags itself."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON}"]
    return [*options, *(f"--platform={tag}" for tag in tags)]


def _cuda_packages(packages: Sequence[str]) -> list[str]:
    return sorted(name for name in packages if name.startswith(("nvidia", "cuda")))


def require_cuda(wheels: Sequence[str]) -> None:
    """Raises HostError if none of the wheels is a CUDA library."""
    if not _cuda_packages(wheels):
        raise HostError(
            "The torch that pip finds brings no CUDA libraries, but devices with a GPU need them: let "
            "pip find PyTorch's wheels with CUDA, such as those of the Python Package Index for x86_64 "
            "(pip config list shows where it looks), then run 'testbed images build --gpu' again."
        )


def refuse_cuda(packages: Sequence[str], reason: str) -> None:
    """Raises HostError if one of the packages is a CUDA library. `reason`: why pip chooses that
    build."""
    if cuda := _cuda_packages(packages):
        raise HostError(
            f"The torch that pip finds brings {len(cuda)} CUDA libraries ({cuda[0]}, ...): gigabytes "
            f"that devices without a GPU cannot use. PyTorch: {reason}. Let pip find a CPU build, for "
            f"example with PIP_EXTRA_INDEX_URL={installing.CPU_INDEX}, then run "
            "'testbed images build' again."
        )


def _installed_torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
