"""Datasets, their cache, and their partition. Digits are bundled; MNIST needs TESTBED_DATA."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from agents import shards as files
from agents.shards import Shard
from testbed import data
from testbed.errors import BadInputError, HostError
from testbed.rundir import RunDirectory

CLIENTS = [f"pi-{number}" for number in range(1, 9)]
TINY = data.HubImages("tests/tiny", image="picture", label="digit", test="validation")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "testbed" / "datasets"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with the dataset TINY: three images to train on, in two files, and one to test."""
    monkeypatch.setitem(data.DATASETS, "tests/tiny", TINY)
    folder = tmp_path / "data" / "tests" / "tiny"
    folder.mkdir(parents=True)
    _parquet(folder / "train-00000-of-00002.parquet", [10, 11])
    _parquet(folder / "train-00001-of-00002.parquet", [12])
    _parquet(folder / "validation-00000-of-00001.parquet", [13])
    return tmp_path / "data"


def _parquet(path: Path, shades: list[int]) -> None:
    """Images of 2×3 pixels, all of one shade, labelled shade − 10."""
    rows = []
    for shade in shades:
        png = io.BytesIO()
        Image.fromarray(np.full((2, 3), shade, np.uint8)).save(png, "png")
        rows.append({"picture": {"bytes": png.getvalue(), "path": None}, "digit": shade - 10})
    pd.DataFrame(rows).to_parquet(path)


def test_parquet_images_become_arrays(root: Path) -> None:
    tiny = data.load("tests/tiny", root)
    assert tiny.train.x.dtype == np.uint8
    assert tiny.train.x.shape == (3, 2, 3)
    assert tiny.train.x[:, 0, 0].tolist() == [10, 11, 12]
    assert tiny.train.y.tolist() == [0, 1, 2]
    assert tiny.test.y.tolist() == [3]
    assert tiny.test.scale == 1 / 255


