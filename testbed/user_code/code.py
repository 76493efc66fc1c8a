"""The modules of a user's own tasks and rules, as files. The controller does not import them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MAX_BYTES = 16 * 2**20
_MAX_FILES = 1000
_TAKEN = sys.stdlib_module_names | {"agents", "analysis", "testbed"}


@dataclass(frozen=True)
class UserCode:
    """A user's modules when they were read."""

    path: Path = field(compare=False)
    """The user gave it: a module, a package, or a folder of modules and packages."""
    digest: str
    """First 12 hexadecimal digits of the SHA-256 of the files."""
    files: Mapping[str, bytes] = field(compare=False, repr=False)
    """By path relative to the import folder (`import_folder`)."""

    @classmethod
    def read(cls, path: Path) -> UserCode:
        """Raises ValueError with a message that says what is wrong with the code."""
        files: dict[str, bytes] = {}
        size = 0
        for name, file in _files(path):
            size += file.stat().st_size
            if size > _MAX_BYTES or len(files) >= _MAX_FILES:
                raise ValueError(
                    f"has more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB, but is copied into "
                    "each run: name a module, or a folder with only the code"
                )
            files[name] = file.read_bytes()
        for module in {Path(name).parts[0].removesuffix(".py") for name in files if name[-3:] == ".py"}:
            if is_taken(module):
                raise ValueError(
                    f"has a module {module}, a name that Python already uses on this host: rename "
                    "yours, or the wrong one may be imported"
                )
        if not any(name.endswith(".py") for name in files):
            raise ValueError("has no Python module, expected a .py file, or a folder with .py files")
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(path, digest.hexdigest()[:12], files)

    def copy(self, folder: Path) -> None:
        """The modules can be imported from `folder`. All users may read the files."""
        for name, content in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path relative to the import folder, and the path on this host. Raises ValueError."""
    if path.is_file():
        if path.suffix != ".py":
            raise ValueError("is not a Python module, expected a .py file, or a folder with .py files")
        yield path.name, path
        return
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a .py file or folder, relative to this file")
    root = import_folder(path)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and name[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.suffix != ".pyc" and file.is_file():
                yield str(file.relative_to(root)), file


def import_folder(path: Path) -> Path:
    """Folder that Python must search to import the modules at `path`."""
    return path if path.is_dir() and not (path / "__init__.py").is_file() else path.parent


def is_taken(module: str) -> bool:
    """Whether this host has another module of this name."""
    if module in _TAKEN:
        return True
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return importlib.machinery.PathFinder.find_spec(module, places) is not None
