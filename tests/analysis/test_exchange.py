"""New columns for a figure's source: the same rows as if all had been sent, by sending few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.document.events import (
    ColumnDataChangedEvent,
    ColumnsPatchedEvent,
    ColumnsStreamedEvent,
    DocumentChangedEvent,
)
from bokeh.models.sources import ColumnDataSource

from analysis.charts.screen import exchange

_WHOLE, _PATCHED, _STREAMED = ColumnDataChangedEvent, ColumnsPatchedEvent, ColumnsStreamedEvent


def columns(numbers: list[float]) -> dict[str, Any]:
    return {"x": np.array(numbers), "name": [f"{number:g}" for number in numbers]}


def exchanged(
    old: list[float], new: list[float], *, ordered: bool
) -> tuple[list[float], list[type[DocumentChangedEvent]]]:
    """Return the source's content afterwards, and the messages sent to the browser."""
    source, document, sent = ColumnDataSource(columns(old)), Document(), []
    document.add_root(source)
    document.on_change(lambda event: sent.append(type(event)))
    exchange(source, columns(new), ordered=ordered)
    held: dict[str, Any] = dict(source.data)
    rows = [float(x) for x in held["x"]]
    assert list(held["name"]) == columns(rows)["name"]
    return rows, sent


OLD = [float(number) for number in range(20)]


@pytest.mark.parametrize(
    ("new", "sent"),
    [
        (OLD, []),
        ([*OLD, 20.0], [_STREAMED]),
        ([*OLD[:-1], 19.5], [_PATCHED]),
        ([*OLD[:-1], 19.5, 20.0], [_PATCHED, _STREAMED]),
        (OLD[:-1], [_WHOLE]),
        (OLD[::-1], [_WHOLE]),
    ],
)
def test_ordered_rows_are_replaced_by_the_smallest_change(
    new: list[float], sent: list[type[DocumentChangedEvent]]
) -> None:
    rows, seen = exchanged(OLD, new, ordered=True)
    assert rows == new
    assert seen[: len(sent)] == sent
    assert len(seen) == len(sent) or sent == [_WHOLE]


@pytest.mark.parametrize(
    ("new", "sent"),
    [
        (OLD[::-1], []),
        ([*OLD[2:], 20.0, 21.0], [_PATCHED]),  # a window that moves
        ([*OLD[1:], 20.0, 21.0], [_PATCHED, _STREAMED]),
        (OLD[1:], [_WHOLE]),
    ],
)
def test_unordered_rows_are_replaced_by_the_smallest_change(
    new: list[float], sent: list[type[DocumentChangedEvent]]
) -> None:
    rows, seen = exchanged(OLD, new, ordered=False)
    assert sorted(rows) == sorted(new)
    assert seen[: len(sent)] == sent
    assert len(seen) == len(sent) or sent == [_WHOLE]


def test_empty_table_is_filled() -> None:
    assert exchanged([], OLD, ordered=True)[0] == OLD
