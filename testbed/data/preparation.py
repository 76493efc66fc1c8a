"""Preparation of a run's data: who has which samples, what the model is evaluated on, and the files.

Importing the partitioners takes seconds: partitions are kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from agents import shards
from agents.aggregator.evaluation_parts import Parts
from agents.disk import files
from agents.shards import Shard
from agents.tasks.interface import Task
from testbed.console import Report, silent
from testbed.data import datasets, transforms
from testbed.errors import BadInputError, HostError
from testbed.host import cache
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, partition
from testbed.topology.partition import Iid, Indices, Request, Resampled, Scheme


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data of a run."""

    train: Shard
    """Of all clients together."""
    test: Shard
    """What the global model is evaluated on."""
    indices: Mapping[str, Indices]
    """Of each client, in device order: its samples in `train`."""
    total: int = 0
    """Training samples of the dataset; `train` has transformed copies of some as well."""
    remarks: tuple[str, ...] = ()
    """What was set aside and left out, in sentences."""

    def shard(self, client: str) -> Shard:
        """A copy of the samples of `client`."""
        return self.train.subset(self.indices[client])


def known_samples(topology: Topology, root: Path | None) -> Mapping[str, int] | None:
    """How many samples each client has, as far as that needs neither decoding nor dealing: from the
    cache, or where the scheme says it. None where the data has to be prepared first. Raises
    BadInputError for a `root` that is none, and for data that is not there."""
    task, clients = topology.task, topology.device_names
    dataset = datasets.source(topology)
    if dataset is None:
        return dict(zip(clients, map(len, _shards_of_task(topology)), strict=True))
    scheme = task.partition.build()
    by_hand = _by_hand(topology)
    given = {client: request.samples for client, request in by_hand.items()}
    others = [client for client in clients if client not in given]
    if isinstance(scheme, Resampled) or not others:
        return {client: given.get(client, scheme.samples) for client in clients}
    with datasets.placed(topology):
        folder = datasets.decoded_folder(dataset, dataset.find(root))
    try:
        labels = _array(folder / "train.safetensors", "y")
        if isinstance(scheme, Iid):
            least, more = divmod(len(labels) - sum(given.values()), len(others))
            given |= {client: max(0, least + (place < more)) for place, client in enumerate(others)}
            return {client: given[client] for client in clients}
        owners = _array(folder / "clients.safetensors", "clients") if scheme.by == "client" else None
        keys = _keys(topology, scheme, labels, owners)
        ends = _array(_partition_path(scheme, by_hand, labels, keys, clients, topology.seed), "ends")
    except (OSError, SafetensorError):  # not there, or not whole
        return None
    return dict(zip(clients, np.diff(ends, prepend=0).tolist(), strict=True))


def _array(path: Path, name: str) -> NDArray[Any]:
    with safe_open(path, framework="numpy") as file:
        found: NDArray[Any] = file.get_tensor(name)
        return found


def prepare(topology: Topology, root: Path | None, report: Report = silent) -> Prepared:
    """The task's data and its partition among the devices; `root` and `report` as for
    `datasets.load`, and raises the same.

    The same for the same topology. Raises BadInputError, naming the setting, where the data cannot
    be partitioned.
    """
    clients = topology.device_names
    chosen = datasets.source(topology)
    if chosen is None:
        own = _shards_of_task(topology)
        x, y = (np.concatenate([getattr(shard, array) for shard in own]) for array in ("x", "y"))
        train = test = Shard(x, y, own[0].scale)
        ends = np.cumsum([len(shard) for shard in own])
        dealt = np.split(np.arange(len(train)), ends[:-1])
        indices: Mapping[str, Indices] = dict(zip(clients, dealt, strict=True))
        dataset = datasets.Dataset(train, test)
    else:
        dataset = _loaded(topology, chosen, root, report)
        indices = _partition(topology, dataset)
    unused = np.ones(len(dataset.train), bool)
    unused[np.concatenate(list(indices.values()))] = False
    left = np.count_nonzero(unused)
    remarks = dataset.remarks
    if left:
        remarks += (
            f"{left:,} of {len(dataset.train):,} training samples are left out: no device has them.",
        )
    train, indices = transforms.applied(topology, dataset.train, indices)
    prepared = Prepared(train, dataset.test, indices, len(dataset.train), remarks)
    return _with_evaluation_set(prepared, dataset, topology)


