"""Look-up of run directories by a run's id, by a path, or by the beginning of an id or path."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from testbed.errors import BadInputError

MANIFEST = "manifest.json"
"""A folder without this file is no run directory."""


def runs_in(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))}


def folder_of_runs(name: str, runs: Path) -> Path | None:
    """`name` is a path, or the name of a folder in `runs`, such as a sweep's."""
    return next((path for path in (Path(name), runs / name) if _holds_runs(path)), None)


def folders_of_runs(runs: Path) -> list[Path]:
    return [path for path in sorted(runs.glob("*/")) if _holds_runs(path)]


def _holds_runs(path: Path) -> bool:
    return path.is_dir() and not (path / MANIFEST).exists() and any(path.glob(f"*/{MANIFEST}"))


def find_exact(run: str, runs: Path) -> Path | None:
    """`run`: a run id in `runs` or a path. Return None if the directory does not exist or this user may
    not read it."""
    paths = (runs / run, Path(run))
    # Path.is_file would raise PermissionError.
    return next((path for path in paths if os.path.isfile(path / MANIFEST)), None)  # noqa: PTH113


def complete_id(
    run: str, known: Collection[str], preferred: Callable[[str], bool] = lambda _: False
) -> str | None:
    """Return the id that equals `run` or begins with it.

    If several ids begin with `run`, exactly one of these ids must be `preferred`, and is returned.
    Raises BadInputError if not exactly one is preferred.
    """
    if run in known:
        return run
    found = sorted(one for one in known if run and one.startswith(run))
    if len(found) > 1:
        if len(chosen := list(filter(preferred, found))) == 1:
            return chosen[0]
        listed = "".join(f"\n  {one}" for one in found)
        raise BadInputError(f"{run} is the beginning of {len(found)} runs: give more of the id:{listed}")
    return found[0] if found else None


def similar_id(run: str, known: Collection[str]) -> str | None:
    """Compare beginnings. Return the newest id if several have the same; None if none is similar."""
    if not run:
        return None
    beginnings = {one[: len(run)]: one for one in sorted(known)}
    close = difflib.get_close_matches(run, beginnings, n=1)
    return beginnings[close[0]] if close else None


def find_directory(
    run: str, runs: Path, preferred: Callable[[Path], bool] = lambda _: False
) -> Path | None:
    """`run`: an id in `runs`, a path, or the beginning of an id or path.

    If several directories match, exactly one of these directories must be `preferred`, and is returned.
    Raises BadInputError if not exactly one is preferred.
    """
    if (path := find_exact(run, runs)) is not None or not Path(run).name:
        return path
    return next(
        filter(None, (_find_by_beginning(place, preferred) for place in (runs / run, Path(run)))), None
    )


def _find_by_beginning(place: Path, preferred: Callable[[Path], bool]) -> Path | None:
    known = runs_in(place.parent)
    return known.get(complete_id(place.name, known, lambda one: preferred(known[one])) or "")
