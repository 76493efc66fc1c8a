"""Where all that belongs to the package `testbed` lies: `agents`, `analysis`, images/, topologies/.

In a checkout they are beside it. A wheel has them below `testbed/_bundled/`, where they take no name
from anyone: other projects own a top-level package `agents`, too. `import testbed` makes ours the ones
that `import agents` and `import analysis` find, from either place.
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
"""The commit that a wheel was built from, where that was known."""

_PACKAGES = ("agents", "analysis")


class _Finder:
    """Finds our packages at their place, whatever else of that name there is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in _PACKAGES else None


def make_importable() -> None:
    """Have `import agents` and `import analysis` find our packages from now on.

    Raises ImportError where this process has imported another package of such a name already.
    """
    for name in _PACKAGES:
        loaded = sys.modules.get(name)
        places = [*getattr(loaded, "__path__", ()), str(getattr(loaded, "__file__", None) or "")]
        if loaded is not None and not any(_same(place, ROOT / name) for place in places):
            where = next(filter(None, reversed(places)), "unknown place")
            raise ImportError(
                f"testbed has a package {name!r}, and this process has imported another one of that "
                f"name ({where}): only one of them can be had in a process. Import testbed first, in a "
                "process that does not need the other"
            )
    sys.meta_path.insert(0, _Finder())


def _same(place: str, folder: Path) -> bool:
    return bool(place) and Path(place).resolve() == folder.resolve()
