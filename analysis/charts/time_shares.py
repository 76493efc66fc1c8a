"""Spans that are too short to see, as shares of time.

A lane with many spans per pixel would be a mush of colours. So it is divided into bins of time. Each bin
has a bar per kind of span, stacked on each other, as high as the share of the bin's time that these
spans cover. The space above is the time without spans.

`paper` uses this module. For `screen`, `time_shares.js` does the same in JavaScript, because the
visitor's zoom decides which spans are too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2

import numpy as np
import numpy.typing as npt

from analysis.charts.chart import Column, arrays

MIN_WIDTH = 2.0
"""Pixels from which a span is visible."""
MIN_VISIBLE_SHARE = 0.2
"""A lane is drawn as spans if at least this share of them is visible."""
MAX_SPANS = 10
"""A lane is drawn as spans if it has at most this many."""
MIN_BIN_WIDTH = 4.0
"""Pixels. The duration of a bin is a power of two, in seconds, so that bins stay the same while a run
becomes longer."""

_USUAL_WIDTH = 1000.0
"""Pixels of a plot with lanes."""


def crowded(spans: Mapping[str, Column], seconds_per_pixel: float) -> npt.NDArray[np.bool_]:
    """For each span, whether its lane is drawn as shares of time: few of its spans are visible, and
    there is at least one per bin on average. `spans`: columns of a layer with the mark `spans`."""
    begin, end = spans["begin"], spans["end"]
    lanes, lane = np.unique(spans["y"], return_inverse=True)
    visible = np.bincount(lane, end - begin >= MIN_WIDTH * seconds_per_pixel, len(lanes))
    count = np.bincount(lane, minlength=len(lanes))
    first, last = np.full(len(lanes), np.inf), np.full(len(lanes), -np.inf)
    np.minimum.at(first, lane, begin)
    np.maximum.at(last, lane, end)
    dense = count * MIN_BIN_WIDTH * seconds_per_pixel > last - first
    found = dense & (count > MAX_SPANS) & (visible < MIN_VISIBLE_SHARE * count)
    return np.asarray(found[lane], bool)


def bin_seconds(seconds_per_pixel: float) -> float:
    return float(2.0 ** ceil(log2(MIN_BIN_WIDTH * seconds_per_pixel)))


def shares(spans: Mapping[str, Column], step: float) -> dict[str, Column]:
    """Return the bars that replace `spans`, all of whose lanes must be crowded, with the columns of
    spans, and always `shade`. `step`: duration of a bin in seconds.

    The bars of a bin are stacked in the order of their colours in `PALETTE`. The first has the highest
    y.
    """
    begin, end = spans["begin"], spans["end"]
    lanes, lane = np.unique(spans["y"], return_inverse=True)
    shade = spans.get("shade", np.ones(len(begin)))
    kinds, kind = np.unique(spans["color"] - shade / 2, return_inverse=True)  # a shade is at most 1
    first = np.floor(begin / step).astype(np.int64)
    count = np.maximum(np.ceil(end / step).astype(np.int64) - first, 1)
    row = np.repeat(np.arange(len(begin)), count)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    covered = np.minimum(end[row], (number + 1) * step) - np.maximum(begin[row], number * step)
    earliest = int(number.min())
    size = len(lanes), int(number.max()) - earliest + 1, len(kinds)
    place = np.ravel_multi_index((lane[row], number - earliest, kind[row]), size)
    span = np.full(np.prod(size), -1)
    span[place] = row
    bars = np.flatnonzero(span >= 0)
    lane, number, _ = np.unravel_index(bars, size)
    number, span = number + earliest, span[bars]
    left = np.maximum(number * step, begin.min(initial=0.0))
    right = np.minimum((number + 1) * step, end.max(initial=0.0))
    share = np.bincount(place, covered)[bars] / (right - left)
    starts = np.ones(len(bars), bool)  # whether a bar is the first of its bin and lane
    starts[1:] = (lane[1:] != lane[:-1]) | (number[1:] != number[:-1])
    total = np.cumsum(share)
    below = (total - share)[np.maximum.accumulate(np.where(starts, np.arange(len(bars)), 0))]
    height = spans["height"][span]
    return arrays(
        y=lanes[lane] + height / 2 - height * (total - below - share / 2),
        height=height * share,
        begin=left,
        end=right,
        color=spans["color"][span],
        shade=shade[span],
    )


def note(spans: Mapping[str, Column]) -> str:
    """Empty if a plot of the usual width draws all lanes as spans."""
    if not len(spans["begin"]):
        return ""
    seconds = float(spans["end"].max() - spans["begin"].min())
    if not crowded(spans, seconds / _USUAL_WIDTH).any():
        return ""
    return "short intervals: shares of time"
