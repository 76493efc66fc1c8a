"""Other versions of Python on this host, each in a clone that `make` has set up; without an engine."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.host import cache
from tests.platforms import facts
from tests.platforms.local import ENVIRONMENT, LocalMachine, set_up

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
    """This host with a clone of the project that `make` has set up with `executable`, and no engine.

    The clone is removed afterwards. Raises RuntimeError if it cannot be set up.
    """
    with clone(str(executable)) as made:
        machine = LocalMachine(
            environment={"DOCKER_HOST": f"unix://{made}/no-engine.sock"},
            python=made / ENVIRONMENT / "bin" / "python",
            clone=made,
        )
        machine.facts = facts.of(machine)
        yield machine


@contextmanager
def clone(executable: str, prefix: Sequence[str] = ()) -> Iterator[Path]:
    """A clone of the project's last commit that is set up with the Python `executable` (`local.set_up`).

    It is removed afterwards. Raises RuntimeError if it cannot be set up.
    """
    folder = cache.folder() / "platforms"
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < _BYTES:
        raise RuntimeError(
            f"only {free / 2**30:.1f} GiB of disk are free, {_BYTES / 2**30:.0f} are needed"
        )
    with tempfile.TemporaryDirectory(prefix="clone-", dir=folder) as temporary:
        made = Path(temporary) / "testbed"
        begin = time.monotonic()
        set_up(executable, made, prefix)
        print(f"set up with {executable} in {time.monotonic() - begin:.0f} s", flush=True)
        yield made


def _number(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))
