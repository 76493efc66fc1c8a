"""Datasets, their cache, and a run's data. `test_paper_tasks` has real MNIST and CIFAR-10."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from PIL import Image

from agents import shards as files
from agents.shards import Shard
from testbed import topology
from testbed.data import datasets, preparation
from testbed.errors import BadInputError, HostError
from testbed.rundir.directory import RunDirectory
from testbed.topology.data_settings import DataSettings
from testbed.topology.partition import Dirichlet, Indices

CLIENTS = [f"pi-{number}" for number in range(1, 9)]
TINY = datasets.Columns(
    DataSettings(hub="tests/tiny", input=("picture",), label="digit", test="validation")
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "testbed" / "datasets"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with the dataset TINY: three images to train on, in two files, and one to test."""
    monkeypatch.setitem(datasets.DATASETS, "tests/tiny", TINY)
    folder = tmp_path / "data" / "tests" / "tiny"
    folder.mkdir(parents=True)
    _parquet(folder / "train-00000-of-00002.parquet", [10, 11])
    _parquet(folder / "train-00001-of-00002.parquet", [12])
    _parquet(folder / "validation-00000-of-00001.parquet", [13])
    return tmp_path / "data"


def _parquet(path: Path, shades: list[int]) -> None:
    """Images of 2×3 pixels, all of one shade, labelled shade − 10."""
    _write(path, [np.full((2, 3), shade, np.uint8) for shade in shades], [s - 10 for s in shades])


def _write(path: Path, images: list[NDArray[np.uint8]], labels: list[int]) -> None:
    rows = []
    for image, label in zip(images, labels, strict=True):
        png = io.BytesIO()
        Image.fromarray(image).save(png, "png")
        rows.append({"picture": {"bytes": png.getvalue(), "path": None}, "digit": label})
    pd.DataFrame(rows).to_parquet(path)


def test_parquet_images_become_arrays(root: Path) -> None:
    tiny = datasets.load("tests/tiny", root)
    assert tiny.train.x.dtype == np.uint8
    assert tiny.train.x.shape == (3, 2, 3)
    assert tiny.train.x[:, 0, 0].tolist() == [10, 11, 12]
    assert tiny.train.y.tolist() == [0, 1, 2]
    assert tiny.test.y.tolist() == [3]
    assert tiny.test.scale == 1 / 255


def test_colour_channels_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.DATASETS, "tests/tiny", TINY)
    folder = tmp_path / "tests" / "tiny"
    folder.mkdir(parents=True)
    image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    for split in ("train", "validation"):
        _write(folder / f"{split}-00000-of-00001.parquet", [image], [4])
    tiny = datasets.load("tests/tiny", tmp_path)
    assert tiny.train.x.shape == (1, 3, 2, 3)
    assert tiny.train.x[0, 1].tolist() == [[1, 4, 7], [10, 13, 16]]  # green


