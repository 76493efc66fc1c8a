"""Shards on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents import shards
from agents.shards import Shard


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_shards_are_saved_and_loaded(dtype: type[np.generic], tmp_path: Path) -> None:
    x = np.arange(18, dtype=dtype).reshape(2, 3, 3)
    shards.save(Shard(x, np.array([4, 7]), 1 / 255), tmp_path / "shard")
    loaded = shards.load(tmp_path / "shard")
    np.testing.assert_array_equal(loaded.x, x)
    assert loaded.x.dtype == dtype
    assert loaded.y.tolist() == [4, 7]
    assert loaded.y.dtype == np.int64
    assert loaded.scale == 1 / 255
    assert len(loaded) == 2


def test_strided_arrays_are_saved_with_their_values(tmp_path: Path) -> None:
    x, y = np.arange(12).reshape(4, 3).astype(np.uint8), np.arange(4)
    shards.save(Shard(x[::2], y[::2]), tmp_path / "shard")
    loaded = shards.load(tmp_path / "shard")
    assert loaded.x.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert loaded.y.tolist() == [0, 2]
    assert loaded.scale == 1.0
