"""Datasets: from files of the user, from parquet files under a data root in the layout of the Hugging
Face hub, or from the hub itself.

Decoded arrays are kept in the user's cache, because decoding 70,000 images takes seconds. To add a
dataset, add a row to DATASETS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from agents import shards
from agents.disk import files
from agents.shards import Shard
from testbed import console
from testbed.console import Report, silent
from testbed.data import columns, data_files
from testbed.data.columns import DataError, DecodedSplit, RawSplit
from testbed.errors import BadInputError
from testbed.host import cache
from testbed.topology import Topology
from testbed.topology.data_settings import DataSettings, Split
from testbed.topology.partition import Indices
from testbed.user_code import TaskStandIn


@dataclass(frozen=True, slots=True)
class Dataset:
    train: Shard
    test: Shard
    validation: Shard | None = None
    clients: Indices | None = None
    """Number of the client of each sample of `train`, from 0, shape (n,)."""
    remarks: tuple[str, ...] = ()
    """Sentences about training samples that were set aside, and about changed shapes."""
    classes: tuple[str, ...] = ()
    """In the order of their numbers; empty if the classes have no names besides."""


@dataclass(frozen=True, slots=True)
class LocatedDataset:
    fingerprint: str
    """Changes whenever `read` might return something else."""
    read: Callable[[Report], Dataset]
    """Decoding takes seconds. Raises BadInputError, HostError."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Samples in columns of files, on this machine or on the Hugging Face hub."""

    data: DataSettings
    shape: tuple[int, ...] | None = None
    """Shape of one input. Without it (it may be unknown until the data is read), the work of a step
    cannot be counted."""
    tokens: bool = False
    """Whether inputs are sequences of tokens. A model gets tokens as integers."""

    @property
    def name(self) -> str:
        return self.data.name

    def find(self, root: Path | None) -> LocatedDataset:
        """If this machine does not have the dataset, find it on the hub. `root`: data root."""
        splits = data_files.local_splits(self.data, root)
        if splits is None:
            return LocatedDataset(digest(("hub", *self._facts())), self._fetch)
        stats = [(str(path), path.stat()) for path in splits.files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        left = [data_files.left_out(paths) for paths in (splits.train, splits.test, splits.validation)]
        return LocatedDataset(
            digest((facts, left, *self._facts())), lambda report: self._read_files(splits, report)
        )

    def _facts(self) -> tuple[object, ...]:
        sources = (Path(file).read_bytes() for file in (columns.__file__, data_files.__file__))
        return self.data, *sources, _SPLIT_VERSION

    def _read_files(self, splits: data_files.Splits, report: Report) -> Dataset:
        names = (self.data.train, self.data.test, self.data.validation)
        train, test, validation = (
            data_files.open_split(paths, splits.named(name)) if paths else None
            for paths, name in zip((splits.train, splits.test, splits.validation), names, strict=True)
        )
        assert train is not None  # noqa: S101  (`local_splits` found them)
        return self.read(train, test, validation, report)

    def _fetch(self, report: Report) -> Dataset:
        data = self.data
        with data_files.fetch_splits(data, report) as splits:
            if data.train not in splits:
                raise DataError("train", f"found {data.train!r}, expected one of {', '.join(splits)}")
            validation = splits.get(data.validation) if data.validation else None
            return self.read(splits[data.train], splits.get(data.test), validation, report)

    def read(
        self,
        train: RawSplit,
        test: RawSplit | None,
        validation: RawSplit | None,
        report: Report = silent,
    ) -> Dataset:
        """Raises DataError."""
        data = self.data
        total = sum(split.rows for split in (train, test, validation) if split is not None)
        progress, read = console.ProgressReporter(report, f"Decoding {self.name}"), 0

        def decode(
            split: RawSplit, data: DataSettings, train: DecodedSplit | None = None
        ) -> DecodedSplit:
            nonlocal read
            samples = columns.read(split, data, train, lambda done: progress(read + done, total))
            read += split.rows
            return samples

        for key, given, split in (
            ("test", data.test, test),
            ("validation", data.validation, validation),
        ):
            if key in data.model_fields_set and given is not None and split is None:
                raise DataError(key, f"there is no split {given!r} next to {train.name}")
        samples = decode(train, data)

        def decode_other(split: RawSplit | None) -> Shard | None:
            if split is None:
                return None
            shard = decode(split, data.model_copy(update={"client": None}), samples).shard
            _check_alike(samples.shard, shard, split.name)
            return shard

        whole = _split(samples, decode_other(test), decode_other(validation), data.split)
        names = samples.classes if samples.classes != (*map(str, range(len(samples.classes))),) else ()
        return replace(whole, remarks=(*samples.remarks, *whole.remarks), classes=names)


_SPLIT_VERSION = 1
"""Version of the results of `_split` in the cache. Increase it whenever a change of `_split` changes its
results."""


def _check_alike(train: Shard, other: Shard, name: str) -> None:
    for key, own, its in (("input", train.x, other.x), ("label", train.y, other.y)):
        if own.shape[1:] != its.shape[1:] or own.dtype.kind != its.dtype.kind:
            raise DataError(
                key,
                f"{name} has {array_kind(its)}, but the training samples have {array_kind(own)}: "
                "they must be the same",
            )


def _split(samples: DecodedSplit, test: Shard | None, validation: Shard | None, split: Split) -> Dataset:
    """If test or validation samples are missing, set training samples aside, according to `split`."""
    shard, clients = samples.shard, samples.clients
    shares = [0.0 if test else split.test, 0.0 if validation else split.validation]
    if test is None and not split.test:
        raise DataError(
            "split", "the data has no test split, and test: 0 sets nothing aside: increase it"
        )
    if test is not None and not any(shares):
        return Dataset(shard, test, validation, clients)
    if split.order == "random":
        groups = [np.random.default_rng(split.seed).permutation(len(shard))]
    else:
        groups = _runs(clients, len(shard))
    kept: list[Indices] = []
    held_out: tuple[list[Indices], list[Indices]] = ([], [])
    for group in groups:
        end = len(group)
        for share, chunks in zip(shares, held_out, strict=True):
            count = round(share * len(group))
            if count and end - count - split.gap > 0:
                chunks.append(group[end - count : end])
                end -= count + split.gap
        kept.append(group[:end])
    chosen = np.sort(np.concatenate(kept))
    aside = [np.sort(np.concatenate(one)) if one else np.empty(0, np.int64) for one in held_out]
    sizes = [len(indices) for indices in aside]
    if not len(chosen) or any(share and not size for share, size in zip(shares, sizes, strict=True)):
        raise DataError("split", f"{len(shard)} samples are too few for this split: increase its shares")
    how = f"at random (seed {split.seed})" if split.order == "random" else "those last in the file"
    names = [f"{size:,} to {use}" for size, use in zip(sizes, ("test", "validate"), strict=True) if size]
    lost = len(shard) - len(chosen) - sum(sizes)
    overlap = f"; {lost:,} that overlap with these were left out" if lost else ""
    remark = f"Of {len(shard):,} training samples, {' and '.join(names)} were set aside, {how}{overlap}."
    return Dataset(
        shard.subset(chosen),
        test or shard.subset(aside[0]),
        validation or (shard.subset(aside[1]) if sizes[1] else None),
        None if clients is None else clients[chosen],
        (remark,),
    )


def _runs(clients: Indices | None, samples: int) -> list[Indices]:
    """Return one array per client with the indices of its samples, in the order of the file. Without
    named clients, return one array with all indices."""
    if clients is None:
        return [np.arange(samples)]
    order = np.argsort(clients, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(clients[order])) + 1)


