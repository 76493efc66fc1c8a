"""Datasets and their partition among the clients, prepared once, by the controller.

A dataset comes from parquet files under a data root, in the layout of the Hugging Face hub, else from
the hub itself. Decoding 70,000 images takes seconds, and so does importing the partitioners: arrays
and partitions are kept in the user's cache. To add a dataset: a row in DATASETS.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from agents import files, shards
from agents.aggregator.parts import Parts
from agents.shards import Shard
from testbed.errors import BadInputError, HostError
from testbed.host import cache
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, partition
from testbed.topology.partition import Iid, Indices, Resampled, Scheme

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Dataset:
    train: Shard
    test: Shard


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data of a run."""

    train: Shard
    """Of all clients together."""
    test: Shard
    """What the global model is evaluated on."""
    indices: Mapping[str, Indices]
    """Of each client, in device order: its samples in `train`."""

    def shard(self, client: str) -> Shard:
        """A copy of the samples of `client`."""
        chosen = self.indices[client]
        return Shard(self.train.x[chosen], self.train.y[chosen], self.train.scale)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a dataset was found."""

    fingerprint: str
    """Of the files: another one where `read` may return something else."""
    read: Callable[[], Dataset]
    """Decodes all of it: seconds. Raises BadInputError or HostError."""


@dataclass(frozen=True, slots=True)
class HubImages:
    """Labelled images of one size, as a dataset of the Hugging Face hub.

    In grey x has shape (n, height, width), in colour (n, channels, height, width).
    """

    hub_id: str
    image: str
    """Column of the encoded images."""
    label: str
    """Column of the labels, 0 to classes − 1."""
    test: str = "test"
    """Split to evaluate on; clients train on `train`."""
    shape: tuple[int, ...] | None = None
    """Of one image in x; None: nothing can be said of a step before the data are read."""

    def find(self, root: Path | None) -> Found:
        if root is None:
            return Found("hub", self._fetch)
        if not root.is_dir():
            raise BadInputError(f"--data (or TESTBED_DATA) {root}: no such folder")
        folder = root / self.hub_id
        train, test = (sorted(folder.glob(f"{split}-*.parquet")) for split in ("train", self.test))
        if not (train and test):
            return Found("hub", self._fetch)
        stats = [(path.name, path.stat()) for path in (*train, *test)]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return Found(_digest(facts), lambda: Dataset(self._read(train), self._read(test)))

    def _read(self, paths: Iterable[Path]) -> Shard:
        parts = [self._read_file(path) for path in paths]
        x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
        return Shard(x, y, parts[0].scale)

    def _read_file(self, path: Path) -> Shard:
        import pandas as pd

        try:
            return self._decode(pd.read_parquet(path, columns=[self.image, self.label]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInputError(
                f"{path}: not readable as {self.hub_id} with the columns {self.image} and {self.label} "
                f"({_first_line(error)}). Get it anew from huggingface.co/datasets/{self.hub_id}."
            ) from error

    def _fetch(self) -> Dataset:
        # Read when these libraries are imported: no usage statistics from a user's experiment.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import datasets
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            # load_dataset alone would try again and again for half a minute where there is no network.
            with contextlib.suppress(OfflineModeIsEnabled):
                huggingface_hub.HfApi().dataset_info(self.hub_id, timeout=10)
            with _without_progress_bars():
                splits = datasets.load_dataset(self.hub_id)
            train, test = (splits[s].with_format("arrow")[:].to_pandas() for s in ("train", self.test))
            return Dataset(self._decode(train), self._decode(test))
        except Exception as error:  # httpx's, requests', OSError or its own: they share no class
            raise HostError(
                f"{self.hub_id} cannot be fetched from the Hugging Face hub ({_first_line(error)}). "
                f"Get a network, or the dataset's parquet files: --data FOLDER (or TESTBED_DATA) with "
                f"{self.hub_id}/train-*.parquet and {self.hub_id}/{self.test}-*.parquet in it."
            ) from error

    def _decode(self, frame: pd.DataFrame) -> Shard:
        from PIL import Image

        images = [np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in frame[self.image]]
        x = np.stack(images)
        if x.ndim == 4:  # colours: channels first, as torch's convolutions take them
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        return Shard(x, frame[self.label].to_numpy(np.int64), scale=1 / 255)


@dataclass(frozen=True, slots=True)
class Digits:
    """scikit-learn's bundled digits: 1,797 images of 8×8, values 0 to 16.

    Every fifth image of a class is for the test.
    """

    shape: ClassVar[tuple[int, ...] | None] = (8, 8)

    def find(self, root: Path | None) -> Found:
        return Found(_digest(metadata.version("scikit-learn")), self._read)

    @staticmethod
    def _read() -> Dataset:
        from sklearn.datasets import load_digits

        bundle = load_digits()
        x, y = bundle.images.astype(np.uint8), bundle.target.astype(np.int64)
        by_class = np.argsort(y, kind="stable")
        is_test = np.zeros(len(y), dtype=bool)
        is_test[by_class[::5]] = True
        return Dataset(*(Shard(x[part], y[part], scale=1 / 16) for part in (~is_test, is_test)))


DATASETS: dict[str, HubImages | Digits] = {
    "digits": Digits(),
    "uoft-cs/cifar10": HubImages("uoft-cs/cifar10", "img", "label", shape=(3, 32, 32)),
    "ylecun/mnist": HubImages("ylecun/mnist", "image", "label", shape=(28, 28)),
}


def load(dataset: str, root: Path | None) -> Dataset:
    """The dataset of that name in DATASETS, from the cache where it has been decoded before.

    `root` is the folder of local datasets. Raises BadInputError for files that cannot be used, HostError
    where there are none and the hub cannot be reached.
    """
    found = DATASETS[dataset].find(root)
    folder = _decoded(dataset, found)
    paths = folder / "train.safetensors", folder / "test.safetensors"
    try:
        return Dataset(*map(shards.load, paths))
    except (OSError, SafetensorError, KeyError):  # not there, or not whole
        decoded = found.read()
    with contextlib.suppress(OSError, SafetensorError):  # a cache is worth no failed run
        folder.mkdir(parents=True, exist_ok=True)
        for shard, path in zip((decoded.train, decoded.test), paths, strict=True):
            with files.whole(path) as partial:
                shards.save(shard, partial)
    return decoded


def _decoded(dataset: str, found: Found) -> Path:
    """Where the decoded arrays are kept."""
    return cache.folder() / "datasets" / f"{dataset.replace('/', '--')}-{found.fingerprint}"


def known_samples(topology: Topology, root: Path | None) -> Mapping[str, int] | None:
    """How many samples each client has, as far as that needs neither decoding nor dealing: from the
    cache, or where the scheme says it. None where the data has to be prepared first. Raises
    BadInputError for a `root` that is none."""
    task, clients = topology.task, topology.device_names
    if task.dataset is None:
        return dict(zip(clients, map(len, task.build().shards()), strict=True))
    scheme = task.partition.build()
    if isinstance(scheme, Resampled):
        return dict.fromkeys(clients, scheme.samples)
    folder = _decoded(task.dataset, DATASETS[task.dataset].find(root))
    try:
        with safe_open(folder / "train.safetensors", framework="numpy") as file:
            labels = file.get_tensor("y")
    except (OSError, SafetensorError):  # not there, or not whole
        return None
    if isinstance(scheme, Iid):
        least, more = divmod(len(labels), len(clients))
        return {client: least + (place < more) for place, client in enumerate(clients)}
    try:
        with safe_open(_dealt(scheme, labels, clients, topology.seed), framework="numpy") as file:
            ends = file.get_tensor("ends")
    except (OSError, SafetensorError):
        return None
    return dict(zip(clients, np.diff(ends, prepend=0).tolist(), strict=True))


def prepare(topology: Topology, root: Path | None) -> Prepared:
    """The task's data and its partition among the devices; `root` as for `load`, and raises the same.

    The same for the same topology. Raises BadInputError, naming the setting, where the data cannot
    be partitioned.
    """
    task, clients = topology.task, topology.device_names
    if task.dataset is None:
        shards = task.build().shards()
        x, y = (np.concatenate([getattr(shard, part) for shard in shards]) for part in ("x", "y"))
        train = test = Shard(x, y, shards[0].scale)
        ends = np.cumsum([len(shard) for shard in shards])
        own = np.split(np.arange(len(train)), ends[:-1])
        indices: Mapping[str, Indices] = dict(zip(clients, own, strict=True))
    else:
        dataset = load(task.dataset, root)
        train, test = dataset.train, dataset.test
        indices = _partition(task.partition.build(), train.y, clients, topology.seed)
    return _with_evaluation_set(Prepared(train, test, indices), topology)


def _with_evaluation_set(prepared: Prepared, topology: Topology) -> Prepared:
    """`prepared` with the samples for `test` that `topology.evaluate` requests."""
    on, samples = topology.evaluate.on, topology.evaluate.samples
    if samples is None:
        return prepared
    rng = np.random.default_rng(0)  # the same whatever the seed: the runs are compared
    if on == "test":
        source, chosen = prepared.test, rng.permutation(len(prepared.test))[:samples]
    else:
        source, parts = prepared.train, list(prepared.indices.values())
        mean = sum(map(len, parts)) / len(parts)
        uniform = topology.task.importance == "uniform"
        counts = [samples if uniform else round(samples * len(part) / mean) for part in parts]
        drawn = zip(parts, counts, strict=True)
        chosen = np.concatenate([rng.choice(part, count) for part, count in drawn])
    return replace(prepared, test=Shard(source.x[chosen], source.y[chosen], source.scale))


def parts(prepared: Prepared, topology: Topology) -> Parts:
    """What `topology.evaluate` requests beside the test set as a whole."""
    classes, most = topology.evaluate.classes, topology.evaluate.devices
    if most is None:
        return Parts(classes)
    rng = np.random.default_rng(0)  # as for the test set
    chosen = {name: rng.permutation(part)[:most] for name, part in prepared.indices.items()}
    together, train = np.concatenate(list(chosen.values())), prepared.train
    samples = {name: len(part) for name, part in chosen.items()}
    return Parts(classes, Shard(train.x[together], train.y[together], train.scale), samples)


def _partition(
    scheme: Scheme, labels: Indices, clients: Sequence[str], seed: int
) -> Mapping[str, Indices]:
    """The partition by `scheme`, from the cache where the same has been made before."""
    if isinstance(scheme, Resampled):  # which needs no import
        return scheme.deal(labels, clients, seed)
    path = _dealt(scheme, labels, clients, seed)
    try:
        kept = load_file(path)
        parts = np.split(kept["indices"], kept["ends"][:-1])
        return dict(zip(clients, parts, strict=True))
    except (OSError, SafetensorError, KeyError, ValueError):  # not there, or not whole
        dealt = scheme.deal(labels, clients, seed)
    whole = {
        "indices": np.concatenate(list(dealt.values())),
        "ends": np.cumsum([len(part) for part in dealt.values()]),
    }
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.whole(path) as unfinished:
            save_file(whole, unfinished)
    return dealt


def _dealt(scheme: Scheme, labels: Indices, clients: Sequence[str], seed: int) -> Path:
    """Where the partition is kept."""
    hashed = hashlib.sha256(labels.tobytes()).hexdigest()
    source = Path(partition.__file__).read_bytes()  # a change there may change the partition
    facts = (scheme, hashed, len(clients), seed, metadata.version("flwr-datasets"), source)
    return cache.folder() / "partitions" / f"{_digest(facts)}.safetensors"


def label_counts(prepared: Prepared) -> dict[str, list[int]]:
    """Of each client: how many samples it has of class 0, 1, ..."""
    labels = prepared.train.y
    classes = 1 + int(labels.max())
    return {
        client: np.bincount(labels[chosen], minlength=classes).tolist()
        for client, chosen in prepared.indices.items()
    }


def write(prepared: Prepared, directory: RunDirectory) -> None:
    """Save every client's shard and the test set where the run's processes expect them.

    Raises HostError.
    """
    _save_readable(prepared.test, directory.test_set)
    for client in prepared.indices:
        _save_readable(prepared.shard(client), directory.shard(client))


def write_device_set(prepared: Prepared, topology: Topology, directory: RunDirectory) -> None:
    """Save what the global model is evaluated on device by device, where that is asked for. Raises
    HostError."""
    if (device_set := parts(prepared, topology).device_set) is not None:
        _save_readable(device_set, directory.device_set)


def _save_readable(shard: Shard, path: Path) -> None:
    try:
        shards.save(shard, path)
    except SafetensorError as error:  # which names neither the file nor the error's number
        free = shutil.disk_usage(path.parent).free
        raise HostError(
            f"{path} could not be written ({error}); {free / 2**20:.0f} MiB of that disk are free. Make "
            "room there (df -h), or name a folder on another disk with --runs."
        ) from error
    path.chmod(0o644)  # a container reads it as another user


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
