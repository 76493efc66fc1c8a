"""Datasets: from files of the user's, from parquet files under a data root in the layout of the Hugging
Face hub, or from the hub itself.

Decoding 70,000 images takes seconds: arrays are kept in the user's cache. To add a dataset: a row in
DATASETS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
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
from testbed.data.columns import DataError, RawSplit, Samples
from testbed.errors import BadInputError
from testbed.host import cache
from testbed.own_code.stand_ins import TaskStandIn
from testbed.topology import Topology
from testbed.topology.data_settings import Data, Split
from testbed.topology.partition import Indices


@dataclass(frozen=True, slots=True)
class Dataset:
    train: Shard
    test: Shard
    validation: Shard | None = None
    clients: Indices | None = None
    """Whose each sample of `train` is, numbered from 0 on; None where nothing says it."""
    remarks: tuple[str, ...] = ()
    """What was set aside of the training samples, in sentences."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a dataset was found."""

    fingerprint: str
    """Of the files: another one where `read` may return something else."""
    read: Callable[[Report], Dataset]
    """Decodes all of it, which takes seconds, and tells how far it is. Raises BadInputError,
    HostError."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A dataset as columns of files, or of the Hugging Face hub."""

    data: Data
    shape: tuple[int, ...] | None = None
    """Of one sample in x; None: nothing can be said of a step before the data are read."""
    tokens: bool = False
    """Whether samples are sequences of tokens, which a model gets as whole numbers."""

    @property
    def name(self) -> str:
        return self.data.name

    def find(self, root: Path | None) -> Found:
        splits = data_files.local(self.data, root)
        if splits is None:
            return Found(digest(("hub", *self._facts())), self._fetch)
        stats = [(str(path), path.stat()) for path in splits.files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return Found(digest((facts, *self._facts())), lambda report: self._read_files(splits, report))

    def _facts(self) -> tuple[object, ...]:
        return self.data, Path(columns.__file__).read_bytes(), _SPLIT_VERSION

    def _read_files(self, splits: data_files.Splits, report: Report) -> Dataset:
        test, validation = (
            data_files.open_split(paths) if paths else None for paths in (splits.test, splits.validation)
        )
        return self.read(data_files.open_split(splits.train), test, validation, report)

    def _fetch(self, report: Report) -> Dataset:
        data = self.data
        with data_files.fetched(data, report) as splits:
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
        """The dataset that has these splits. Raises DataError."""
        data = self.data
        total = sum(split.rows for split in (train, test, validation) if split is not None)
        progress, read = console.Progress(report, f"Decoding {self.name}"), 0

        def decoded(split: RawSplit, data: Data, train: Samples | None = None) -> Samples:
            nonlocal read
            samples = columns.read(split, data, train, lambda done: progress(read + done, total))
            read += split.rows
            return samples

        for key, given, split in (
            ("test", data.test, test),
            ("validation", data.validation, validation),
        ):
            if key in data.model_fields_set and given is not None and split is None:
                raise DataError(key, f"there is no split {given!r} beside {train.name}")
        samples = decoded(train, data)

        def other(split: RawSplit | None) -> Shard | None:
            if split is None:
                return None
            shard = decoded(split, data.model_copy(update={"client": None}), samples).shard
            _check_alike(samples.shard, shard, split.name)
            return shard

        return _split(samples, other(test), other(validation), data.split)


_SPLIT_VERSION = 1
"""To be raised where `_split` makes other splits than before: those are kept in the cache."""


def _check_alike(train: Shard, other: Shard, name: str) -> None:
    for key, own, its in (("input", train.x, other.x), ("label", train.y, other.y)):
        if own.shape[1:] != its.shape[1:] or own.dtype.kind != its.dtype.kind:
            raise DataError(
                key,
                f"{name} has {array_kind(its)}, the training samples have {array_kind(own)}: "
                "make them alike",
            )


def _split(samples: Samples, test: Shard | None, validation: Shard | None, split: Split) -> Dataset:
    """The dataset with what it has no samples for set aside, as `split` says."""
    shard, clients = samples.shard, samples.clients
    shares = [0.0 if test else split.test, 0.0 if validation else split.validation]
    if test is None and not split.test:
        raise DataError("split", "there is no test split, and test: 0 sets nothing aside: raise it")
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
        raise DataError("split", f"{len(shard)} samples are too few to be split so: raise its shares")
    how = f"at random (seed {split.seed})" if split.order == "random" else "the last ones in the file"
    names = [f"{size:,} to {use}" for size, use in zip(sizes, ("test", "validate"), strict=True) if size]
    lost = len(shard) - len(chosen) - sum(sizes)
    overlap = f", {lost:,} left out as they overlap with those" if lost else ""
    remark = f"Of {len(shard):,} training samples, {' and '.join(names)} were set aside, {how}{overlap}."
    return Dataset(
        shard.subset(chosen),
        test or shard.subset(aside[0]),
        validation or (shard.subset(aside[1]) if sizes[1] else None),
        None if clients is None else clients[chosen],
        (remark,),
    )


def _runs(clients: Indices | None, samples: int) -> list[Indices]:
    """The samples of each client in the order of the file; all of them where no clients are named."""
    if clients is None:
        return [np.arange(samples)]
    order = np.argsort(clients, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(clients[order])) + 1)


