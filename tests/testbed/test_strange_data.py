"""Data as people have it: odd folders, files whose types differ, labels and times of unusual kinds."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import yaml

from testbed import simulate
from testbed.data import columns, data_files
from testbed.data.columns import DataError, DecodedSplit
from testbed.run import saved_models
from testbed.rundir.directory import RunDirectory
from testbed.topology.data_settings import DataSettings


def _decode(folder: Path, **settings: Any) -> tuple[DecodedSplit, DecodedSplit | None]:
    data = DataSettings(**{"path": str(folder), "input": "image", "label": "label", **settings})
    found = data_files.local_splits(data, None)
    assert found is not None
    train = columns.read(data_files.open_split(found.train), data)
    if not found.test:
        return train, None
    return train, columns.read(data_files.open_split(found.test), data, train)


def _image(path: Path, *, grey: bool = True, value: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (4, 4) if grey else (4, 4, 3)
    PIL.Image.fromarray(np.full(shape, value, np.uint8)).save(path)


def test_hidden_files_are_no_samples_and_other_files_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    for name in (
        "cat/a.JPG",
        "cat/b.webp",
        "dog/a.PNG",
        "dog/b.bmp",
        ".ipynb_checkpoints/a-checkpoint.png",
    ):
        _image(folder / name)
    (folder / "dog" / "._a.png").write_bytes(b"mac")
    (folder / "dog" / "notes.txt").write_text("-")
    (folder / "emu").mkdir()
    (folder / "emu" / "a.heic").write_bytes(b"?")
    train, _ = _decode(tmp_path)
    assert train.classes == ("cat", "dog")
    assert train.shard.y.tolist() == [0, 0, 1, 1]
    (left,) = [one for one in train.remarks if "left out" in one]
    assert left.endswith(
        "2 files are no images and left out: 1 .heic, 1 .txt. No class: emu, which has no images."
    )


def test_damaged_image_is_named(tmp_path: Path) -> None:
    _image(tmp_path / "train" / "cat" / "a.png")
    (tmp_path / "train" / "cat" / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"row 1 \(.*cat/b\.png\)"):
        _decode(tmp_path)


def test_classes_that_are_whole_numbers_are_in_their_order(tmp_path: Path) -> None:
    for number in range(12):
        _image(tmp_path / "train" / str(number) / "a.png", value=number)
    train, _ = _decode(tmp_path)
    assert train.classes == tuple(map(str, range(12)))
    assert train.shard.y.tolist() == train.shard.x[:, 0, 0].tolist()


@pytest.mark.parametrize("place", [0, 1, 5, 1000, 1001])
def test_grey_image_among_images_in_colour(tmp_path: Path, place: int) -> None:
    first = tmp_path / "train" / "cat" / "0000.png"
    _image(first, grey=False)
    for number in range(1, 1002):
        shutil.copy(first, first.with_name(f"{number:04d}.png"))
    _image(first.with_name(f"{place:04d}.png"), value=200)
    train, _ = _decode(tmp_path)
    assert train.shard.x.shape == (1002, 3, 4, 4)
    assert (train.shard.x[place] == 200).all()
    assert np.count_nonzero(train.shard.x[:, 0, 0, 0] == 7) == 1001


def _csv(folder: Path, **texts: Sequence[str]) -> None:
    for name, lines in texts.items():
        (folder / f"{name.replace('_', '-')}.csv").write_text("\n".join(lines) + "\n")


def test_column_has_one_type_in_all_files(tmp_path: Path) -> None:
    _csv(tmp_path, train_0=["x,y", "1,0", "2,3"], train_1=["x,y", "1.5,A", "2,0"])
    train, _ = _decode(tmp_path, input="x", label="y")
    assert train.classes == ("0", "3", "A")
    assert train.shard.y.tolist() == [0, 1, 2, 0]
    assert train.shard.x.ravel().tolist() == [1, 2, 1.5, 2]


def test_text_in_one_file_of_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    _csv(tmp_path, train_0=["x,y", "1,0", "2,1"], train_1=["x,y", "1,0", "x,1"])
    with pytest.raises(DataError, match=r"int64 in train-0.csv, string in train-1.csv"):
        _decode(tmp_path, input="x", label="y")


@pytest.mark.parametrize("row", ["1e308,2,0.5", "2,1e308,0.5", "2,2,1e308"])
def test_number_too_large_for_float32_is_refused(tmp_path: Path, row: str) -> None:
    _csv(tmp_path, train=["x,z,y", "1,1,0.5", row])
    with pytest.raises(DataError, match="row 1: value is not a number, or too large for float32"):
        _decode(tmp_path, input=("x", "z"), label="y")


def test_arrays_and_images_that_break_their_readers_are_refused(tmp_path: Path) -> None:
    """An .npz whose array has no whole header, or that has another file; an image of 2⁴⁰ pixels."""
    (tmp_path / "a").mkdir()
    header = b"\x93NUMPY\x01\x00" + (10).to_bytes(2, "little") + b"{'descr': "
    for name, content in (("x.npy", header), ("x", b"text")):
        with zipfile.ZipFile(tmp_path / "a" / "train.npz", "w") as file:
            file.writestr(name, content)
        with pytest.raises(DataError, match=r"a/train\.npz: (not readable|expected arrays)"):
            _decode(tmp_path / "a", input="x", label=None)
    _image(tmp_path / "b" / "train" / "cat" / "a.gif")
    picture = tmp_path / "b" / "train" / "cat" / "a.gif"
    data = picture.read_bytes()
    picture.write_bytes(data[:6] + b"\xff\xff\xff\xff" + data[10:])
    with pytest.raises(DataError, match=r"cat/a\.gif"):
        _decode(tmp_path / "b")


def test_column_that_a_csv_file_has_twice_is_named(tmp_path: Path) -> None:
    _csv(tmp_path, train=["x,x,y", "1,a,0", "2,b,1"])
    with pytest.raises(DataError, match="has several columns 'x'"):
        _decode(tmp_path, input="x", label="y")


def test_numbers_with_zeros_in_front_are_said(tmp_path: Path) -> None:
    _csv(tmp_path, train=["x,y,who", "1,0,001", "2,1,002"])
    train, _ = _decode(tmp_path, input="x", label="y", client="who")
    assert [one for one in train.remarks if "who" in one] == [
        f"{tmp_path}/train.csv, column who: 001 is read as the number 1."
    ]


def test_header_of_megabytes(tmp_path: Path) -> None:
    names = [f"pixel_{number:020d}" for number in range(50_000)]
    _csv(tmp_path, train=[",".join([*names, "y"]), ",".join(["7"] * 50_001), ",".join(["007"] * 50_001)])
    data = DataSettings.model_validate({"path": str(tmp_path), "input": names[0], "label": "y"})
    found = data_files.local_splits(data, None)
    assert found is not None
    split = data_files.open_split(found.train)
    assert split.remarks[-1] == f"{tmp_path}/train.csv, column y: 007 is read as the number 7."


def test_one_hot_labels_of_another_width_are_refused(tmp_path: Path) -> None:
    for split, width in (("train", 10), ("test", 9)):
        np.savez(tmp_path / f"{split}.npz", x=np.ones((9, 2)), y=np.eye(9, width))
    with pytest.raises(
        DataError, match="one-hot labels of 9 numbers, but the training samples have vectors of 10"
    ):
        _decode(tmp_path, input="x", label="y")


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (1_700_000_000 + np.arange(200), True),
        (1_700_000_000.0 + np.arange(200), True),
        (np.arange(200), False),
        (1_700_000_000 + 1_000_000 * np.arange(200), False),
        (np.random.default_rng(0).normal(1e9, 1e3, 200), False),
    ],
)
def test_values_that_float32_cannot_tell_apart_are_refused(
    tmp_path: Path, values: Any, refused: bool
) -> None:
    np.savez(tmp_path / "train.npz", x=values, y=np.arange(200) % 2)
    if refused:
        with pytest.raises(DataError, match="float32"):
            _decode(tmp_path, input="x", label="y")
    else:
        assert len(_decode(tmp_path, input="x", label="y")[0].shard) == 200


def test_labels_of_plus_and_minus_one_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.ones((4, 2)), y=np.array([-1, 1, 1, -1]))
    with pytest.raises(DataError, match="labels are -1 and 1; write them as classes 0 and 1"):
        _decode(tmp_path, input="x", label="y")


PETS = """
from dataclasses import dataclass
from torch import nn
from agents.tasks.interface import Task

