"""Update of a figure's data source: if most rows stay the same, only the changed ones are sent to the
browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from bokeh.models.sources import ColumnDataSource

_MAX_CHANGED_SHARE = 0.25
"""Share of changed rows above which it is cheaper to send all."""

Rows = npt.NDArray[np.int64]


def exchange(source: ColumnDataSource, data: Mapping[str, Any], *, ordered: bool) -> None:
    """With `ordered`, rows keep the order of `data`. Otherwise a new row may take the place of a removed
    one, so that a window over the newest rows can move without sending all."""
    held: dict[str, Any] = dict(source.data)
    if _same(held, data):
        return
    old, new = _hashes(held), _hashes(data)
    places, rows, more = (_in_order if ordered else _in_any_order)(old, new)
    gone = len(old) + len(more) - len(new)
    if not len(old) or gone > 0 or len(rows) + len(more) > _MAX_CHANGED_SHARE * len(new):
        source.data = dict(data)
        return
    if len(rows):
        source.patch({name: [*zip(places.tolist(), _select(column, rows), strict=True)]
                      for name, column in data.items()})  # fmt: skip
    if len(more):
        source.stream({name: _select(column, more) for name, column in data.items()})


def _in_order(old: Rows, new: Rows) -> tuple[Rows, Rows, Rows]:
    """Indices of the old rows to replace, of the new rows in their place, and of the new rows to
    append."""
    shared = min(len(old), len(new))
    changed = np.flatnonzero(old[:shared] != new[:shared])
    return changed, changed, np.arange(shared, len(new))


def _in_any_order(old: Rows, new: Rows) -> tuple[Rows, Rows, Rows]:
    places, rows = np.flatnonzero(~np.isin(old, new)), np.flatnonzero(~np.isin(new, old))
    shared = min(len(places), len(rows))
    return places[:shared], rows[:shared], rows[shared:]


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """The usual case, and much cheaper to find than by hashing."""
    return len(old) == len(new) and all(
        old[name] == column
        if isinstance(column, list)
        else np.array_equal(old[name], column, equal_nan=column.dtype.kind == "f")
        for name, column in new.items()
        if name in old
    )


def _hashes(data: Mapping[str, Any]) -> Rows:
    if not data:
        return np.zeros(0, np.uint64)
    # Sorted by name, because the columns of a source may have another order.
    table = pd.DataFrame({name: np.asarray(data[name]) for name in sorted(data)})
    return np.asarray(pd.util.hash_pandas_object(table, index=False))


def _select(column: Any, rows: Rows) -> Any:
    return np.asarray(column)[rows].tolist()
