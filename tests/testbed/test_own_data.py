"""A user's own dataset: how its files are read, and which errors are reported."""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from agents.shards import Shard
from testbed import simulate, sweeps, topology
from testbed.data import datasets, preparation
from testbed.data.datasets import Columns, Dataset
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology.data_settings import DataSettings, Split
from testbed.view import View
from tests.running import TOPOLOGIES, Testbed

OWN = """\
name: own
task:
  name: digits-logreg
  data: {path: mine, input: x, label: y}
  local: {steps: 2}
rule: {name: fedasync}
devices:
  - {name: pi, count: 4, timing: 1s}
stop: {updates: 3}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TESTBED_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A topology's folder with a folder `mine` of 100 images of 8×8 in it, of classes 0 to 9."""
    (tmp_path / "study" / "mine").mkdir(parents=True)
    x = np.random.default_rng(1).integers(0, 256, (100, 8, 8), np.uint8)
    np.savez(tmp_path / "study" / "mine" / "all.npz", x=x, y=np.arange(100) % 10)
    (tmp_path / "study" / "own.yaml").write_text(OWN, encoding="utf-8")
    return tmp_path / "study"


def changed(folder: Path, old: str, new: str) -> Path:
    path = folder / "own.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def prepared(path: Path) -> Prepared:
    return preparation.prepare(topology.load(path), None)


def read(folder: Path, **settings: Any) -> Dataset:
    data = DataSettings(path=str(folder), **{"input": ("x",), **settings})
    return datasets.load_from(Columns(data), None)


