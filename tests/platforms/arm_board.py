"""File system of an arm64 machine with the agents' packages, for a real device whose programs run on
this host's kernel by QEMU's user emulation.

Debian's packages are only unpacked, and wheels are installed by this host's pip, so that it is made in
minutes. It is kept in the user's cache. As root.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import HostError
from testbed.host import cache
from tests.platforms import pythons
from tests.platforms.guest_image import programs_of

PYTHON = "/usr/bin/python3"
_SUITE, _VERSION = "bookworm", "3.11"
_PACKAGES = ("bash", "dash", "coreutils", "iproute2", "libstdc++6", "python3")
_WHEELS = (
    *("cffi", "cryptography", "msgspec", "numpy", "paho-mqtt", "pycparser", "safetensors", "xxhash"),
    *("torch==2.10.0", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"),
    "typing-extensions",
)
"""Packages of the agents and of PyTorch, all by name: pip would take those that this host's processor
needs. Later builds of PyTorch for aarch64 on PyPI need CUDA."""
_GLIBC = 36
"""Minor version of bookworm's glibc 2.x."""
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
}


@contextmanager
def arm_board() -> Iterator[Path]:
    """Root folder of the machine; while the context lasts, this host runs its programs. Raises HostError
    if it cannot be made."""
    digest = hashlib.sha256(json.dumps([_SUITE, _PACKAGES, _WHEELS, _FILES]).encode()).hexdigest()[:12]
    root = cache.folder() / "guests" / f"arm-board-{digest}"
    if not root.exists():
        _make(root)
    shutil.rmtree(root / "root", ignore_errors=True)
    (root / "root").mkdir(mode=0o700)
    with programs_of("arm64"):
        yield root


def _make(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = root.with_suffix(".new")
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
    unpack = ["mmdebstrap", "--variant=extract", "--architectures=arm64"]
    _run([*unpack, f"--include={','.join(_PACKAGES)}", _SUITE, str(scratch)])
    packages = scratch / f"usr/local/lib/python{_VERSION}/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(_GLIBC, 16, -1)]
    where = ["--only-binary=:all:", f"--python-version={_VERSION}", f"--target={packages}", *platforms]
    _run([*pip, *where, "--platform=manylinux2014_aarch64", *_WHEELS])
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    native = sys.executable if own == _VERSION else pythons.found().get(_VERSION)
    if native is not None:  # else the machine compiles the modules that it imports, slowly
        folders = [str(packages), str(scratch / f"usr/lib/python{_VERSION}")]
        compiling = [str(native), "-m", "compileall", "-qq", "-s", str(scratch), "-p", "/", *folders]
        subprocess.run(compiling, check=False)  # some modules are not of this version
    for name, text in _FILES.items():
        (scratch / name).write_text(text, encoding="utf-8")
    scratch.rename(root)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-3000:]}")
