"""Packages that are compiled for one version and one build of PyTorch, such as torchvision.

A user's requirements must accept the PyTorch of the images, and the packages that pip finds must be for
the same build: a torchvision that is linked to CUDA cannot be imported beside a CPU build of PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testbed.images.tags import FOLDER
from testbed.installing import torch_index

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


def refusal(requirement: Requirement) -> str | None:
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


def install_command(*requirements: str, again: bool = False) -> str:
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
        words += ["--extra-index-url", torch_index.CPU_INDEX]
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


def _installed_torch() -> str:
    return importlib.metadata.version("torch")


def _is_cpu_build(version: str) -> bool:
    return version.endswith("+cpu")


def _is_linked_to_cuda(library: bytes) -> bool:
    return any(name in library for name in _CUDA_LIBRARIES)