_DIGITS = Path(__file__).with_name("digits.csv.gz")


def _read_digits(_: Report) -> Dataset:
    """Read handwritten digits: 1,797 images of 8×8, values 0 to 16.

    Every fifth image of each class is a test sample. The file is that of scikit-learn's `load_digits`:
    the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine
    Learning Repository, 1998, CC BY 4.0). A line has 64 pixels and the class.
    """
    table = np.loadtxt(_DIGITS, np.int64, delimiter=",")
    x, y = table[:, :-1].astype(np.uint8).reshape(-1, 8, 8), table[:, -1].copy()
    by_class = np.argsort(y, kind="stable")
    is_test = np.zeros(len(y), dtype=bool)
    is_test[by_class[::5]] = True
    train, test = (Shard(x[own], y[own], scale=1 / 16) for own in (~is_test, is_test))
    return Dataset(train, test)


def _make_sentences(_: Report) -> Dataset:
    """Make 4,000 sentences of up to 16 tokens, padded with zeros. Tokens are numbers from 1 to 63.

    The class of a sentence is 1 if most of its tokens are 32 or above, else 0. Every fifth sentence is a
    test sample.
    """
    rng = np.random.default_rng(140)
    length = 2 * rng.integers(2, 8, 4000) + 1  # odd, so that there are no ties
    x = rng.integers(1, 64, (4000, 16))
    x[np.arange(16) >= length[:, None]] = 0
    y = ((x >= 32).sum(1) > length / 2).astype(np.int64)
    is_test = np.arange(4000) % 5 == 0
    remark = "The sentences are synthetic; a BERT's weights are random unless task.initial is set."
    train, test = (Shard(x[own].astype(np.int16), y[own]) for own in (~is_test, is_test))
    return Dataset(train, test, remarks=(remark,))