@dataclass(frozen=True)
class Pets(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
"""


def test_evaluations_by_class_have_the_names_of_the_classes(tmp_path: Path) -> None:
    """Also from the cache; the remark about files that are no images is that of the folder now."""
    for name in ("cat", "dog"):
        for number in range(8):
            _image(tmp_path / "pets" / "train" / name / f"{number}.png", value=10 * number)
    text = {
        "name": "pets",
        "code": "own.py",
        "task": {
            "name": "own:Pets",
            "data": {"path": "pets", "input": "image", "label": "label"},
            "local": {"steps": 1, "lr": 0.1},
        },
        "rule": {"name": "fedasync"},
        "devices": [{"name": "a", "timing": "1s"}],
        "evaluate": {"every": "1s", "classes": True},
        "stop": {"after": "2s"},
    }
    (tmp_path / "own.py").write_text(PETS)
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(text))

    def names() -> tuple[set[str], list[str]]:
        run = simulate(tmp_path / "t.yaml", runs=tmp_path / "runs")
        told = saved_models.evaluate_saved_models(RunDirectory(run.path), None, classes=True)
        assert {*told["name"][told["part"] == "class"]} == {"cat", "dog"}
        return {*run.parts["name"]}, run.manifest["data"]

    for _ in range(2):
        assert names()[0] == {"cat", "dog"}
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("x")
    found, remarks = names()
    assert found == {"cat", "dog"}
    assert any("1 .txt" in remark for remark in remarks)
