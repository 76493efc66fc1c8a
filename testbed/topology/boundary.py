"""Limits for reading a topology from somebody else, such as that of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KEY = "boundary"
"""Key of the validation context. Without limits the value is None, or missing."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Files and programs that a topology, or a sweep with it, may name. The reader of each value
    asks."""

    root: Path
    """No file outside of it may be read."""
    trusted: bool
    """Whether the topology may run programs of its own, and reach other machines."""

    def inside(self, path: Path) -> Path:
        """Raises ValueError."""
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"names {path}, a file outside of the pack: refused")
        return path

    def program(self, what: str) -> None:
        """Raises ValueError unless trusted. `what`: program, or other machine, such as `own code`."""
        if not self.trusted:
            raise ValueError(
                f"names {what}, which would run with your rights: look at {self.root}, and add --trust "
                "if you would run it as a script"
            )