@dataclass(frozen=True, slots=True)
class OwnDataset:
    """Comes with the testbed."""

    name: str
    shape: tuple[int, ...] | None
    read: Callable[[Report], Dataset]
    tokens: bool = False
    file: Path | None = None
    """None if the samples are generated."""

    def find(self, root: Path | None) -> LocatedDataset:
        return LocatedDataset(digest(self.file.read_bytes()) if self.file else "1", self.read)


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """The method `dataset` of a user's own task returns it."""

    shape: ClassVar[tuple[int, ...] | None] = None
    tokens: ClassVar[bool] = False
    name: str
    task: TaskStandIn

    def find(self, root: Path | None) -> LocatedDataset:
        code, _, name = self.task.stands_for
        sources = Path(columns.__file__).read_bytes(), _SPLIT_VERSION
        return LocatedDataset(digest((code.digest, name, self.task, *sources)), self._read)

    def _read(self, report: Report) -> Dataset:
        assert callable(self.task.dataset)  # noqa: S101  (`source` makes no other instances)
        try:
            splits = self.task.dataset()
        except ValueError as error:
            raise DataError(None, str(error)) from error
        train, test, validation = (
            data_files.split_of_arrays(f"{split} of its dataset()", splits[split], fixed=True)
            if split in splits
            else None
            for split in ("train", "test", "validation")
        )
        assert train is not None  # noqa: S101  (checked in the process that runs own code)
        label, client = (name if name in splits["train"] else None for name in ("y", "client"))
        data = DataSettings(path=self.name, input=("x",), label=label, client=client)
        return Columns(data).read(train, test, validation, report)


Source = Columns | OwnDataset | TaskDataset