@dataclass(frozen=True, slots=True)
class Digits:
    """scikit-learn's bundled digits: 1,797 images of 8×8, values 0 to 16.

    Every fifth image of a class is for the test.
    """

    name: ClassVar[str] = "digits"
    shape: ClassVar[tuple[int, ...] | None] = (8, 8)
    tokens: ClassVar[bool] = False

    def find(self, root: Path | None) -> Found:
        return Found(digest(metadata.version("scikit-learn")), self._read)

    @staticmethod
    def _read(_: Report) -> Dataset:
        from sklearn.datasets import load_digits

        bundle = load_digits()
        x, y = bundle.images.astype(np.uint8), bundle.target.astype(np.int64)
        by_class = np.argsort(y, kind="stable")
        is_test = np.zeros(len(y), dtype=bool)
        is_test[by_class[::5]] = True
        train, test = (Shard(x[own], y[own], scale=1 / 16) for own in (~is_test, is_test))
        return Dataset(train, test)


@dataclass(frozen=True, slots=True)
class SyntheticSentences:
    """4,000 sentences of up to 16 tokens out of 64, bundled: of two classes, by whether more tokens are
    from 32 on than below. Every fifth is for the test. A sentence is filled up with zeros."""

    name: ClassVar[str] = "synthetic-sentences"
    shape: ClassVar[tuple[int, ...] | None] = (16,)
    tokens: ClassVar[bool] = True

    def find(self, root: Path | None) -> Found:
        return Found("1", self._read)

    @staticmethod
    def _read(_: Report) -> Dataset:
        rng = np.random.default_rng(140)
        length = 2 * rng.integers(2, 8, 4000) + 1  # odd: no ties
        x = rng.integers(1, 64, (4000, 16))
        x[np.arange(16) >= length[:, None]] = 0
        y = ((x >= 32).sum(1) > length / 2).astype(np.int64)
        is_test = np.arange(4000) % 5 == 0
        remark = (
            "The sentences are synthetic and bundled; a BERT's weights are random, but for task.initial."
        )
        train, test = (Shard(x[own].astype(np.int16), y[own]) for own in (~is_test, is_test))
        return Dataset(train, test, remarks=(remark,))


@dataclass(frozen=True, slots=True)
class OfTask:
    """What the method `dataset` of a user's own task returns."""

    shape: ClassVar[tuple[int, ...] | None] = None
    tokens: ClassVar[bool] = False
    name: str
    """Of the task."""
    task: TaskStandIn

    def find(self, root: Path | None) -> Found:
        code, _, name = self.task.stands_for
        sources = Path(columns.__file__).read_bytes(), _SPLIT_VERSION
        return Found(digest((code.digest, name, self.task, *sources)), self._read)

    def _read(self, report: Report) -> Dataset:
        assert callable(self.task.dataset)  # noqa: S101  (else there is nothing of this class)
        try:
            splits = self.task.dataset()
        except ValueError as error:
            raise DataError(None, str(error)) from error
        train, test, validation = (
            data_files.of_arrays(f"{split} of its dataset()", splits[split]) if split in splits else None
            for split in ("train", "test", "validation")
        )
        assert train is not None  # noqa: S101  (it is checked where own code runs)
        label, client = (name if name in splits["train"] else None for name in ("y", "client"))
        data = Data(path=self.name, input=("x",), label=label, client=client)
        return Columns(data).read(train, test, validation, report)


Source = Columns | Digits | SyntheticSentences | OfTask