def _shards_of_task(topology: Topology) -> Sequence[Shard]:
    """The shard of each client, of a task that brings them. Raises BadInputError."""
    task: Task = topology.task.build()
    try:
        return task.shards_for(len(topology.device_names))
    except ValueError as error:
        message = f"{topology.task.name} cannot run: {error}"
        raise datasets.topology_error(topology, ("task", "name"), message) from error


def _loaded(
    topology: Topology, chosen: datasets.Source, root: Path | None, report: Report
) -> datasets.Dataset:
    name = topology.task.build().dataset
    if topology.task.data is None and isinstance(name, str):
        return datasets.load(name, root, report)
    with datasets.placed(topology):
        return datasets.load_from(chosen, root, report)


def _with_evaluation_set(prepared: Prepared, dataset: datasets.Dataset, topology: Topology) -> Prepared:
    """`prepared` with the samples for `test` that `topology.evaluate` requests."""
    on, samples = topology.evaluate.on, topology.evaluate.samples
    if on == "validation":
        if dataset.validation is None:
            raise datasets.topology_error(
                topology,
                ("evaluate", "on"),
                "the data has no validation set: name one with task.data.validation, set some samples "
                "aside with task.data.split: {validation: 10%}, have the task's dataset() return one, "
                "or take on: test",
            )
        prepared = replace(prepared, test=dataset.validation)
    if samples is None:
        return prepared
    rng = np.random.default_rng(0)  # the same whatever the seed: the runs are compared
    if on == "clients":
        source, dealt = prepared.train, list(prepared.indices.values())
        mean = sum(map(len, dealt)) / len(dealt)
        uniform = topology.task.importance == "uniform"
        counts = [samples if uniform else round(samples * len(shard) / mean) for shard in dealt]
        drawn = zip(dealt, counts, strict=True)
        chosen = np.concatenate([rng.choice(shard, count) for shard, count in drawn])
    else:
        source, chosen = prepared.test, rng.permutation(len(prepared.test))[:samples]
    return replace(prepared, test=source.subset(chosen))


def evaluation_parts(prepared: Prepared, topology: Topology) -> Parts:
    """What `topology.evaluate` requests beside the test set as a whole."""
    classes, most = topology.evaluate.classes, topology.evaluate.devices
    if most is None:
        return Parts(classes)
    rng = np.random.default_rng(0)  # as for the test set
    chosen = {name: rng.permutation(shard)[:most] for name, shard in prepared.indices.items()}
    together, train = np.concatenate(list(chosen.values())), prepared.train
    samples = {name: len(indices) for name, indices in chosen.items()}
    return Parts(classes, Shard(train.x[together], train.y[together], train.scale), samples)


def _by_hand(topology: Topology) -> dict[str, Request]:
    """What devices have by hand, in device order."""
    return {
        name: Request(group.data.samples, group.data.labels, index)
        for index, group in enumerate(topology.devices)
        if group.data is not None and group.data.samples is not None
        for name in group.device_names
    }