_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF (Caldas et al. 2018, arXiv 1812.01097)."""

DATASETS: dict[str, Source] = {
    "digits": OwnDataset("digits", (8, 8), _read_digits, file=_DIGITS),
    "flwrlabs/shakespeare": Columns(
        DataSettings(
            hub="flwrlabs/shakespeare",
            input=("x",),
            label="y",
            client="character_id",
            alphabet=_CHARACTERS,
            # Windows of 80 characters, labelled with the next one, begin every 8 characters: a window
            # overlaps with the ten after it.
            split=Split(test=0.1, order="file", gap=10),
        ),
        shape=(80,),
        tokens=True,
    ),
    "synthetic-sentences": OwnDataset("synthetic-sentences", (16,), _make_sentences, tokens=True),
    "uoft-cs/cifar10": Columns(
        DataSettings(hub="uoft-cs/cifar10", input=("img",), label="label"), shape=(3, 32, 32)
    ),
    "ylecun/mnist": Columns(
        DataSettings(hub="ylecun/mnist", input=("image",), label="label"), shape=(28, 28)
    ),
    "zalando-datasets/fashion_mnist": Columns(
        DataSettings(hub="zalando-datasets/fashion_mnist", input=("image",), label="label"),
        shape=(28, 28),
    ),
}


def source(topology: Topology) -> Source | None:
    """None if the task makes the data of each device itself.

    Raises BadInputError if the dataset is not in DATASETS and the topology names no columns.
    """
    data, task = topology.task.data, topology.task
    if data is None:
        own = task.build()
        if isinstance(own, TaskStandIn) and callable(own.dataset):
            return TaskDataset(task.name, own)
        return DATASETS[own.dataset] if isinstance(own.dataset, str) else None
    if data.input is not None:
        return Columns(data)
    known = DATASETS.get(str(data.hub))
    if not isinstance(known, Columns):
        raise topology_error(
            topology,
            ("task", "data"),
            "input is missing: name the columns of the inputs and of the labels, such as "
            f"input: image, label: label. huggingface.co/datasets/{data.hub} shows the columns",
        )
    changes = {name: getattr(data, name) for name in data.model_fields_set}
    return replace(known, data=known.data.model_copy(update=changes))


def own_files_digest(topology: Topology) -> str:
    """Names, sizes and modification times of the data files that `topology` names; empty if it names
    none. Raises BadInputError."""
    data = topology.task.data
    if data is None or data.path is None:
        return ""
    with located_errors(topology):
        splits = data_files.local_splits(data, None)
        stats = [(path.name, path.stat()) for path in splits.files] if splits else []
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def topology_error(topology: Topology, where: tuple[str | int, ...], message: str) -> BadInputError:
    return topology.source.error([topology.source.problem(where, message)])


@contextlib.contextmanager
def located_errors(topology: Topology) -> Iterator[None]:
    """A DataError becomes an error that names the faulty setting in the topology."""
    try:
        yield
    except DataError as error:
        where: tuple[str, ...] = ("task", "data") if error.key is None else ("task", "data", error.key)
        if topology.task.data is None:  # the task brings its dataset
            where = ("task", "name")
        raise topology_error(topology, where, str(error)) from error


def load(dataset: str, root: Path | None, report: Report = silent) -> Dataset:
    """Look in DATASETS, and in the cache for a dataset that has been decoded before.

    `root`: data root. `report` is called with progress lines. Raises BadInputError if files cannot be
    used, and HostError if there are no files and the hub cannot be reached.
    """
    try:
        return load_from(DATASETS[dataset], root, report)
    except DataError as error:
        raise BadInputError(
            f"{error}. Download it again from huggingface.co/datasets/{dataset}."
        ) from error


def load_from(dataset: Source, root: Path | None, report: Report = silent) -> Dataset:
    found = dataset.find(root)
    folder = decoded_folder(dataset, found)
    try:
        return _load_decoded(folder)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # missing, or incomplete
        decoded = found.read(report)
    with contextlib.suppress(OSError, SafetensorError):  # a run must not fail because of the cache
        folder.mkdir(parents=True, exist_ok=True)
        splits = {"test": decoded.test, "validation": decoded.validation, "train": decoded.train}
        for name, shard in splits.items():
            if shard is not None:
                with files.atomic_write(folder / f"{name}.safetensors") as partial:
                    shards.save(shard, partial)
        if decoded.clients is not None:
            with files.atomic_write(folder / "clients.safetensors") as partial:
                save_file({"clients": decoded.clients}, partial)
        with files.atomic_write(folder / _CONTENTS) as partial:  # last: all files named here exist
            has_clients = decoded.clients is not None
            kept = [name for name, shard in splits.items() if shard is not None]
            contents = {"parts": kept, "clients": has_clients}
            contents |= {"remarks": decoded.remarks, "classes": decoded.classes}
            partial.write_text(json.dumps(contents), encoding="utf-8")
    return decoded


_CONTENTS = "contents.json"


def _load_decoded(folder: Path) -> Dataset:
    """Raises OSError, ValueError, SafetensorError, KeyError or TypeError if the dataset is missing or
    incomplete."""
    contents = json.loads((folder / _CONTENTS).read_bytes())
    splits = {name: shards.load(folder / f"{name}.safetensors") for name in contents["parts"]}
    clients = load_file(folder / "clients.safetensors")["clients"] if contents["clients"] else None
    remarks, classes = tuple(contents["remarks"]), tuple(contents["classes"])
    return Dataset(**splits, clients=clients, remarks=remarks, classes=classes)


def decoded_folder(dataset: Source, found: LocatedDataset) -> Path:
    """Folder in the cache."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "--", dataset.name).strip("-")[-60:]
    return cache.folder() / "datasets" / f"{name}-{found.fingerprint}"


def array_kind(array: NDArray[Any]) -> str:
    """Type and shape of one sample, for an error."""
    shape = "×".join(map(str, array.shape[1:]))
    return f"{array.dtype}{f', shape {shape}' if shape else ''}"


def digest(facts: object) -> str:
    """12 hex digits."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
