"""Files with a client's memory, which outlive its process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.client.uploads import Memory
from agents.disk import files
from agents.wire import payloads

_FIELDS = ("applied", "sent")
_WAITING = "waiting"
"""And the number of a dispatch."""


def save(memory: Memory, path: Path) -> None:
    """Write `memory` to the disk; a crash leaves the old file or the new one."""
    known = {name: getattr(memory, name) for name in _FIELDS if getattr(memory, name) is not None}
    known |= {f"{_WAITING} {number}": (number, sent) for number, sent in memory.waiting.items()}
    metadata = {name: str(sequence) for name, (sequence, _) in known.items()}
    vectors = np.concatenate([vector for _, vector in known.values()], dtype="<f4")
    files.save(path, files.sealed(payloads.pack(vectors, metadata)), secret=True)


def load(path: Path) -> Memory:
    """Return the memory that `save` wrote, or an empty one if there is no file. Raises OSError, and
    ValueError if the file is damaged."""
    if not path.exists():
        return Memory()
    with files.open_regular(path) as file:
        vectors, metadata, _ = payloads.unpack(bytes(files.unsealed(file.read())))
    parts = np.split(vectors, len(metadata))
    known = {name: (int(metadata[name]), part) for name, part in zip(metadata, parts, strict=True)}
    waiting = dict(known.pop(name) for name in metadata if name.startswith(_WAITING))
    return Memory(**known, waiting=waiting)


def count(path: Path) -> int:
    """Return how often `count_one_more` was called for `path`."""
    return path.stat().st_size if path.is_file() else 0


def count_one_more(path: Path) -> None:
    """Count by a file's length, which is whole whenever the process is killed."""
    with path.open("ab") as file:
        file.write(b"\n")
