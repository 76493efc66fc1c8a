"""Which run directory a user means: by a run's id, by its path, or by the beginning of either."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from testbed.errors import BadInputError

MANIFEST = "manifest.json"
"""The file that makes a folder a run directory."""


def runs_in(folder: Path) -> dict[str, Path]:
    """The run directories in `folder`, by the ids of their runs."""
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))}


def folder_of_runs(name: str, runs: Path) -> Path | None:
    """The folder of runs, such as a sweep's, that `name` is: a path, or a folder in `runs`."""
    return next((path for path in (Path(name), runs / name) if _holds_runs(path)), None)


def folders_of_runs(runs: Path) -> list[Path]:
    """The folders of runs in `runs`."""
    return [path for path in sorted(runs.glob("*/")) if _holds_runs(path)]


def _holds_runs(path: Path) -> bool:
    return path.is_dir() and not (path / MANIFEST).exists() and any(path.glob(f"*/{MANIFEST}"))


def exactly(run: str, runs: Path) -> Path | None:
    """The directory of `run`, which is a run id in `runs` or a path; one that this user may not look at
    counts as none."""
    paths = (runs / run, Path(run))
    # Path.is_file would raise PermissionError.
    return next((path for path in paths if os.path.isfile(path / MANIFEST)), None)  # noqa: PTH113


def whole_id(
    run: str, known: Collection[str], preferred: Callable[[str], bool] = lambda _: False
) -> str | None:
    """The one of the ids in `known` that `run` is, or begins; None where there is none. Raises
    BadInputError where it begins several, unless one alone of them is `preferred`."""
    if run in known:
        return run
    found = sorted(one for one in known if run and one.startswith(run))
    if len(found) > 1:
        if len(chosen := list(filter(preferred, found))) == 1:
            return chosen[0]
        listed = "".join(f"\n  {one}" for one in found)
        raise BadInputError(f"{run} is the beginning of {len(found)} runs; give more of it:{listed}")
    return found[0] if found else None


def found(run: str, runs: Path, preferred: Callable[[Path], bool] = lambda _: False) -> Path | None:
    """The directory of `run`: an id in `runs`, a path, or the beginning of one where it begins no other,
    or no other that is `preferred`. None where there is none. Raises BadInputError where it begins
    several."""
    if (path := exactly(run, runs)) is not None or not Path(run).name:
        return path
    return next(filter(None, (_beginning(place, preferred) for place in (runs / run, Path(run)))), None)


def _beginning(place: Path, preferred: Callable[[Path], bool]) -> Path | None:
    known = runs_in(place.parent)
    return known.get(whole_id(place.name, known, lambda one: preferred(known[one])) or "")
