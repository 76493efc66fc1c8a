"""Which build of PyTorch pip takes: without an NVIDIA driver, one of PyTorch's own index of CPU builds.

The Python Package Index's build for Linux, x86-64 and aarch64 alike, needs gigabytes of CUDA libraries.
The CPU index has `2.13.0+cpu` for both. It satisfies `torch==2.13.0`, and pip prefers it to `2.13.0`: a
version with a local part is the newer one (PEP 440), whichever index it comes from.

The Makefile runs this file before anything is installed, so it uses the standard library alone. It
prints pip's options to stdout; to stderr, which build of PyTorch pip will take, and why.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that exist where a driver of NVIDIA's is loaded: on Linux, and in Windows' Linux."""
_ANSWER_SECONDS = 3.0
"""Time that the index has for its answer, the look-up of its name included."""
_SETTINGS = ("index-url", "extra-index-url", "no-index", "find-links")
"""pip's settings of where packages come from."""


class Choice(NamedTuple):
    """Source of PyTorch for pip."""

    options: tuple[str, ...]
    """Options of pip, to find it there."""
    reason: str
    """One line: which build that is, and why."""


def for_host(index: str = CPU_INDEX, drivers: Sequence[Path] = DRIVERS) -> Choice:
    """For this machine: CPU builds, unless it has an NVIDIA driver or does not run Linux."""
    if sys.platform != "linux":
        return Choice((), "the Python Package Index's build, which has CUDA on Linux only")
    if driver := next((path for path in drivers if path.exists()), None):
        return Choice((), f"the Python Package Index's build with CUDA: NVIDIA driver found ({driver})")
    choice = for_cpu(index)
    return choice._replace(reason=f"{choice.reason}; no NVIDIA driver found")


def for_cpu(index: str = CPU_INDEX) -> Choice:
    """CPU builds of `index`, unless the user's settings of pip say where packages come from, or the
    index does not answer in time."""
    if settings := ", ".join(_settings()):
        return Choice((), f"from where your settings of pip say ({settings}); CPU builds are at {index}")
    if (problem := _problem(index)) is None:
        return Choice(("--extra-index-url", index), f"the CPU build, as {index} answers")
    return Choice(
        (),
        "the Python Package Index's build, which on Linux brings gigabytes of CUDA: the index of CPU "
        f"builds, {index}, does not answer ({problem})",
    )


def _settings() -> list[str]:
    """The user's settings of where packages come from, as in `PIP_INDEX_URL` or `global.index-url`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    settings = (line.partition("=") for line in listed.stdout.splitlines())
    names = [name for name, _, value in settings if value not in ("", "''")]
    return [
        f"PIP_{key.upper().replace('-', '_')}" if place == ":env:" else f"{place}.{key}"
        for place, _, key in (name.rpartition(".") for name in names)
        if key in _SETTINGS
    ]


def _problem(index: str) -> str | None:
    """Why `index` gives no list of PyTorch's builds in time; None if it does."""
    problems: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=_ANSWER_SECONDS):  # noqa: S310  (our own)
                problems.append(None)
        except (OSError, http.client.HTTPException) as error:
            problems.append(str(getattr(error, "reason", error)))

    # A timeout of urlopen covers neither the look-up of a name nor an answer that comes byte by byte.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return problems[0] if problems else f"nothing within {_ANSWER_SECONDS:g} s"


if __name__ == "__main__":
    choice = for_host()
    print("PyTorch:", choice.reason, file=sys.stderr)  # noqa: T201
    print(*choice.options)  # noqa: T201
