"""The features that add to the analysis, a row each, and what they add together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from analysis import energy, privacy, segments, selection
from analysis.part import AnalysisPart, Facts, ProgressFigure

if TYPE_CHECKING:
    from analysis.load import Run

PARTS: tuple[AnalysisPart, ...] = (energy.PART, segments.PART, selection.PART, privacy.PART)


class FeatureTables(energy.EnergyTables, segments.SegmentTables, selection.SelectionTables):
    """Attributes of `load.Run`, as far as they are tables of features."""

    __slots__ = ()


RECORDS = tuple(one for part in PARTS for one in part.records)
STREAMS = tuple(one for part in PARTS for one in part.streams)
NEEDS: Mapping[str, Callable[[Facts], bool]] = {
    name: holds for part in PARTS for name, holds in part.needs.items()
}
STATE_NEEDS: Mapping[str, str] = {
    state: needed for part in PARTS for state, needed in part.states.items()
}
SUMMARY = tuple(column for part in PARTS for column in part.summary)
PROGRESS = tuple(one for part in PARTS for one in part.progress)
COSTS: Mapping[str, ProgressFigure] = {one.name: one for one in PROGRESS if one.words is not None}


def facts(run: Run) -> dict[str, str]:
    """Facts about a whole run for people (`AnalysisPart.facts`)."""
    return {name: text for part in PARTS for name, text in part.facts(run).items()}


def parts_of_run(manifest: Facts) -> Collection[str]:
    """Return which of `NEEDS` a run has."""
    alike = {id(facts): facts for facts in manifest.get("devices", {}).values()}  # most share theirs
    return [name for name, holds in NEEDS.items() if any(map(holds, alike.values()))]
