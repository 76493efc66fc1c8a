"""The user's settings of pip, from all of pip's configuration files and from PIP_* variables."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import NamedTuple


class PipSetting(NamedTuple):
    """A setting that is not empty."""

    place: str
    """Section of a configuration file, such as `global` or `install`, or `:env:`."""
    key: str
    """Name of pip's option, such as `index-url`."""
    value: str

    @property
    def name(self) -> str:
        """Name as the user wrote it, such as `PIP_INDEX_URL` or `global.index-url`."""
        if self.place == ":env:":
            return f"PIP_{self.key.upper().replace('-', '_')}"
        return f"{self.place}.{self.key}"


def read() -> list[PipSetting]:
    """Sorted: the order of pip's list depends on its version."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    found = []
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        place, _, key = name.rpartition(".")
        if text := str(ast.literal_eval(value)):
            found.append(PipSetting(place, key, text))
    return sorted(found)


def effective() -> dict[str, PipSetting]:
    """Return key -> setting for `pip install`: its section overrides `global`, a variable overrides
    both."""
    order = ("global", "install", ":env:")
    settings = (one for place in order for one in read() if one.place == place)
    return {one.key: one for one in settings}
