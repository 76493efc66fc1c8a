"""The modules of a user's own tasks and rules, as files: the controller does not import them."""

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
class Code:
    """A user's modules, as they were when they were read."""

    path: Path = field(compare=False)
    """Of what was named: a module, a package, or a folder of modules and packages."""
    digest: str
    files: Mapping[str, bytes] = field(compare=False, repr=False)
    """Their contents, by path in the folder that modules are imported from."""

    @classmethod
    def read(cls, path: Path) -> Code:
        """Raises ValueError that says what is wrong with `path`."""
        files: dict[str, bytes] = {}
        size = 0
        for name, file in _files(path):
            size += file.stat().st_size
            if size > _MAX_BYTES or len(files) >= _MAX_FILES:
                raise ValueError(
                    f"holds more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB, and is copied into "
                    "each run: name a module, or a folder with the code alone"
                )
            files[name] = file.read_bytes()
        for module in {Path(name).parts[0].removesuffix(".py") for name in files if name[-3:] == ".py"}:
            if is_taken(module):
                raise ValueError(
                    f"has a module {module}, and so has Python here: which of the two would be imported "
                    "is not certain, so rename yours"
                )
        if not any(name.endswith(".py") for name in files):
            raise ValueError("has no Python module, expected a .py file, or a folder with some")
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(path, digest.hexdigest()[:12], files)

    def copy(self, folder: Path) -> None:
        """Make `folder` one to import the modules from, which all may read."""
        for name, content in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Path in the folder of modules, and here, of each file of the code; raises ValueError."""
    if path.is_file():
        if path.suffix != ".py":
            raise ValueError("is no Python module, expected a .py file, or a folder with some")
        yield path.name, path
        return
    if not path.is_dir():
        raise ValueError(f"there is no {path}; give the path of a .py file or folder, from this file's")
    root = root_of(path)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and name[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.suffix != ".pyc" and file.is_file():
                yield str(file.relative_to(root)), file


def root_of(path: Path) -> Path:
    """The folder from which the modules at `path` would be imported."""
    return path if path.is_dir() and not (path / "__init__.py").is_file() else path.parent


def is_taken(module: str) -> bool:
    """Whether there is another module of that name on this host."""
    if module in _TAKEN:
        return True
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return importlib.machinery.PathFinder.find_spec(module, places) is not None
