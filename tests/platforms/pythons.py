"""Other versions of Python on this host, each with a virtual environment of its own and no engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.host import cache
from tests.platforms import facts
from tests.platforms.local import CHECKOUT, LocalMachine

_OLDEST = (3, 11)
_BYTES = 8 * 2**30
"""Free space that an environment may need: without an index of CPU wheels pip takes torch with CUDA."""


def found() -> dict[str, Path]:
    """Pythons of this host by version, such as 3.13, but for the one that runs this.

    Looks at PATH and at what pyenv has installed.
    """
    folders = [Path(folder) for folder in os.environ["PATH"].split(":")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(pyenv.glob("versions/*/bin"))
    pythons = {
        match[1]: file
        for folder in [*reversed(folders), *installed]
        if "shims" not in folder.parts
        for file in sorted(folder.glob("python3.*"))
        if (match := re.fullmatch(r"python(3\.\d+)", file.name))
    }
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {name: file for name, file in pythons.items() if name != own and _number(name) >= _OLDEST}


@contextmanager
def python(executable: Path) -> Iterator[LocalMachine]:
    """This host with an environment of `executable` into which pip has installed the project.

    The environment is removed afterwards. Raises RuntimeError if it cannot be made.
    """
    folder = cache.folder() / "platforms"
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < _BYTES:
        raise RuntimeError(
            f"only {free / 2**30:.1f} GiB of disk are free, {_BYTES / 2**30:.0f} are needed"
        )
    with tempfile.TemporaryDirectory(prefix="python-", dir=folder) as temporary:
        environment = Path(temporary) / "venv"
        _run(str(executable), "-m", "venv", str(environment))
        inside = environment / "bin" / "python"
        install = ("-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir")
        _run(str(inside), *install, str(CHECKOUT))
        machine = LocalMachine(
            environment={"DOCKER_HOST": f"unix://{temporary}/no-engine.sock"}, python=inside
        )
        machine.facts = facts.of(machine)
        yield machine


def _number(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise RuntimeError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{last}")