def write(folder: Path, columns: dict[str, Any], name: str = "train.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_parquet(folder / name)
    return folder


def _png(mode: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (6, 6)).save(file, "png")
    return file.getvalue()


_PNG = _png("RGB")


def test_sweep_identifies_data_files_by_content(folder: Path) -> None:
    study = {"topology": "own.yaml", "grid": {"seed": [1]}}

    def fingerprint() -> str:
        (cell,) = sweeps.from_mapping(study, "study", folder, Options(runtime="virtual")).cells
        return cell.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    np.savez(folder / "mine" / "all.npz", x=np.zeros((90, 8, 8), np.uint8), y=np.arange(90) % 10)
    assert fingerprint() != before


def test_resume_with_changed_data_files_is_reported(folder: Path) -> None:
    class Told(View):
        def progress(self, message: str) -> None:
            told.append(message)

    told: list[str] = []
    read, _ = preparing.plan_file(folder / "own.yaml", Options(runtime="virtual"))
    directory = RunDirectory.create(folder / "runs", "own-1")
    directory.write_manifest(**preparing.data_entries(read, directory, Told()))
    preparing.data_entries(read, directory, Told())
    assert told == []
    np.savez(folder / "mine" / "all.npz", x=np.zeros((90, 8, 8), np.uint8), y=np.arange(90) % 10)
    preparing.data_entries(read, directory, Told())
    assert ["have changed since the run began" in message for message in told] == [True]


def test_run_learns_from_a_data_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # not the topology's folder
    run = simulate(folder / "own.yaml", runs=tmp_path / "runs")
    assert len(run.updates) == 3
    assert [device["samples"] for device in run.manifest["devices"].values()] == [20, 20, 20, 20]
    assert re.fullmatch("[0-9a-f]{8,}", run.manifest["data_files"])  # which tell it from runs of others
    again = topology.load(run.path / "topology.yaml")  # as --resume and workers of a sweep read it
    assert len(preparation.prepare(again, None).test) == 20


def test_documented_example_is_complete(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (TOPOLOGIES.parent / "docs" / "guide" / "data.md").read_text(encoding="utf-8")
    python, whole, devices = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(python, {})  # noqa: S102
    (tmp_path / "own.yaml").write_text(whole, encoding="utf-8")
    said = testbed("data", "own.yaml")
    assert said.code == 0, said.err
    assert "800 training samples of shape 64 for 8 devices, 200 samples" in said.out
    topology.parse(re.sub(r"^devices: .*\n", devices, whole, flags=re.MULTILINE))
    circle = TOPOLOGIES / "own" / "circle.yaml"
    said = testbed("data", circle)
    assert said.code == 0, said.err
    assert said.out.startswith(
        "circle:Circle, natural partition: 1,200 training samples of shape 2 for 30 devices, 300 samples"
    )
    run = simulate(circle, runs=tmp_path / "runs")
    assert run.evaluations["accuracy"].iloc[-1] > 0.8


def test_data_command_shows_the_devices_samples(folder: Path, testbed: Testbed, tmp_path: Path) -> None:
    path = changed(
        folder, "local:", "partition: {scheme: pathological, classes_per_client: 1}\n  local:"
    )
    said = testbed("data", path, "--figure", tmp_path / "data.png")
    assert said.code == 0, said.err
    assert "80 training samples of shape 8×8 for 4 devices, 20 samples for evaluation" in said.out
    assert "Of 100 training samples, 20 to test were set aside, at random (seed 0)." in said.out
    assert re.search(r"^pi-1 +\d+ +1 +0+ *$", said.out, re.MULTILINE)
    assert (tmp_path / "data.png").stat().st_size > 10_000
    shown = json.loads(testbed("data", path, "--json").out)
    assert shown["devices"][0]["labels"][1:] == [0] * (len(shown["devices"][0]["labels"]) - 1)


def test_large_fleet_is_shown_by_group_and_size(testbed: Testbed, tmp_path: Path) -> None:
    text = OWN.replace(
        "data: {path: mine, input: x, label: y}", "partition: {scheme: power_law, min_samples: 1}"
    )
    text = text.replace("count: 4", "count: 600").replace(
        "stop", "  - {name: nano, count: 400, timing: 1s}\nstop"
    )
    path = tmp_path / "many.yaml"
    path.write_text(text, encoding="utf-8")
    said = testbed("data", path, "--figure", tmp_path / "many.png")
    assert said.code == 0, said.err
    assert len(said.out.splitlines()) < 30
    assert re.search(r"^nano +400 +1 +1 ", said.out, re.MULTILINE)
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_regression_targets_are_not_counted_as_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path / "table", {"age": np.arange(60), "pay": rng.random(60), "price": rng.random(60)})
    read_so = read(tmp_path / "table", input=("age", "pay"), label="price")
    assert read_so.train.x.shape == (48, 2)
    assert read_so.train.x.dtype == read_so.train.y.dtype == np.float32
    indices = {"a": np.arange(24), "b": np.arange(24, 48)}
    assert preparation.label_counts(Prepared(read_so.train, read_so.test, indices)) == {"a": [], "b": []}


def test_text_becomes_alphabet_indices(tmp_path: Path) -> None:
    write(tmp_path, {"x": ["abc", "cb"], "y": ["a", "c"]})
    write(tmp_path, {"x": ["zcba"], "y": ["b"]}, "test.parquet")
    found = read(tmp_path, label="y", alphabet="abc", length=3)
    assert found.train.x.tolist() == [[0, 1, 2], [2, 1, 0]]  # the shorter one is filled up with 0
    assert found.train.x.dtype.kind == "i"
    assert found.train.y.tolist() == [0, 2]
    assert found.test.x.tolist() == [[0, 2, 1]]  # z is unknown, a is cut off
    with pytest.raises(BadInputError, match=r"row 0: 'd' is not in the alphabet: add it"):
        read(write(tmp_path / "two", {"x": ["abc"], "y": ["d"]}), label="y", alphabet="abc")
    with pytest.raises(BadInputError, match=r"row 1: a text of 2 .* add length, such as length: 3"):
        read(tmp_path, label="y", alphabet="abc")
    with pytest.raises(BadInputError, match=r"has texts here: add alphabet"):
        read(tmp_path, label="y")


def test_list_columns_are_tokens_or_numbers(tmp_path: Path) -> None:
    write(tmp_path, {"x": [[7, 8, 300], [9]], "v": [[0.5], [1.5]], "y": [0, 1]})
    write(tmp_path, {"x": [[1, 2, 3]], "v": [[2.5]], "y": [0]}, "test.parquet")
    found = read(tmp_path, label="y", length=2)
    assert found.train.x.tolist() == [[7, 8], [9, 0]]
    assert found.train.x.dtype == np.int8  # 300 is cut off
    assert read(tmp_path, input=("v",), label="y").train.x.tolist() == [[0.5], [1.5]]
    with pytest.raises(BadInputError, match="row 1: 1 values where another has 3"):
        read(tmp_path, label="y")


def test_sample_without_a_label_is_its_own_target(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.full((4, 2, 2), 51, np.uint8))
    np.savez(tmp_path / "test.npz", x=np.zeros((1, 2, 2), np.uint8))
    train = read(tmp_path).train
    assert train.y.dtype == np.float32
    assert train.y == pytest.approx(np.full((4, 2, 2), 0.2))  # as the model gets it


def test_text_labels_become_classes_in_alphabetical_order(tmp_path: Path) -> None:
    write(tmp_path, {"x": [1.0, 2.0, 3.0], "y": ["dog", "ant", "cat"]})
    write(tmp_path, {"x": [4.0], "y": ["cat"]}, "test.parquet")
    found = read(tmp_path, label="y")
    assert found.train.y.tolist() == [2, 0, 1]
    assert found.test.y.tolist() == [1]
    assert found.remarks == ("Labels are texts, numbered as 3 classes: 0 ant, 1 cat, 2 dog.",)
    write(tmp_path, {"x": [4.0], "y": ["cow"]}, "test.parquet")
    with pytest.raises(BadInputError, match=r"test\.parquet has samples of class 'cow'"):
        read(tmp_path, label="y")
    names = [f"{number:03}" for number in range(500)]
    many = {"x": [float(name) for name in names], "y": [*names[:-1], 30 * "z"]}
    (remark, *_) = read(write(tmp_path / "many", many), label="y").remarks
    assert remark.startswith("Labels are texts, numbered as 500 classes: 0 000, 1 001, ")
    assert remark.endswith(f", 17 017, …, 499 {19 * 'z'}….")


def test_splits_must_have_equal_columns(tmp_path: Path) -> None:
    write(tmp_path, {"x": [[1.0, 2.0]], "y": [0]})
    write(tmp_path, {"x": [[1.0]], "y": [0]}, "test.parquet")
    with pytest.raises(
        BadInputError, match="has float32, shape 1, but the training samples have float32"
    ):
        read(tmp_path, label="y")
    write(tmp_path, {"x": [[1.0, 2.0]], "y": [0.5]}, "test.parquet")
    with pytest.raises(BadInputError, match="has float32, but the training samples have int64"):
        read(tmp_path, label="y")


def test_missing_test_split_is_created(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=np.arange(1000.0), y=np.arange(1000))
    found = read(tmp_path, label="y", split=Split(test=0.2, validation=0.1, seed=3))
    assert found.validation is not None
    parts = [part.y.tolist() for part in (found.train, found.test, found.validation)]
    assert [len(part) for part in parts] == [700, 200, 100]
    assert sorted(itertools.chain(*parts)) == list(range(1000))
    assert max(parts[1]) > 900 > 100 > min(parts[1])
    assert found.remarks == (
        "Of 1,000 training samples, 200 to test and 100 to validate were set aside, at random (seed 3).",
    )
    other = read(tmp_path, label="y", split=Split(test=0.2, validation=0.1, seed=4))
    assert other.test.y.tolist() != parts[1]


def test_last_samples_of_each_client_are_held_out_without_overlap(tmp_path: Path) -> None:
    write(tmp_path, {"x": np.arange(30.0), "y": np.arange(30), "who": ["b", "a", "a"] * 10})
    split = Split(test=0.2, order="file", gap=1)
    found = read(tmp_path, label="y", client="who", split=split)
    bees, ants = [k for k in range(30) if k % 3 == 0], [k for k in range(30) if k % 3]
    assert found.test.y.tolist() == sorted([*bees[-2:], *ants[-4:]])
    assert found.train.y.tolist() == sorted([*bees[:-3], *ants[:-5]])
    assert found.clients is not None
    assert found.clients.tolist() == [0 if k % 3 else 1 for k in found.train.y.tolist()]
    assert "2 that overlap with these were left out" in found.remarks[0]


def test_models_may_be_evaluated_on_a_validation_set(folder: Path) -> None:
    path = changed(folder, "label: y}", "label: y, split: {validation: 10%}}")
    changed(folder, "stop:", "evaluate: {on: validation}\nstop:")
    assert len(prepared(path).test) == 10


def test_files_of_a_dataset_configuration_are_in_its_folder(tmp_path: Path) -> None:
    """The hub's own parquet files are laid out so."""
    for name in ("one", "two"):
        for split in ("train", "test"):
            write(tmp_path / "a" / "b" / name / split, {"x": [1.0], "y": [len(name)]}, "0000.parquet")
    whole = DataSettings(hub="a/b", input=("x",), label="y")
    one = datasets.load_from(Columns(whole.model_copy(update={"config": "one"})), tmp_path)
    assert one.train.y.tolist() == [3]
    with pytest.raises(BadInputError, match="has several configurations: add one of one, two"):
        datasets.load_from(Columns(whole), tmp_path)


def test_a_known_dataset_needs_no_columns() -> None:
    text = OWN.replace("path: mine, input: x, label: y", "hub: ylecun/mnist, split: {validation: 10%}")
    found = datasets.source(topology.parse(text))
    assert isinstance(found, Columns)
    assert (found.data.input, found.data.label, found.data.split.validation) == (
        ("image",),
        "label",
        0.1,
    )


def test_shakespeare_is_dealt_out_by_role(data_root: Path) -> None:
    text = OWN.replace("path: mine, input: x, label: y", "hub: flwrlabs/shakespeare")
    text = text.replace("local:", "partition: {scheme: natural, min_samples: 100}\n  local:")
    found = preparation.prepare(topology.parse(text.replace("count: 4", "count: 20")), data_root)
    assert found.train.x.shape[1:] == (80,)
    assert found.train.x.dtype.kind == "i"
    assert 0 <= found.train.x.min() <= found.train.x.max() < 80
    assert min(map(len, found.indices.values())) >= 100
    whole = datasets.load("flwrlabs/shakespeare", data_root)
    assert whole.clients is not None
    roles = [set(whole.clients[own].tolist()) for own in found.indices.values()]
    assert all(len(role) == 1 for role in roles)
    assert len(set.union(*roles)) == 20
    assert len(whole.test) == pytest.approx(0.1 * 125_683, rel=0.01)


WRONG = [
    (
        "digits-logreg",
        "quadratic\n  centers: [[0], [1], [2], [3]]",
        "5:3: task.data: the task quadratic has its own",
    ),
    ("label: y", "label: digit", "4:39: task.data.label: found 'digit', expected a column of"),
    ("input: x", "input: [x, z]", "4:29: task.data.input: found 'z', expected a column of"),
    ("path: mine", "path: his", "4:16: task.data.path: "),
    ("path: mine, ", "", "4:9: task.data: found neither hub nor path"),
    ("path: mine, input: x", "hub: some/thing", "4:9: task.data: input is missing"),
    ("input: x, ", "", "input: x; of a folder of images it is image, and the label is label"),
    ("input: x", "input: []", "4:29: task.data.input: found a list, expected a column such as image"),
    (
        "y}",
        'y, alphabet: ""}',
        "task.data.alphabet: found '', expected the characters that the model kn",
    ),
    ("label: y}", "label: y, test: dev}", "4:48: task.data.test: there is no split 'dev' next to"),
    (
        "label: y}",
        "label: y, split: {gap: 3}}",
        "4:55: task.data.split.gap: needs order: file",
    ),
    (
        "label: y}",
        "label: y, split: {test: 100%}}",
        "4:56: task.data.split.test: found '100%', expected a share of at least 0",
    ),
    (
        "local:",
        "partition: {scheme: natural}\n  local:",
        "5:23: task.partition.scheme: the client of a sample is unknown",
    ),
    ("count: 4", "count: 9", "3:3: task.partition: 9 devices for 80 training samples: each needs at"),
    (
        "timing: 1s",
        "timing: 1s, data: {labels: [0, 1]}",
        "8:53: devices[0].data.labels: needs samples",
    ),
    (
        "timing: 1s",
        "timing: 1s, data: {samples: 5, labels: [12]}",
        "8:65: devices[0].data.labels: no training sample has class 12, expected classes from 0 to 9",
    ),
    (
        "timing: 1s",
        "timing: 1s, data: {samples: 5, labels: [1]}",
        "devices[0].data.samples: pi-2 needs 5 samples of class 1",
    ),
    (
        "timing: 1s",
        "timing: 1s, data: {transform: {scale: [2, 1]}}",
        "8:64: devices[0].data.transform.scale: found a list, expected a number of at least 0",
    ),
]


@pytest.mark.parametrize(("old", "new", "told"), WRONG)
def test_invalid_data_settings_are_reported_with_their_place(
    folder: Path, old: str, new: str, told: str, testbed: Testbed
) -> None:
    path = changed(folder, old, new)
    said = testbed("data", path)
    assert said.code == 2
    assert f"{path}:" in said.err
    assert told in said.err


@pytest.mark.parametrize("options", [(), ("-d",)])
def test_refused_data_leave_no_run_directory(
    folder: Path, testbed: Testbed, options: tuple[str, ...]
) -> None:
    path, runs = changed(folder, "path: mine", "path: his"), folder / "runs"
    said = testbed("up", path, "--runtime", "virtual", "--runs", runs, *options)
    assert said.code == 2
    assert "task.data.path: " in said.err
    assert "his does not exist" in said.err
    assert "Run directory" not in said.out
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_csv_columns_are_numbers_and_names(tmp_path: Path, suffix: str, separator: str) -> None:
    rows = ["age,income,y", "30,1.5,no", "41,2.5,yes", "52,3.5,yes"]
    text = "\n".join(rows).replace(",", separator) + "\n"
    (tmp_path / f"train.{suffix}").write_text(text, encoding="utf-8")
    (tmp_path / f"test.{suffix}").write_text(text, encoding="utf-8")
    found = read(tmp_path, input=("age", "income"), label="y")
    assert found.train.x.tolist() == [[30, 1.5], [41, 2.5], [52, 3.5]]
    assert found.train.y.tolist() == [0, 1, 1]
    assert found.test.y.tolist() == [0, 1, 1]
    quoted = text.replace("no", '"NA"')  # a name, and no missing value
    (tmp_path / f"train.{suffix}").write_text(quoted, encoding="utf-8")
    assert read(tmp_path, input=("age",), label="y", test="train").train.y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x,y\n1,0\n2\n", "not readable as CSV"),
        ("x,y\n1,0\n,1\n", "row 1: value is missing"),
        ("", "not readable as CSV"),
        ("a,b\n1,0\n", "x"),
        ("x,y\n1,ant\n2,\n", "column y, row 1: value is missing"),
        ("x,x,y\n1,2,0\n", "several columns 'x'"),
        ("x,y\n1,b\u00e4r\n", "column y is not UTF-8"),
        ("x,gr\u00f6\u00dfe\n1,0\n", "not UTF-8"),
        ("x;y;z\n1,5;0;1\n", "commas between the columns"),
    ],
)
def test_damaged_csv_is_reported_with_its_place(folder: Path, text: str, told: str) -> None:
    (folder / "mine.csv").write_text(text, encoding="latin-1")
    with pytest.raises(BadInputError, match=re.escape(told)):
        prepared(changed(folder, "path: mine", "path: mine.csv"))
    (folder / "mine.csv").write_text("x,z,y\n1,2,0\n3,?,0\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"column z.*row 1: '\?'"):
        prepared(changed(folder, "input: x", "input: [x, z]"))
    (folder / "mine.xlsx").write_bytes(b"PK")
    with pytest.raises(BadInputError, match=r"mine.xlsx: expected files of one type, of parquet, npz"):
        prepared(changed(folder, "path: mine.csv", "path: mine.xlsx"))


def test_images_in_folders_by_class_are_read(tmp_path: Path) -> None:
    for split, counts in (("train", {"cat": 3, "ant": 2}), ("test", {"cat": 1})):
        for name, count in counts.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((4, 5), 10 * len(name) + number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    found = read(tmp_path, input=("image",), label="label")
    assert found.train.x.shape == (5, 4, 5)
    assert found.train.y.tolist() == [0, 0, 1, 1, 1]
    assert found.test.y.tolist() == [1]
    assert found.train.x[3].tolist() == [[31] * 5] * 4


@pytest.mark.parametrize("names", ["{split}_{kind}", "{kind}_{split}"], ids=["MedMNIST", "Keras"])
def test_npz_file_may_hold_all_splits(folder: Path, testbed: Testbed, names: str) -> None:
    """As MedMNIST and Keras publish them: colour channels last, each label in a row of its own."""
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("val", 20), ("test", 30)):
        pixels = np.arange(count * 8 * 9 * 3).reshape(count, 8, 9, 3) % 256
        arrays[names.format(split=split, kind="x")] = pixels.astype(np.uint8)
        arrays[names.format(split=split, kind="y")] = np.arange(count, dtype=np.uint8)[:, None] % 10
    np.savez(folder / "all.npz", **arrays)
    found = read(folder / "all.npz", label="y", validation="val")
    assert found.validation is not None
    assert [len(one) for one in (found.train, found.validation, found.test)] == [40, 20, 30]
    assert found.train.x.shape[1:] == (3, 8, 9)
    assert found.train.x[0, :, 0, 1].tolist() == [3, 4, 5]
    assert found.test.y.tolist() == [*range(10)] * 3
    assert found.remarks == ("Images of shape 8×9×3 have their channels last: models get 3×8×9.",)
    changed(folder, "path: mine,", "path: all.npz,")
    said = testbed(
        "data", changed(folder, "input: x", f"input: {names.format(split='train', kind='x')}")
    )
    assert (said.code, "to read x_train and x_test as splits, set input: x" in said.err) == (2, True)


def test_grey_images_lose_their_channel_and_other_arrays_keep_their_shape(tmp_path: Path) -> None:
    for shape, kept in (
        ((8, 9, 1), (8, 9)),
        ((3, 8, 9), (3, 8, 9)),
        ((8, 9, 5), (8, 9, 5)),
        ((2, 9, 3), (2, 9, 3)),
    ):
        for kind in (np.uint8, np.float32):
            np.savez(tmp_path / "train.npz", x=np.zeros((20, *shape), kind), y=np.arange(20) % 2)
            assert read(tmp_path, label="y").train.x.shape[1:] == kept


def test_one_hot_labels_become_classes(tmp_path: Path) -> None:
    classes = np.arange(20) % 3
    one_hot = np.eye(3)[classes]
    for y in (one_hot, one_hot.astype(np.uint8), one_hot.astype(bool)):
        np.savez(tmp_path / "train.npz", x=np.arange(20.0), y=y)
        np.savez(tmp_path / "test.npz", x=np.arange(20.0), y=classes)
        found = read(tmp_path, label="y")
        assert found.train.y.tolist() == found.test.y.tolist() == classes.tolist()
        assert found.remarks == ("Labels are one-hot: they become classes 0 to 2.",)
    several = np.where(np.arange(20) == 7, 1, one_hot.T).T  # sample 7 is of all classes
    np.savez(tmp_path / "train.npz", x=np.arange(20.0), y=several)
    np.savez(tmp_path / "test.npz", x=np.arange(20.0), y=one_hot)
    found = read(tmp_path, label="y")
    assert found.train.y.shape == found.test.y.shape == (20, 3)


def test_arrays_of_an_own_task_keep_their_shape(tmp_path: Path) -> None:
    """The model is the user's own, too: no shape has to be guessed."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "from torch import nn\n"
        "from agents.tasks.interface import Task\n"
        "@dataclass(frozen=True)\n"
        "class Own(Task):\n"
        "    def dataset(self):\n"
        "        return {'train': {'x': np.zeros((20, 8, 9, 3), np.float32), 'y': np.eye(20)}}\n"
        "    def model(self):\n"
        "        return nn.Linear(3, 20)\n",
        encoding="utf-8",
    )
    text = OWN.replace("digits-logreg", '"mine:Own"').replace(
        "  data: {path: mine, input: x, label: y}\n", ""
    )
    (tmp_path / "own.yaml").write_text(f"code: mine.py\n{text}", encoding="utf-8")
    source = datasets.source(topology.load(tmp_path / "own.yaml"))
    assert source is not None
    found = datasets.load_from(source, None)
    assert found.train.x.shape[1:] == (8, 9, 3)
    assert found.train.y.shape[1:] == (20,)


_DAY = datetime.datetime(1970, 1, 2, 0, 0, 1, 500_000, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([decimal.Decimal("1.25"), decimal.Decimal("-2.5")], pa.decimal128(6, 2), [[1.25], [-2.5]]),
        ([_DAY] * 2, pa.timestamp("ns", "UTC"), [[86_401.5]] * 2),
        ([_DAY.replace(tzinfo=None)] * 2, pa.timestamp("ms"), [[86_401.5]] * 2),
        ([_DAY.date()] * 2, pa.date32(), [[86_400]] * 2),
        ([_DAY.time()] * 2, pa.time64("us"), [[1.5]] * 2),
        ([datetime.timedelta(minutes=2)] * 2, pa.duration("s"), [[120]] * 2),
        ([[1, 2], [3, 4]], pa.list_view(pa.int64()), [[1, 2], [3, 4]]),
        ([[0.5], [2.5]], pa.large_list_view(pa.float64()), [[0.5], [2.5]]),
        (["ab", "ba"], pa.string_view(), [[0, 1], [1, 0]]),
    ],
    ids=str,
)
def test_parquet_columns_of_rare_types_are_read(
    tmp_path: Path, values: list[Any], kind: pa.DataType, wanted: list[Any]
) -> None:
    table = pa.table(
        {"x": pa.array(values * 5, kind), "y": pa.array(["no", "yes"] * 5, pa.string_view())}
    )
    pq.write_table(table, tmp_path / "train.parquet")
    pq.write_table(table, tmp_path / "test.parquet")
    found = read(tmp_path, label="y", **({"alphabet": "ab"} if pa.types.is_string_view(kind) else {}))
    assert found.test.x.tolist() == wanted * 5
    assert found.test.y.tolist() == [0, 1] * 5


@pytest.mark.parametrize("kind", [pa.binary_view(), pa.binary(len(_PNG))], ids=str)
def test_binary_columns_of_rare_types_are_images(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"x": pa.array([_PNG] * 10, kind)}), tmp_path / "train.parquet")
    assert read(tmp_path).train.x.shape[1:] == (3, 6, 6)


def test_missing_value_inside_a_list_is_reported_at_its_sample(tmp_path: Path) -> None:
    """The third sample of the second batch of 1,000; the lists before it are not of one length."""
    values: list[list[float | None]] = [[0.5] * (row % 7 + 1) for row in range(1010)]
    values[1003] = [1.0, None]
    write(tmp_path / "flat", {"x": values})
    with pytest.raises(BadInputError, match="column x, row 1003: value is missing"):
        read(tmp_path / "flat", length=8)
    nested: list[Any] = [[[0.5, 1.5], [2.5, 3.5]]] * 10
    nested[3] = [[0.5, 1.5], [2.5, None]]
    write(tmp_path / "nested", {"x": nested})
    with pytest.raises(BadInputError, match="column x, row 3: value is missing"):
        read(tmp_path / "nested")


def test_labels_that_do_not_fit_the_model_are_reported(folder: Path, testbed: Testbed) -> None:
    mine, x = folder / "mine" / "all.npz", np.zeros((60, 8, 8), np.uint8)
    for y, told in (
        (np.arange(60) % 12, "found class 11, but the model has 10 outputs, for classes 0 to 9"),
        (np.arange(60) % 10 - 1, "row 0: found class -1, expected 0 or more"),
        (np.arange(60) / 60, "which needs integer classes, but the labels are float32"),
        (np.where(np.arange(60) == 7, np.nan, 0.5), "row 7: value is not a number"),
    ):
        np.savez(mine, x=x, y=y)
        said = testbed("data", folder / "own.yaml")
        assert (said.code, told in said.err) == (2, True), said.err
        assert "own.yaml:4:39: task.data.label" in said.err
    np.savez(mine, x=np.zeros((60, 9, 9), np.uint8), y=np.arange(60) % 10)
    assert (
        "digits-logreg does not accept inputs of shape 9×9" in testbed("data", folder / "own.yaml").err
    )
    np.savez(mine, x=x, y=np.array([{}] * 60, dtype=object))
    assert "not readable as .npz without pickled objects" in testbed("data", folder / "own.yaml").err
    mine.write_bytes(b"PK torn")
    assert "not readable as .npz" in testbed("data", folder / "own.yaml").err
    mine.unlink()
    np.savez(mine.with_name("train.npz"), x=x, y=np.arange(60) % 10)
    np.savez(mine.with_name("test.npz"), x=x, y=np.arange(60) % 11)
    said = testbed("data", folder / "own.yaml")
    assert "of the test set, found class 10, but the model has 10 outputs" in " ".join(said.err.split())


def test_samples_without_classes_need_class_free_schemes(folder: Path) -> None:
    np.savez(folder / "mine" / "all.npz", x=np.zeros((60, 8)), y=np.arange(60) / 60)
    path = changed(folder, "local:", "partition: {scheme: iid}\n  local:")
    assert [len(own) for own in prepared(path).indices.values()] == [12] * 4
    changed(folder, "scheme: iid", "scheme: dirichlet, alpha: 1")
    with pytest.raises(BadInputError, match=r"5:23: .* by their class, but the labels are not classes"):
        prepared(path)


HAND = """\
name: hand
task: {name: digits-logreg, partition: {scheme: iid}, local: {steps: 2}}
rule: {name: fedasync}
devices:
  - {name: rest, count: 2, timing: 1s}
  - {name: zero, count: 2, timing: 1s, data: {samples: 50, labels: [0]}}
  - {name: any, timing: 1s, data: {samples: 300}}
stop: {updates: 3}
"""


def test_explicit_sample_counts_are_served_first() -> None:
    parsed = topology.parse(HAND)
    found = preparation.prepare(parsed, None)
    assert {name: len(own) for name, own in found.indices.items()} == {
        "rest-1": 519, "rest-2": 518, "zero-1": 50, "zero-2": 50, "any": 300,
    }  # fmt: skip
    assert sorted(np.concatenate([*found.indices.values()])) == list(range(1437))
    counts = preparation.label_counts(found)
    assert counts["zero-2"][1:] == [0] * 9
    # Of the 42 zeros left among 1,337: a draw in the order of the first would have none.
    assert counts["any"][0] == pytest.approx(300 * 42 / 1337, abs=8)
    assert preparation.known_samples(parsed, None) == {
        name: len(own) for name, own in found.indices.items()
    }
    other = preparation.prepare(topology.parse(HAND.replace("name: hand", "name: hand\nseed: 1")), None)
    assert other.indices["any"].tolist() != found.indices["any"].tolist()
    without = HAND.replace("  - {name: rest, count: 2, timing: 1s}\n", "")
    assert preparation.prepare(topology.parse(without), None).remarks == (
        "1,037 of 1,437 training samples are left out: no device gets them.",
    )


def _with_transform(transform: str) -> Prepared:
    text = HAND.replace("{samples: 300}", f"{{samples: 300, transform: {transform}}}")
    return preparation.prepare(topology.parse(text), None)


def test_transform_affects_only_its_device_and_applies_to_the_models_input() -> None:
    plain, turned, half, noisy, again = (
        _with_transform(each)
        for each in ("{}", "{rotate: 90}", "{scale: 0.5}", "{noise: 0.25}", "{noise: 0.25}")
    )
    before, after = plain.shard("any"), turned.shard("any")
    assert np.array_equal(np.rot90(before.x, axes=(1, 2)), after.x)
    assert np.array_equal(before.y, after.y)
    for name in ("rest-1", "zero-1"):
        assert np.array_equal(plain.shard(name).x, turned.shard(name).x)
    assert (turned.total, len(turned.train)) == (1437, 1437 + 300)
    assert np.array_equal(plain.test.x, turned.test.x)
    values = before.x.astype(float)
    assert np.array_equal(half.shard("any").x, (values / 2).round())
    inner = values == 8  # far from 0, below which a pixel is not
    added = (noisy.shard("any").x.astype(float) - values)[inner] / 16
    assert added.std() == pytest.approx(0.25, rel=0.1)
    assert added.mean() == pytest.approx(0.0, abs=0.02)
    assert np.array_equal(again.shard("any").x, noisy.shard("any").x)


def test_each_device_draws_its_own_transform_also_of_shared_samples() -> None:
    text = HAND.replace("labels: [0]}", "labels: [0], transform: {scale: [0.1, 1]}}")
    plain, found = (preparation.prepare(topology.parse(one), None) for one in (HAND, text))
    ratios = [found.shard(name).x.sum() / plain.shard(name).x.sum() for name in ("zero-1", "zero-2")]
    assert all(0.1 < ratio < 1 for ratio in ratios)
    assert abs(ratios[0] - ratios[1]) > 0.01
    text = HAND.replace("scheme: iid", "scheme: resampled, samples: 1000").replace(
        "count: 2, timing: 1s}", "count: 2, timing: 1s, data: {transform: {scale: 0}}}"
    )
    found = preparation.prepare(topology.parse(text), None)
    assert found.shard("rest-1").x.max() == 0
    assert found.shard("any").x.max() == 16


def test_simulate_uses_the_data_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        columns = {"v": [[float(k)] * 64 for k in range(50)], "c": [k % 10 for k in range(50)]}
        write(tmp_path / "root" / "my" / "set", columns, f"{split}-00000-of-00001.parquet")
    text = OWN.replace("path: mine, input: x, label: y", "hub: my/set, input: v, label: c")
    monkeypatch.setenv("TESTBED_DATA", str(tmp_path / "root"))
    assert len(simulate(text, runs=tmp_path / "runs").updates) == 3
    monkeypatch.delenv("TESTBED_DATA")
    assert len(simulate(text, runs=tmp_path / "runs", data=tmp_path / "root").updates) == 3


def test_byte_lists_are_tokens_or_pixels_as_declared(tmp_path: Path) -> None:
    flat = write(tmp_path / "flat", {"x": [np.array([7, 200], np.uint8)] * 4, "y": [0, 1, 0, 1]})
    with pytest.raises(BadInputError, match="tokens or pixels: if they are tokens, add length: 2"):
        read(flat, label="y")
    tokens = read(flat, label="y", length=2).train
    assert (tokens.x[0].tolist(), tokens.x.dtype.kind, tokens.scale) == ([7, 200], "i", 1.0)
    rows = [[np.array([7, 200], np.uint8)] * 3] * 4
    pixels = read(write(tmp_path / "rows", {"x": rows, "y": [0, 1, 0, 1]}), label="y").train
    assert (pixels.x.shape[1:], pixels.scale) == ((3, 2), 1 / 255)


def test_tokens_reach_the_model_as_integers() -> None:
    import torch

    from agents.shards import model_inputs

    tokens = Shard(np.array([[1, 2]], np.int8), np.zeros(1, np.int64))
    assert model_inputs(torch.from_numpy(tokens.x), 1.0).dtype == torch.int64
    pixels = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert model_inputs(pixels, 1 / 255).tolist() == [[0.0, 1.0]]


def test_numeric_client_ids_are_equal_across_batches(tmp_path: Path) -> None:
    """Batches have at most 1,000 rows; numbers may have up to 20 digits."""
    numbers = [7, 12] * 600 + [7, 10**13] * 600 + [2**64 - 1]
    columns = {"x": np.arange(2401.0), "y": np.arange(2401) % 2, "who": np.array(numbers, np.uint64)}
    found = read(write(tmp_path, columns), label="y", client="who", split=Split(test=0.2))
    assert found.clients is not None
    assert set(found.clients.tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize(("mode", "shape"), [("1", (6, 6)), ("LA", (6, 6)), ("RGBA", (3, 6, 6))])
def test_images_are_grey_or_colour_and_have_8_bits(
    tmp_path: Path, mode: str, shape: tuple[int, ...]
) -> None:
    write(tmp_path, {"x": [_png(mode)] * 10, "y": np.arange(10) % 2})
    assert read(tmp_path, label="y", split=Split(test=0.2)).train.x.shape[1:] == shape
    write(tmp_path, {"x": [_png("I;16")] * 10, "y": np.arange(10) % 2})
    # A conversion would make white of all that is above 255.
    with pytest.raises(BadInputError, match=r"row 0: its pixels have more than 8 bits \(mode I;16\)"):
        read(tmp_path, label="y", split=Split(test=0.2))
