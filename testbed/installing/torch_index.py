"""Choice of the PyTorch build that pip installs: a CPU build if there is no NVIDIA driver.

The Python Package Index's build for Linux (x86-64 and aarch64) needs gigabytes of CUDA libraries.
PyTorch's own index of CPU builds has `2.13.0+cpu` for both architectures. This version satisfies
`torch==2.13.0`. pip prefers it to `2.13.0` from any index, because a version with a local part counts as
newer (PEP 440).
"""

from __future__ import annotations

import http.client
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testbed.installing import pip_settings

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that exist if an NVIDIA driver is loaded, on Linux or on the Windows Subsystem for Linux."""
_ANSWER_SECONDS = 3.0
"""Limit for the index's answer, including the look-up of its host name."""
_SETTINGS = ("index-url", "extra-index-url", "no-index", "find-links")
"""pip's settings for the sources of packages."""


class TorchSource(NamedTuple):
    options: tuple[str, ...]
    """pip options; empty if pip's own settings decide."""
    reason: str
    """One line that says which build pip will install, and why."""


def source_for_host(index: str = CPU_INDEX, drivers: Sequence[Path] = DRIVERS) -> TorchSource:
    """CPU builds, unless this machine has an NVIDIA driver or does not run Linux."""
    if sys.platform != "linux":
        return TorchSource((), "the Python Package Index's build, which has CUDA on Linux only")
    if driver := next((path for path in drivers if path.exists()), None):
        return TorchSource(
            (), f"the Python Package Index's build with CUDA: NVIDIA driver found ({driver})"
        )
    choice = cpu_source(index)
    return choice._replace(reason=f"{choice.reason}; no NVIDIA driver found")


def cpu_source(index: str = CPU_INDEX) -> TorchSource:
    """If pip's own settings name a source of packages, or if the index does not answer in time, pip's
    own settings decide."""
    if settings := ", ".join(one.name for one in pip_settings.read() if one.key in _SETTINGS):
        return TorchSource((), f"from the source in your pip settings ({settings}); CPU builds: {index}")
    if (problem := _problem(index)) is None:
        return TorchSource(("--extra-index-url", index), f"the CPU build, as {index} answers")
    return TorchSource(
        (),
        "the Python Package Index's build, which on Linux brings gigabytes of CUDA: the index of CPU "
        f"builds, {index}, does not answer ({problem})",
    )


def _problem(index: str) -> str | None:
    """None if `index` lists PyTorch's builds in time."""
    problems: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=_ANSWER_SECONDS):  # noqa: S310  (our own)
                problems.append(None)
        except urllib.error.HTTPError as error:  # it has the answer, which is closed with it
            with error:
                problems.append(str(error.reason))
        except (OSError, http.client.HTTPException) as error:
            problems.append(str(getattr(error, "reason", error)))

    # urlopen's timeout covers neither the look-up of the name nor an answer that arrives byte by byte.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return problems[0] if problems else f"nothing within {_ANSWER_SECONDS:g} s"