def _partition(topology: Topology, dataset: datasets.Dataset) -> Mapping[str, Indices]:
    """Each device's samples, in device order: those by hand first, the rest by the scheme."""
    clients, labels = topology.device_names, dataset.train.y
    scheme: Scheme = topology.task.partition.build()
    by_hand = _by_hand(topology)
    keys = _keys(topology, scheme, labels, dataset.clients)
    if isinstance(scheme, Resampled):  # which needs no import
        return _deal(topology, scheme, by_hand, labels, keys)
    path = _partition_path(scheme, by_hand, labels, keys, clients, topology.seed)
    try:
        kept = load_file(path)
        split = np.split(kept["indices"], kept["ends"][:-1])
        return dict(zip(clients, split, strict=True))
    except (OSError, SafetensorError, KeyError, ValueError):  # not there, or not whole
        dealt = _deal(topology, scheme, by_hand, labels, keys)
    whole = {
        "indices": np.concatenate(list(dealt.values())),
        "ends": np.cumsum([len(indices) for indices in dealt.values()]),
    }
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as unfinished:
            save_file(whole, unfinished)
    return dealt


def _deal(
    topology: Topology,
    scheme: Scheme,
    by_hand: Mapping[str, Request],
    labels: NDArray[Any],
    keys: Indices,
) -> Mapping[str, Indices]:
    seed, clients = topology.seed, topology.device_names
    try:
        given, rest = partition.take_by_hand(by_hand, labels, seed)
    except partition.TooFewError as error:
        where = ("devices", error.request.group, "data", error.setting)
        raise datasets.topology_error(topology, where, str(error)) from error
    others = [client for client in clients if client not in given]
    if not others:
        return {client: given[client] for client in clients}
    try:
        dealt = scheme.deal(keys[rest], others, seed)
    except BadInputError as error:
        message = str(error).removeprefix("task.partition: ")
        raise datasets.topology_error(topology, ("task", "partition"), message) from error
    return {client: given[client] if client in given else rest[dealt[client]] for client in clients}


def _keys(topology: Topology, scheme: Scheme, labels: NDArray[Any], clients: Indices | None) -> Indices:
    """What `scheme` deals samples out by, shape (n,). Raises BadInputError where there is no such."""
    where = ("task", "partition", "scheme")
    if scheme.by == "client":
        if clients is None:
            raise datasets.topology_error(
                topology,
                where,
                "nothing says whose a sample is: add client to task.data, the column that does, such as "
                "client: character_id, or to what the task's own dataset() returns; or take another "
                "scheme such as iid",
            )
        return clients
    if labels.ndim == 1 and labels.dtype.kind == "i":
        return labels
    if scheme.by == "label":
        raise datasets.topology_error(
            topology,
            where,
            "deals samples out by their class, and these have none (labels of "
            f"{datasets.array_kind(labels)}): take a scheme that needs no classes, such as iid or "
            "power_law",
        )
    return np.zeros(len(labels), np.int64)


def _partition_path(
    scheme: Scheme,
    by_hand: Mapping[str, Request],
    labels: NDArray[Any],
    keys: Indices,
    clients: Sequence[str],
    seed: int,
) -> Path:
    """Where the partition is kept."""
    hashed = hashlib.sha256(keys.tobytes())
    if by_hand:
        hashed.update(labels.tobytes())
    code = Path(partition.__file__).read_bytes()  # a change there may change the partition
    given = [
        (place, by_hand[client].samples, by_hand[client].labels)
        for place, client in enumerate(clients)
        if client in by_hand
    ]
    facts = (
        scheme,
        hashed.hexdigest(),
        len(clients),
        given,
        seed,
        metadata.version("flwr-datasets"),
        code,
    )
    return cache.folder() / "partitions" / f"{datasets.digest(facts)}.safetensors"


_MAX_CLASSES = 1_000
"""Whole numbers from so many on are no classes to count, but tokens, for example."""


def label_counts(prepared: Prepared) -> dict[str, list[int]]:
    """Of each client: how many samples it has of class 0, 1, ...; none where labels are no classes."""
    labels = prepared.train.y
    if labels.ndim != 1 or labels.dtype.kind != "i" or not 0 <= int(labels.max()) < _MAX_CLASSES:
        return {client: [] for client in prepared.indices}
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
    if (device_set := evaluation_parts(prepared, topology).device_set) is not None:
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
