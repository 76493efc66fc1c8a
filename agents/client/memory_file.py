"""Data that a client keeps when its process is restarted: vectors, and a count."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.disk import files
from agents.rules.client_half import SavedVectors
from agents.wire import payloads


def save(memory: SavedVectors, path: Path) -> None:
    """`memory` must not be empty. A crash leaves the old file or the new one, whole."""
    sizes = [vector.size for _, vector in memory.values()]
    metadata = {name: str(number) for name, (number, _) in memory.items()}
    if len(set(sizes)) > 1:  # vectors of equal length are saved without their size
        metadata = {
            name: f"{number} {size}"
            for (name, number), size in zip(metadata.items(), sizes, strict=True)
        }
    vectors = np.concatenate([vector for _, vector in memory.values()], dtype="<f4")
    files.save(path, files.with_checksum(payloads.pack(vectors, metadata)), secret=True)


def load(path: Path) -> SavedVectors:
    """Empty if there is no file. Raises OSError, and ValueError if the file is damaged."""
    if not path.exists():
        return {}
    with files.open_regular(path) as file:
        vectors, metadata, _ = payloads.unpack(bytes(files.without_checksum(file.read())))
    texts = [text.split() for text in metadata.values()]
    lengths = [int(size) for _, *sizes in texts for size in sizes]
    parts = np.split(vectors, np.cumsum(lengths)[:-1] if lengths else len(metadata))
    return {name: (int(text[0]), part) for name, text, part in zip(metadata, texts, parts, strict=True)}


def count(path: Path) -> int:
    """Calls of `count_one_more`."""
    return path.stat().st_size if path.is_file() else 0


def count_one_more(path: Path) -> None:
    """One byte is appended, so the count is correct even if the process is killed at any moment."""
    with path.open("ab") as file:
        file.write(b"\n")
