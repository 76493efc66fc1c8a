"""Limits for reading a topology from somebody else, such as that of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KEY = "boundary"
"""Key of the validation context whose value is the Boundary; None, or missing, without limits."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Limits of what a topology may name. They hold wherever the topology, or a sweep with it, names
    something: the reader of each value asks them."""

    root: Path
    """Folder out of which no file may be read."""
    trusted: bool
    """Whether the topology may run programs of its own, and reach other machines."""

    def inside(self, path: Path) -> Path:
        """Return `path` if it leads to a place in `root`. Raises ValueError."""
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"names {path}, a file outside of the pack: refused")
        return path

    def program(self, what: str) -> None:
        """Raise ValueError unless trusted. `what`: program, or other machine, such as `own code`."""
        if not self.trusted:
            raise ValueError(
                f"names {what}, which would run with your rights: look at {self.root}, and add --trust "
                "if you would run it as a script"
            )