_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 of LEAF (Caldas et al. 2018, arXiv 1812.01097)."""

DATASETS: dict[str, Source] = {
    "digits": Digits(),
    "flwrlabs/shakespeare": Columns(
        Data(
            hub="flwrlabs/shakespeare",
            input=("x",),
            label="y",
            client="character_id",
            alphabet=_CHARACTERS,
            # Windows of 80 characters and the next one, a window every 8: ten of them overlap with one.
            split=Split(test=0.1, order="file", gap=10),
        ),
        shape=(80,),
        tokens=True,
    ),
    "synthetic-sentences": SyntheticSentences(),
    "uoft-cs/cifar10": Columns(
        Data(hub="uoft-cs/cifar10", input=("img",), label="label"), shape=(3, 32, 32)
    ),
    "ylecun/mnist": Columns(Data(hub="ylecun/mnist", input=("image",), label="label"), shape=(28, 28)),
    "zalando-datasets/fashion_mnist": Columns(
        Data(hub="zalando-datasets/fashion_mnist", input=("image",), label="label"), shape=(28, 28)
    ),
}


def source(topology: Topology) -> Source | None:
    """What the devices of `topology` learn from; None where the task brings the data of each.

    Raises BadInputError for a dataset without columns that is not known.
    """
    data, task = topology.task.data, topology.task
    if data is None:
        own = task.build()
        if isinstance(own, TaskStandIn) and callable(own.dataset):
            return OfTask(task.name, own)
        return DATASETS[own.dataset] if isinstance(own.dataset, str) else None
    if data.input is not None:
        return Columns(data)
    known = DATASETS.get(str(data.hub))
    if not isinstance(known, Columns):
        raise topology_error(
            topology,
            ("task", "data"),
            "input is missing: name the column of the inputs, and that of the labels, such as "
            f"input: image, label: label. huggingface.co/datasets/{data.hub} shows the columns",
        )
    changes = {name: getattr(data, name) for name in data.model_fields_set}
    return replace(known, data=known.data.model_copy(update=changes))


def own_files(topology: Topology) -> str:
    """What tells the user's own data files of `topology` from others: their names, sizes and times of
    change; empty where it names none. Raises BadInputError."""
    data = topology.task.data
    if data is None or data.path is None:
        return ""
    with placed(topology):
        splits = data_files.local(data, None)
        stats = [(path.name, path.stat()) for path in splits.files] if splits else []
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def topology_error(topology: Topology, where: tuple[str | int, ...], message: str) -> BadInputError:
    """An error at one place of the topology."""
    return topology.source.error([topology.source.problem(where, message)])


@contextlib.contextmanager
def placed(topology: Topology) -> Iterator[None]:
    """Inside, what is wrong with the data is told with its place in the topology."""
    try:
        yield
    except DataError as error:
        where: tuple[str, ...] = ("task", "data") if error.key is None else ("task", "data", error.key)
        if topology.task.data is None:  # it is of the task
            where = ("task", "name")
        raise topology_error(topology, where, str(error)) from error


def load(dataset: str, root: Path | None, report: Report = silent) -> Dataset:
    """The dataset of that name in DATASETS, from the cache where it has been decoded before.

    `root` is the folder of local datasets; `report` is told how far it is. Raises BadInputError for
    files that cannot be used, HostError where there are none and the hub cannot be reached.
    """
    try:
        return load_from(DATASETS[dataset], root, report)
    except DataError as error:
        raise BadInputError(f"{error}. Get it anew from huggingface.co/datasets/{dataset}.") from error


def load_from(dataset: Source, root: Path | None, report: Report = silent) -> Dataset:
    """`load` of any dataset."""
    found = dataset.find(root)
    folder = decoded_folder(dataset, found)
    try:
        return _load_decoded(folder)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # not there, or not whole
        decoded = found.read(report)
    with contextlib.suppress(OSError, SafetensorError):  # a cache is worth no failed run
        folder.mkdir(parents=True, exist_ok=True)
        splits = {"test": decoded.test, "validation": decoded.validation, "train": decoded.train}
        for name, shard in splits.items():
            if shard is not None:
                with files.atomic_write(folder / f"{name}.safetensors") as partial:
                    shards.save(shard, partial)
        if decoded.clients is not None:
            with files.atomic_write(folder / "clients.safetensors") as partial:
                save_file({"clients": decoded.clients}, partial)
        with files.atomic_write(folder / _CONTENTS) as partial:  # last: what it names is there
            has_clients = decoded.clients is not None
            kept = [name for name, shard in splits.items() if shard is not None]
            partial.write_text(
                json.dumps({"parts": kept, "clients": has_clients, "remarks": decoded.remarks}),
                encoding="utf-8",
            )
    return decoded


_CONTENTS = "contents.json"


def _load_decoded(folder: Path) -> Dataset:
    """Raises OSError, ValueError, SafetensorError, KeyError or TypeError where it is not there, or not
    whole."""
    contents = json.loads((folder / _CONTENTS).read_bytes())
    splits = {name: shards.load(folder / f"{name}.safetensors") for name in contents["parts"]}
    clients = load_file(folder / "clients.safetensors")["clients"] if contents["clients"] else None
    return Dataset(**splits, clients=clients, remarks=tuple(contents["remarks"]))


def decoded_folder(dataset: Source, found: Found) -> Path:
    """Where the decoded arrays are kept."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "--", dataset.name).strip("-")[-60:]
    return cache.folder() / "datasets" / f"{name}-{found.fingerprint}"


def array_kind(array: NDArray[Any]) -> str:
    """What one sample of it is, for an error."""
    shape = "×".join(map(str, array.shape[1:]))
    return f"{array.dtype}{f', shape {shape}' if shape else ''}"


def digest(facts: object) -> str:
    """Another one for other facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
