"""Files of samples: Parquet, CSV, arrays, folders of images."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from testbed import topology as topologies
from testbed.data import preparation
from tests.fuzz.harness import Read
from tests.fuzz.mutations import VALUES, change_text, damage

_TOPOLOGY = """\
name: fuzzed
task:
  name: digits-logreg
  data: {{path: {}, input: {}, label: y}}
  partition: {{scheme: resampled, samples: 9}}
  local: {{steps: 1}}
rule: {{name: fedasync}}
devices: [{{name: a, count: 2, timing: 1s}}]
stop: {{after: 8s}}
runtime: {{name: virtual}}
"""
_ROWS = 20
_ARRAYS: tuple[Any, ...] = (
    np.zeros(0), np.float64(1), np.full(_ROWS, np.nan), np.full((_ROWS, 3), np.inf),
    np.full(_ROWS, 1e308), np.arange(_ROWS) * 2**58, np.full(_ROWS, -1),
    np.array(["a", "\ud800", "\x1b", ""] * 5),
    np.zeros((_ROWS, 0)), np.zeros((_ROWS, 1, 1, 1, 1, 1)), np.zeros(_ROWS, complex),
    np.zeros(_ROWS, "S3"), np.zeros(_ROWS, "M8[ns]"), np.zeros(_ROWS, bool), np.array([None, {}] * 10),
    np.zeros(_ROWS, "f2"),
    np.zeros(_ROWS, [("a", "i4")]), np.zeros(_ROWS, ">f8"), np.array([b"\0"] * _ROWS, object),
)  # fmt: skip


@contextmanager
def data(folder: Path) -> Iterator[Read]:
    rng, mine, file = np.random.default_rng(1), folder / "mine", folder / "topology.yaml"
    right = {"x": rng.random((_ROWS, 8)), "y": np.arange(_ROWS) % 4}
    table = pd.DataFrame({"x": [*right["x"]], "y": right["y"]})
    flat = pd.DataFrame({"x": rng.random(_ROWS), "z": range(_ROWS), "y": ["cat", "dog"] * (_ROWS // 2)})
    text = flat.to_csv(index=False)

    def npz(draw: random.Random) -> tuple[str, bytes]:
        made = io.BytesIO()
        arrays = dict(right)
        if draw.random() < 0.6:
            arrays[draw.choice(["x", "y", "z", ""])] = draw.choice(_ARRAYS)
        np.savez(made, allow_pickle=True, **arrays)
        return "train.npz", _maybe_damaged_in_zip(made.getvalue(), draw)

    def parquet(draw: random.Random) -> tuple[str, bytes]:
        changed = table.copy()
        if draw.random() < 0.5:
            column = draw.choice(["x", "y"])
            changed[column] = pd.Series(
                [draw.choice(VALUES)] * _ROWS
                if draw.random() < 0.5
                else [*changed[column][:-1], draw.choice(VALUES)],
                dtype=object,
            )
        made = io.BytesIO()
        try:
            changed.to_parquet(made)
        except (ValueError, TypeError, OverflowError, NotImplementedError):  # Parquet has no such value
            made = io.BytesIO()
            table.to_parquet(made)
        return "train.parquet", damage(made.getvalue(), draw) if draw.random() < 0.6 else made.getvalue()

    def csv(draw: random.Random) -> tuple[str, bytes]:
        kind = draw.choice(["csv", "tsv"])
        return f"train.{kind}", change_text(text if kind == "csv" else text.replace(",", "\t"), draw)

    def images(draw: random.Random) -> tuple[str, bytes]:
        kind = draw.choice(["png", "jpeg", "gif", "bmp", "tiff", "webp"])
        made, mode = io.BytesIO(), draw.choice(["RGB", "L", "P", "RGBA", "I;16", "1", "CMYK", "F"])
        for size in ((8, 8), draw.choice([(8, 8), (8, 9), (1, 1)])):
            made = io.BytesIO()
            try:
                Image.new(mode, size).save(made, kind)
            except (OSError, ValueError):  # no such mode in this kind
                Image.new("L", size).save(made, kind)
            path = mine / f"train/{draw.choice(['cat', 'dog', '1'])}/{draw.random()}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made.getvalue())
        return f"train/cat/a.{kind}", damage(made.getvalue(), draw)

    def read(draw: random.Random) -> object:
        shutil.rmtree(mine, ignore_errors=True)
        mine.mkdir()
        make = draw.choice([npz, parquet, csv, images])
        name, content = make(draw)
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_bytes(content)
        columns = {csv: "[x, z]", images: "image"}.get(make, "x")
        written = _TOPOLOGY.format("mine", columns)
        file.write_text(written.replace("label: y", "label: label") if make is images else written)
        found = preparation.prepare(topologies.load(file), None)
        return [found.shard(name) for name in found.samples]

    yield read


def _maybe_damaged_in_zip(data: bytes, draw: random.Random) -> bytes:
    """Damage the archive, or an array in it with the right checksum."""
    if draw.random() < 0.3:
        return damage(data, draw)
    if draw.random() < 0.5:
        return data
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, damage(content[:128], draw) + content[128:])
    return made.getvalue()