def test_images_are_decoded_once_until_their_files_change(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load("tests/tiny", root)
    monkeypatch.setattr(data.HubImages, "_decode", None)
    second = data.load("tests/tiny", root)
    assert np.array_equal(first.train.x, second.train.x)
    assert second.train.scale == first.train.scale
    assert not list(cache.rglob("*.partial"))
    os.utime(root / "tests/tiny/train-00001-of-00002.parquet", (0, 0))
    with pytest.raises(BadInputError):  # reads the files again, and cannot decode
        data.load("tests/tiny", root)


def test_a_torn_cache_is_made_anew(root: Path, cache: Path) -> None:
    data.load("tests/tiny", root)
    (torn,) = cache.rglob("train.safetensors")
    torn.write_bytes(torn.read_bytes()[:-4])
    assert data.load("tests/tiny", root).train.y.tolist() == [0, 1, 2]
    assert files.load(torn).y.tolist() == [0, 1, 2]


def test_unfit_files_are_named_with_the_mend(root: Path) -> None:
    path = root / "tests/tiny/train-00000-of-00002.parquet"
    pd.DataFrame({"picture": [1], "other": [2]}).to_parquet(path)
    with pytest.raises(BadInputError, match=r"train-00000-of-00002\.parquet: not readable .* anew"):
        data.load("tests/tiny", root)
    with pytest.raises(BadInputError, match=r"--data .*nowhere: no such folder"):
        data.load("tests/tiny", root / "nowhere")


def test_without_files_or_network_the_error_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    with pytest.raises(HostError, match=r"--data FOLDER .* ylecun/mnist/train-\*\.parquet"):
        data.load("ylecun/mnist", tmp_path)


def test_digits_are_split_evenly_by_class() -> None:
    digits = data.load("digits", None)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.x.shape[1:] == (8, 8)
    assert digits.train.x.dtype == np.uint8
    assert digits.train.x.max() * digits.train.scale == 1.0
    share = np.bincount(digits.test.y) / np.bincount(digits.train.y)
    assert share == pytest.approx(np.full(10, 360 / 1437), rel=0.05)


def test_mnist(data_root: Path) -> None:
    mnist = data.load("ylecun/mnist", data_root)
    assert mnist.train.x.shape == (60_000, 28, 28)
    assert mnist.test.x.shape == (10_000, 28, 28)
    assert np.bincount(mnist.test.y).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert mnist.train.x.mean() / 255 == pytest.approx(0.1307, abs=1e-4)  # the known mean of MNIST


def _numbered(samples: int, classes: int = 10) -> Shard:
    """Sample k is the number k, of class k mod `classes`."""
    k = np.arange(samples)
    return Shard(k.astype(np.float32).reshape(-1, 1), k % classes, 0.5)


@pytest.mark.parametrize(("scheme", "params"), [("iid", {}), ("dirichlet", {"alpha": 0.3})])
def test_a_partition_deals_out_every_sample_once(scheme: str, params: dict[str, float]) -> None:
    train = _numbered(1003)
    shards = data.partition(train, scheme, params, CLIENTS, seed=7)
    assert list(shards) == CLIENTS
    x = np.concatenate([shard.x[:, 0] for shard in shards.values()])
    assert sorted(x.tolist()) == list(range(1003))
    for shard in shards.values():
        assert len(shard) >= data.MIN_SAMPLES
        assert np.array_equal(shard.x[:, 0] % 10, shard.y)
        assert shard.scale == 0.5


@pytest.mark.parametrize(("scheme", "params"), [("iid", {}), ("dirichlet", {"alpha": 0.3})])
def test_the_seed_decides_the_partition(scheme: str, params: dict[str, float]) -> None:
    def first(seed: int) -> list[float]:
        shards = data.partition(_numbered(1000), scheme, params, CLIENTS, seed)
        return shards[CLIENTS[0]].x[:, 0].tolist()  # type: ignore[no-any-return]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_alpha_is_the_skew() -> None:
    def largest_class_share(alpha: float) -> float:
        shards = data.partition(_numbered(10_000), "dirichlet", {"alpha": alpha}, CLIENTS, seed=1)
        counts = np.array(list(data.label_counts(shards).values()))
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert largest_class_share(1000.0) == pytest.approx(0.1, abs=0.03)
    assert largest_class_share(0.1) > 0.35


def test_iid_shards_hold_all_classes_alike() -> None:
    shards = data.partition(_numbered(8000), "iid", {}, CLIENTS, seed=1)
    counts = np.array(list(data.label_counts(shards).values()))
    assert counts.sum(axis=1).tolist() == [1000] * 8
    assert counts.min() > 60  # 100 expected


def test_what_cannot_be_dealt_out_names_the_knob() -> None:
    with pytest.raises(BadInputError, match=r"alpha 0\.01 .* 8 devices .* Raise task\.partition\.alpha"):
        data.partition(_numbered(100), "dirichlet", {"alpha": 0.01}, CLIENTS, seed=1)
    with pytest.raises(BadInputError, match=r"8 devices for 79 training samples: .* at most 7 devices"):
        data.partition(_numbered(79), "iid", {}, CLIENTS, seed=1)


def test_labels_are_counted_up_to_the_largest_class_of_all() -> None:
    x = np.zeros((3, 1), np.float32)
    shards = {"a": Shard(x, np.array([0, 0, 1])), "b": Shard(x, np.array([3, 1, 1]))}
    assert data.label_counts(shards) == {"a": [2, 1, 0, 0], "b": [0, 2, 0, 1]}


def test_the_run_directory_gets_what_others_can_read(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    train, test = _numbered(20), _numbered(5)
    data.write(data.Dataset(train, test), {"pi-1": train}, directory)
    assert files.load(directory.shard("pi-1")).y.tolist() == train.y.tolist()
    assert files.load(directory.test_set).x.tolist() == test.x.tolist()
    assert files.load(directory.test_set).scale == 0.5
    assert directory.shard("pi-1").stat().st_mode & 0o777 == 0o644
