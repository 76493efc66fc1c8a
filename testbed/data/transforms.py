"""Transforms of the inputs of single devices: rotation, scale and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.shards import Shard
from testbed.topology import Topology, seeds
from testbed.topology.data_settings import Transform
from testbed.topology.partition import Indices

_AT_ONCE = 1_000
"""Samples that are transformed together, in float64."""


def apply(
    topology: Topology, train: Shard, indices: Mapping[str, Indices]
) -> tuple[Shard, Mapping[str, Indices]]:
    """Transformed samples are copies at the end of `train`, because other devices may have the original
    samples. The topology's seed determines the random draws.

    Raises BadInputError if the inputs cannot be transformed.
    """
    wanted = {
        name: (index, group.data.transform)
        for index, group in enumerate(topology.devices)
        if group.data is not None and group.data.transform is not None
        for name in group.device_names
    }
    if not wanted:
        return train, indices
    changed, parts, begin = dict(indices), [train.x], len(train)
    for name, (index, transform) in wanted.items():
        if message := _unfit(transform, train):
            where = ("devices", index, "data", "transform")
            raise topology.source.error([topology.source.problem(where, message)])
        own = indices[name]
        rng = seeds.generator(topology.seed, name, "transform")
        parts.append(_transform(train.x[own], train.scale, transform, rng))
        changed[name] = np.arange(begin, begin + len(own))
        begin += len(own)
    labels = np.concatenate([train.y, *(train.y[indices[name]] for name in wanted)])
    return Shard(np.concatenate(parts), labels, train.scale), changed


def _unfit(transform: Transform, train: Shard) -> str:
    if train.x.dtype.kind == "i":
        return "the inputs are tokens, which cannot be rotated or scaled: remove this"
    if transform.rotate != (0.0, 0.0) and train.x.ndim < 3:
        return "rotate needs images, and the inputs are not images: remove it"
    return ""


def _transform(
    x: NDArray[Any], scale: float, transform: Transform, rng: np.random.Generator
) -> NDArray[Any]:
    angle, factor, noise = (
        float(rng.uniform(*each)) for each in (transform.rotate, transform.scale, transform.noise)
    )
    made = np.empty_like(x)
    for begin in range(0, len(x), _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        values = x[part].astype(np.float64)
        if angle:
            values = rotate(values, angle)
        values *= factor
        if noise:
            values += rng.normal(0.0, noise / scale, values.shape)
        if x.dtype == np.uint8:
            values = values.round().clip(0, 255)
        made[part] = values
    return made


def rotate(images: NDArray[np.float64], degrees: float) -> NDArray[np.float64]:
    """Rotate images, shape (…, height, width), counter-clockwise about their centre. Each pixel is
    interpolated between the four nearest pixels. Pixels beyond the edges are 0."""
    height, width = images.shape[-2:]
    angle = math.radians(degrees)
    down, right = np.indices((height, width), np.float64)
    down -= (height - 1) / 2
    right -= (width - 1) / 2
    # Source of each pixel, by the inverse rotation; the axis `down` points downwards.
    from_down = down * math.cos(angle) + right * math.sin(angle) + (height - 1) / 2
    from_right = right * math.cos(angle) - down * math.sin(angle) + (width - 1) / 2
    padded = np.pad(images, [(0, 0)] * (images.ndim - 2) + [(1, 1), (1, 1)])
    turned = np.zeros_like(images)
    top, left = np.floor(from_down + 1e-9), np.floor(from_right + 1e-9)
    for below in (0, 1):
        for beside in (0, 1):
            weight = (1 - abs(from_down - top - below)) * (1 - abs(from_right - left - beside))
            row = (top + below + 1).clip(0, height + 1).astype(np.int64)
            column = (left + beside + 1).clip(0, width + 1).astype(np.int64)
            turned += weight * padded[..., row, column]
    return turned