def test_decoded_images_are_cached_until_files_change(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = datasets.load("tests/tiny", root)
    monkeypatch.setattr(datasets.Columns, "_read_files", None)
    second = datasets.load("tests/tiny", root)
    assert np.array_equal(first.train.x, second.train.x)
    assert second.train.scale == first.train.scale
    assert not list(cache.rglob("*.partial"))
    os.utime(root / "tests/tiny/train-00001-of-00002.parquet", (0, 0))
    with pytest.raises(TypeError):  # reads the files again, and cannot
        datasets.load("tests/tiny", root)


def test_damaged_cache_is_rebuilt(root: Path, cache: Path) -> None:
    datasets.load("tests/tiny", root)
    (torn,) = cache.rglob("train.safetensors")
    torn.write_bytes(torn.read_bytes()[:-4])
    assert datasets.load("tests/tiny", root).train.y.tolist() == [0, 1, 2]
    assert files.load(torn).y.tolist() == [0, 1, 2]


def test_invalid_files_are_named_with_the_fix(root: Path) -> None:
    path = root / "tests/tiny/train-00000-of-00002.parquet"
    pd.DataFrame({"picture": [1], "other": [2]}).to_parquet(path)
    with pytest.raises(BadInputError, match=r"digit.*train-00000-of-00002\.parquet: .*again"):
        datasets.load("tests/tiny", root)
    with pytest.raises(BadInputError, match=r"--data .*nowhere: no such folder"):
        datasets.load("tests/tiny", root / "nowhere")


def test_decoding_reports_the_remaining_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress counts the rows of all splits; it is reported here from the first row on."""
    monkeypatch.setattr("testbed.console._WORTH_SECONDS", 0.0)
    told: list[str] = []
    datasets.load("tests/tiny", root, told.append)
    assert told[0] == "Decoding tests/tiny: 50%, about 0 s left"
    del told[:]
    datasets.load("tests/tiny", root, told.append)
    assert told == []


def test_missing_data_error_says_how_to_supply_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    with pytest.raises(HostError, match=r"--data FOLDER .* ylecun/mnist/train-\*\.parquet"):
        datasets.load("ylecun/mnist", tmp_path)


def test_digits_are_split_evenly_by_class() -> None:
    digits = datasets.load("digits", None)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.x.shape[1:] == (8, 8)
    assert digits.train.x.dtype == np.uint8
    assert digits.train.x.max() * digits.train.scale == 1.0
    share = np.bincount(digits.test.y) / np.bincount(digits.train.y)
    assert share == pytest.approx(np.full(10, 360 / 1437), rel=0.05)


DIGITS = """
name: digits
seed: 7
task: {name: digits-logreg, partition: {scheme: dirichlet, alpha: 1}, local: {steps: 20}}
rule: {name: fedasync}
devices: [{name: pi, count: 8, cpu: 0.1}]
stop: {updates: 10}
"""


def test_data_of_a_topology_is_prepared() -> None:
    prepared = preparation.prepare(topology.parse(DIGITS), None)
    assert (len(prepared.train), len(prepared.test)) == (1437, 360)
    assert list(prepared.indices) == CLIENTS
    assert sorted(np.concatenate(list(prepared.indices.values()))) == list(range(1437))
    shard = prepared.shard("pi-3")
    first = prepared.indices["pi-3"][0]
    assert np.array_equal(shard.x[0], prepared.train.x[first])
    assert shard.y[0] == prepared.train.y[first]
    assert shard.scale == 1 / 16


def test_task_without_a_dataset_supplies_its_data() -> None:
    text = DIGITS.replace(
        "digits-logreg, partition: {scheme: dirichlet, alpha: 1}", "quadratic, centers: [[0, 1], [2, 3]]"
    )
    prepared = preparation.prepare(topology.parse(text.replace("count: 8", "count: 2")), None)
    assert prepared.train.x.tolist() == prepared.test.x.tolist() == [[0, 1], [2, 3]]
    assert prepared.indices["pi-2"].tolist() == [1]
    assert prepared.shard("pi-2").x.tolist() == [[2, 3]]
    assert preparation.label_counts(prepared) == {"pi-1": [1], "pi-2": [1]}


def _evaluated(how: str, seed: int = 7, importance: str = "uniform") -> preparation.Prepared:
    text = DIGITS.replace("seed: 7", f"seed: {seed}")
    text = text.replace("local: {steps: 20}", f"local: {{steps: 20}}, importance: {importance}")
    return preparation.prepare(topology.parse(f"{text}\nevaluate: {{{how}}}"), None)


def test_evaluation_may_use_part_of_the_test_set() -> None:
    whole, part = _evaluated("on: test").test, _evaluated("samples: 100").test
    assert len(part) == 100
    assert {x.tobytes() for x in part.x} <= {x.tobytes() for x in whole.x}
    other = _evaluated("samples: 100", seed=8).test
    assert np.array_equal(part.x, other.x)
    assert len(_evaluated("samples: 400").test) == len(whole) == 360


def test_evaluation_may_use_the_clients_samples() -> None:
    prepared = _evaluated("on: clients, samples: 7")
    assert len(prepared.test) == 7 * 8
    for k, own in enumerate(prepared.indices.values()):
        has = {x.tobytes() for x in prepared.train.x[own]}
        assert {x.tobytes() for x in prepared.test.x[7 * k : 7 * (k + 1)]} <= has


def test_evaluation_weighs_clients_by_importance() -> None:
    prepared = _evaluated("on: clients, samples: 100", importance="samples")
    sizes = [len(own) for own in prepared.indices.values()]
    counts = [round(100 * size / (1437 / 8)) for size in sizes]
    assert max(sizes) > 1.5 * min(sizes)
    first = prepared.test.x[: counts[0]]
    has = {x.tobytes() for x in prepared.train.x[prepared.indices["pi-1"]]}
    assert {x.tobytes() for x in first} <= has
    assert len(prepared.test) == sum(counts)


@pytest.fixture
def tiny() -> preparation.Prepared:
    """Sample k is the number k; there is none of class 2."""
    x, y = np.arange(5, dtype=np.float32).reshape(-1, 1), np.array([0, 0, 1, 3, 1])
    indices = {"a": np.array([0, 1, 2]), "b": np.array([3, 4, 2])}
    return preparation.Prepared(Shard(x, y, 0.5), Shard(x[:2], y[:2], 0.5), indices)


def test_label_counts_cover_all_classes(tiny: preparation.Prepared) -> None:
    assert preparation.label_counts(tiny) == {"a": [2, 1, 0, 0], "b": [0, 2, 0, 1]}


def test_run_directory_records_the_data_in_plain_formats(
    tiny: preparation.Prepared, tmp_path: Path
) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    preparation.write(tiny, directory)
    assert files.load(directory.shard("b")).x.tolist() == [[3], [4], [2]]
    assert files.load(directory.shard("b")).y.tolist() == [3, 1, 1]
    assert files.load(directory.test_set).x.tolist() == [[0], [1]]
    assert files.load(directory.test_set).scale == 0.5
    assert directory.shard("a").stat().st_mode & 0o777 == 0o644


def _dealt(alpha: float = 0.5, labels: Indices | None = None, seed: int = 7) -> Mapping[str, Indices]:
    text = DIGITS.replace("alpha: 1", f"alpha: {alpha}").replace("seed: 7", f"seed: {seed}")
    y = np.arange(1000) % 10 if labels is None else labels
    shard = Shard(np.zeros((len(y), 1), np.float32), y)
    return preparation._partition(topology.parse(text), datasets.Dataset(shard, shard))


def test_partition_is_computed_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the partitioners takes seconds."""
    first = _dealt()
    monkeypatch.setattr(Dirichlet, "deal", None)
    again = _dealt()
    assert list(again) == CLIENTS
    assert all(np.array_equal(again[client], first[client]) for client in CLIENTS)
    others: list[dict[str, Any]] = [{"alpha": 0.4}, {"labels": np.arange(1000)[::-1] % 10}, {"seed": 8}]
    for other in others:
        with pytest.raises(TypeError):  # deals anew, and cannot
            _dealt(**other)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    (kept,) = cache.parent.rglob("partitions/*")
    kept.write_bytes(kept.read_bytes()[:-4])
    assert np.array_equal(_dealt()["pi-1"], first["pi-1"])
