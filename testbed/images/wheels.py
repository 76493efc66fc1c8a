"""The agents' Python libraries: wheels downloaded with the user's own pip configuration, then unpacked.

They are for Python 3.11 on glibc and the engine's architecture, whatever this host runs. They are
unpacked on the host, while the base image is built, so that neither pip nor a wheel enters a layer.
"""

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

from testbed.errors import BadInputError, HostError
from testbed.host import cache
from testbed.host.subprocesses import StoppedError, run
from testbed.images import torch_index

_PYTHON = "3.11"
_PIP = (sys.executable, "-m", "pip", "--quiet")
_GLIBC = 36
"""Minor version of bookworm's glibc 2.x."""


def fetch(
    requirements: Path,
    machine: str,
    scratch: Path,
    stop: threading.Event,
    *,
    cuda: bool = False,
    again: bool = False,
) -> Path:
    """The folder with the wheels for `requirements` on `machine` (as in `x86_64`), downloaded once, or
    `again`.

    Raises HostError where pip fails, or where torch would bring CUDA libraries; with `cuda`, where it
    brings none.
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
        index = torch_index.for_cpu()
        if not any(line.endswith("+cpu") for line in wanted):
            refuse_cuda(_resolve([*index.options, *options, *wanted], scratch, stop), index.reason)
        try:
            run([*command, *index.options], temporary=scratch, stop=stop)
        except HostError as error:
            raise HostError(f"{error}\nPyTorch: {index.reason}") from error
    if folder.is_dir():
        shutil.rmtree(folder)
    partial.rename(folder)  # in one step: an interrupted download leaves no folder that looks whole
    return folder


def fetch_more(
    requirements: Sequence[str], ours: Path, machine: str, scratch: Path, stop: threading.Event
) -> Path:
    """The folder with the wheels for a user's `requirements`, downloaded once, without those that are in
    the folder `ours`: of these no other version is taken.

    Raises BadInputError, with pip's last lines, where there are none.
    """
    there = {wheel.name for wheel in ours.glob("*.whl")}
    versions = ["==".join(name.split("-")[:2]) for name in sorted(there)]
    options = platform_options(machine)
    digest = hashlib.sha256("\n".join([*options, *requirements, *versions]).encode()).hexdigest()[:12]
    folder = cache.folder() / f"wheels-{digest}"
    if folder.is_dir():
        return folder
    constraints = scratch / "constraints.txt"
    constraints.write_text("\n".join(versions), encoding="utf-8")
    partial = Path(tempfile.mkdtemp(dir=scratch))
    where = [f"--dest={partial}", f"--find-links={ours}", f"--constraint={constraints}"]
    try:
        command = [*_PIP, "download", *where, *options, "--", *requirements]
        run(command, temporary=scratch, stop=stop)
    except HostError as error:
        raise BadInputError(f"requirements cannot be installed in the agents' image: {error}") from error
    for wheel in partial.glob("*.whl"):
        if wheel.name in there:
            wheel.unlink()
    partial.rename(folder)
    return folder


def _resolve(arguments: Sequence[str], scratch: Path, stop: threading.Event) -> list[str]:
    """The names of all packages that pip would download: some would be gigabytes."""
    report = scratch / "report.json"
    options = ["--dry-run", "--ignore-installed", f"--report={report}", f"--target={scratch / 'none'}"]
    run([*_PIP, "install", *options, *arguments], temporary=scratch, stop=stop)
    packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [package["metadata"]["name"] for package in packages]


def unpack(wheels: Path, trim: Path, archive: tarfile.TarFile, stop: threading.Event) -> None:
    """Add the content of `wheels` to `archive` as `site/`, except what the globs in `trim` match."""
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
    """Path of a wheel's member under site-packages; None for folders, scripts and other data.

    A wheel is the content of site-packages, except for its `*.data` folder, which has a folder for each
    place of installation (Python packaging's binary distribution format).
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
    """The lines of `text` without comments and blank lines."""
    return [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]


def prefer_cpu(requirements: Sequence[str], torch: str | None) -> list[str]:
    """`requirements` with the pinned torch as the CPU build `torch` (`2.13.0+cpu`), where this host has
    it: then pip can find it, and for the bare pin it might choose a build with CUDA."""
    if torch is None or not torch.endswith("+cpu"):
        return list(requirements)
    pin = f"torch=={torch.removesuffix('+cpu')}"
    return [f"torch=={torch}" if line == pin else line for line in requirements]


def platform_options(machine: str) -> list[str]:
    """pip's options for wheels that run in the image. pip does not derive tags of older glibc itself."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON}"]
    return [*options, *(f"--platform={tag}" for tag in tags)]


def _of_cuda(packages: Sequence[str]) -> list[str]:
    """Those of the packages, or of their wheels, that are CUDA libraries."""
    return sorted(name for name in packages if name.startswith(("nvidia", "cuda")))


def require_cuda(wheels: Sequence[str]) -> None:
    """Raise HostError where none of the wheels is a CUDA library."""
    if not _of_cuda(wheels):
        raise HostError(
            "The torch that pip finds brings no CUDA libraries, and devices with a GPU need them: let "
            "pip find PyTorch's wheels with CUDA, as the Python Package Index has them for x86_64 (pip "
            "config list shows where it looks), then run 'testbed images build --gpu' again."
        )


def refuse_cuda(packages: Sequence[str], reason: str) -> None:
    """Raise HostError where one of the package names is a CUDA library. `reason`: why pip takes that
    build of PyTorch."""
    if cuda := _of_cuda(packages):
        raise HostError(
            f"The torch that pip finds brings {len(cuda)} CUDA libraries ({cuda[0]}, ...): gigabytes "
            f"that devices without a GPU cannot use. PyTorch: {reason}. Have pip find a CPU build, as "
            f"by PIP_EXTRA_INDEX_URL={torch_index.CPU_INDEX}, then run 'testbed images build' again."
        )


def _installed_torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
