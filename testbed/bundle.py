"""Location of the parts of the testbed: the packages `agents` and `analysis`, images/, topologies/.

In a checkout, these parts are in the same folder as the package `testbed`. In a wheel, they are in
`testbed/_bundled/`, because other projects install a top-level package `agents`, too. In both cases
`import testbed` ensures that `import agents` and `import analysis` find the testbed's own packages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_BUNDLED = _HERE / "_bundled"
ROOT = _BUNDLED if _BUNDLED.is_dir() else _HERE.parent
AGENTS = ROOT / "agents"
IMAGES = ROOT / "images"
TOPOLOGIES = ROOT / "topologies"
NOTEBOOKS = ROOT / "analysis" / "notebooks"
COMMIT = ROOT / "COMMIT"
"""The file is missing in a checkout, and in a wheel whose commit was not known."""

_PACKAGES = ("agents", "analysis")


class _Finder:
    """Finds the testbed's packages in `ROOT` even if other packages have the same names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in _PACKAGES else None


def make_importable() -> None:
    """Make `import agents` and `import analysis` find the testbed's packages from now on.

    Raises ImportError if this process has already imported another package `agents` or `analysis`.
    """
    for name in _PACKAGES:
        loaded = sys.modules.get(name)
        places = [*getattr(loaded, "__path__", ()), str(getattr(loaded, "__file__", None) or "")]
        if loaded is not None and not any(_same(place, ROOT / name) for place in places):
            where = next(filter(None, reversed(places)), "unknown place")
            raise ImportError(
                f"testbed needs its own package {name!r}, but this process has already imported another "
                f"one ({where}): a process can have only one of them. Import testbed first, in a "
                "process that does not need the other"
            )
    sys.meta_path.insert(0, _Finder())


def release() -> None:
    """Let `import agents` and `import analysis` find other packages again. For processes that import
    foreign code and need neither package of the testbed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def is_taken(module: str) -> bool:
    """Whether a user's module may not have this name, because this host has another one of it."""
    if module in sys.stdlib_module_names or module in (*_PACKAGES, "testbed"):
        return True
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return PathFinder.find_spec(module, places) is not None


def _same(place: str, folder: Path) -> bool:
    return bool(place) and Path(place).resolve() == folder.resolve()
