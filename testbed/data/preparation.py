"""Preparation of a run's data: the samples of each device and their transforms, the evaluation set, and
the files that hold them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from agents import random_generators, shards
from agents.disk import files
from agents.shards import Parts, Shard
from agents.tasks.interface import Task
from agents.texts import name_list
from testbed.console import Report, silent
from testbed.data import datasets
from testbed.errors import BadInputError, HostError
from testbed.host import cache
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, partition
from testbed.topology.data_settings import Transform
from testbed.topology.partition import Iid, Indices, Resampled, SampleRequest, Scheme

_AT_ONCE = 1_000
"""Samples that are transformed together, in float64."""


def apply_transforms(
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
        rng = random_generators.generator(topology.seed, name, "transform")
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


# Partitions are kept in the user's cache, because importing the partitioners takes seconds.


@dataclass(frozen=True, slots=True)
class Prepared:
    train: Shard
    test: Shard
    """Samples on which the global model is evaluated."""
    indices: Mapping[str, Indices]
    """Client -> indices of its samples in `train`, in device order."""
    total: int = 0
    """Training samples of the dataset, without the transformed copies in `train`."""
    remarks: tuple[str, ...] = ()
    """Sentences about samples that were set aside or left out."""
    classes: tuple[str, ...] = ()
    """Names of the classes (`datasets.Dataset`)."""

    @property
    def samples(self) -> Mapping[str, int]:
        """Client -> number of its samples, in device order."""
        return partition.sizes(self.indices)

    def shard(self, client: str) -> Shard:
        """The samples are copied."""
        return self.train.subset(self.indices[client])


def known_samples(topology: Topology, root: Path | None) -> Mapping[str, int] | None:
    """Return client -> number of samples, from the cache or by the partition scheme, without decoding or
    partitioning the data. Return None if the data must be prepared first. Raises BadInputError if `root`
    is not a folder, or the data is missing."""
    task, clients = topology.task, topology.device_names
    dataset = datasets.source(topology)
    if dataset is None:
        return dict(zip(clients, map(len, _shards_of_task(topology)), strict=True))
    scheme = task.partition.build()
    by_hand = _explicit_requests(topology)
    given = {client: request.samples for client, request in by_hand.items()}
    others = [client for client in clients if client not in given]
    if isinstance(scheme, Resampled) or not others:
        return {client: given.get(client, scheme.samples) for client in clients}
    with datasets.located_errors(topology):
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
    except (OSError, SafetensorError):  # missing, or incomplete
        return None
    return dict(zip(clients, np.diff(ends, prepend=0).tolist(), strict=True))


def _array(path: Path, name: str) -> NDArray[Any]:
    with safe_open(path, framework="numpy") as file:
        found: NDArray[Any] = file.get_tensor(name)
        return found


def prepare(topology: Topology, root: Path | None, report: Report = silent) -> Prepared:
    """Load the task's data and partition it among the devices: the same topology always gets the same
    partition. `root`: data root. `report` is called with progress lines.

    Raises BadInputError if files cannot be used. Raises BadInputError, which names the setting, if the
    data cannot be partitioned. Raises HostError if there are no files and the hub cannot be reached.
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
        dataset = _load_dataset(topology, chosen, root, report)
        indices = _partition(topology, dataset)
    left = _count_unused(indices, len(dataset.train))
    remarks = dataset.remarks
    if left:
        remarks += (
            f"{left:,} of {len(dataset.train):,} training samples are left out: no device gets them.",
        )
    remarks += _idle_remarks(topology, indices)
    train, indices = apply_transforms(topology, dataset.train, indices)
    prepared = Prepared(train, dataset.test, indices, len(dataset.train), remarks, dataset.classes)
    return _with_evaluation_set(prepared, dataset, topology)


def _count_unused(indices: Mapping[str, Indices], total: int) -> int:
    """Samples that no client has."""
    unused = np.ones(total, bool)
    for own in indices.values():
        unused[own] = False
        if not unused.any():
            return 0
    return int(np.count_nonzero(unused))


def _idle_remarks(topology: Topology, indices: Mapping[str, Indices]) -> tuple[str, ...]:
    """Say which devices do not train. Raises BadInputError if the rule, or secure aggregation, does not
    work with the other devices alone."""
    idle = topology.idle_devices(partition.sizes(indices))
    if not idle:
        return ()
    active = len(indices) - len(idle)
    secure = topology.secure
    why = "too few samples for a mini-batch. No rule sends them a model"
    remark = f"{name_list(idle)} will not train: {why}."
    place: tuple[str, ...] = ("devices",)
    try:
        if not active:
            raise ValueError("no device can train: give at least one of them samples")
        place = ("rule",)
        topology.rule.build().check(active)
        place = ("privacy", "secure", "needed")
        if secure is not None and secure.needed > active:
            raise ValueError(f"found {secure.needed}, but only {active} devices train")
    except ValueError as error:
        raise datasets.topology_error(topology, place, f"{error}. {remark}") from error
    return (remark,)


def _shards_of_task(topology: Topology) -> Sequence[Shard]:
    """One shard per client, from a task that makes the data itself. Raises BadInputError."""
    task: Task = topology.task.build()
    try:
        return task.shards_for(len(topology.device_names))
    except ValueError as error:
        message = f"{topology.task.name} cannot run: {error}"
        raise datasets.topology_error(topology, ("task", "name"), message) from error


def _load_dataset(
    topology: Topology, chosen: datasets.Source, root: Path | None, report: Report
) -> datasets.Dataset:
    name = topology.task.build().dataset
    if topology.task.data is None and isinstance(name, str):
        return datasets.load(name, root, report)
    with datasets.located_errors(topology):
        return datasets.load_from(chosen, root, report)


def _with_evaluation_set(prepared: Prepared, dataset: datasets.Dataset, topology: Topology) -> Prepared:
    """Replace `test` by the samples that `topology.evaluate` requests."""
    on, samples = topology.evaluate.on, topology.evaluate.samples
    if on == "validation":
        if dataset.validation is None:
            raise datasets.topology_error(
                topology,
                ("evaluate", "on"),
                "the data has no validation set: name one with task.data.validation, set samples aside "
                "with task.data.split: {validation: 10%}, return one from the task's dataset(), or use "
                "on: test",
            )
        prepared = replace(prepared, test=dataset.validation)
    if samples is None:
        return prepared
    rng = np.random.default_rng(0)  # independent of the run's seed, so that runs can be compared
    if on == "clients":
        idle = {*topology.idle_devices(prepared.samples)}
        source = prepared.train
        dealt = [own for client, own in prepared.indices.items() if client not in idle]
        mean = sum(map(len, dealt)) / len(dealt)
        uniform = topology.task.importance == "uniform"
        counts = [samples if uniform else round(samples * len(shard) / mean) for shard in dealt]
        drawn = zip(dealt, counts, strict=True)
        chosen = np.concatenate([rng.choice(shard, count) for shard, count in drawn])
    else:
        source, chosen = prepared.test, rng.permutation(len(prepared.test))[:samples]
    return replace(prepared, test=source.subset(chosen))


def evaluation_parts(prepared: Prepared, topology: Topology) -> Parts:
    """Parts on which `topology.evaluate` requests separate evaluations."""
    classes, most = topology.evaluate.classes, topology.evaluate.devices
    if most is None:
        return Parts(classes)
    rng = np.random.default_rng(0)  # independent of the run's seed
    dealt = {name: shard for name, shard in prepared.indices.items() if len(shard)}
    chosen = {name: rng.permutation(shard)[:most] for name, shard in dealt.items()}
    together, train = np.concatenate(list(chosen.values())), prepared.train
    samples = {name: len(indices) for name, indices in chosen.items()}
    return Parts(classes, Shard(train.x[together], train.y[together], train.scale), samples)


def _explicit_requests(topology: Topology) -> dict[str, SampleRequest]:
    """Keep the device order."""
    return {
        name: SampleRequest(group.data.samples, group.data.labels, index)
        for index, group in enumerate(topology.devices)
        if group.data is not None and group.data.samples is not None
        for name in group.device_names
    }


def _partition(topology: Topology, dataset: datasets.Dataset) -> Mapping[str, Indices]:
    """In device order. Samples that the topology assigns explicitly are drawn first. The scheme then
    deals out the rest."""
    clients, labels = topology.device_names, dataset.train.y
    scheme: Scheme = topology.task.partition.build()
    by_hand = _explicit_requests(topology)
    keys = _keys(topology, scheme, labels, dataset.clients)
    if isinstance(scheme, Resampled):  # not cached, because it needs no slow import
        return _deal(topology, scheme, by_hand, labels, keys)
    path = _partition_path(scheme, by_hand, labels, keys, clients, topology.seed)
    try:
        kept = load_file(path)
        split = np.split(kept["indices"], kept["ends"][:-1])
        return dict(zip(clients, split, strict=True))
    except (OSError, SafetensorError, KeyError, ValueError):  # missing, or incomplete
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
    by_hand: Mapping[str, SampleRequest],
    labels: NDArray[Any],
    keys: Indices,
) -> Mapping[str, Indices]:
    seed, clients = topology.seed, topology.device_names
    try:
        given, rest = partition.draw_requested(by_hand, labels, seed)
    except partition.TooFewSamplesError as error:
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
    if not given:
        return dealt
    return {client: given[client] if client in given else rest[dealt[client]] for client in clients}


def _keys(topology: Topology, scheme: Scheme, labels: NDArray[Any], clients: Indices | None) -> Indices:
    """Key (client or class) of each sample, shape (n,). Raises BadInputError if the data has no such
    key."""
    where = ("task", "partition", "scheme")
    if scheme.by == "client":
        if clients is None:
            raise datasets.topology_error(
                topology,
                where,
                "the client of a sample is unknown: set task.data.client to the column that has it, "
                "such as client: character_id, or add client to what the task's dataset() returns; or "
                "use another scheme, such as iid",
            )
        return clients
    if labels.ndim == 1 and labels.dtype.kind == "i":
        return labels
    if scheme.by == "label":
        raise datasets.topology_error(
            topology,
            where,
            "deals samples out by their class, but the labels are not classes "
            f"({datasets.array_kind(labels)}): use a scheme that needs no classes, such as iid or "
            "power_law",
        )
    return np.zeros(len(labels), np.int64)


def _partition_path(
    scheme: Scheme,
    by_hand: Mapping[str, SampleRequest],
    labels: NDArray[Any],
    keys: Indices,
    clients: Sequence[str],
    seed: int,
) -> Path:
    """Path in the cache."""
    hashed = hashlib.sha256(keys.tobytes())
    if by_hand:
        hashed.update(labels.tobytes())
    code = Path(partition.__file__).read_bytes()  # a change of this module may change the partition
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
        isinstance(scheme, partition.FlowerScheme) and scheme.version(),
        code,
    )
    return cache.folder() / "partitions" / f"{datasets.digest(facts)}.safetensors"


_MAX_CLASSES = 1_000
"""If one label reaches this bound, no label counts as a class, because the labels may be tokens."""


def label_counts(prepared: Prepared) -> dict[str, list[int]]:
    """Client -> number of samples of class 0, 1, ...; the lists are empty if labels are not classes."""
    labels = prepared.train.y
    if labels.ndim != 1 or labels.dtype.kind != "i" or not 0 <= int(labels.max()) < _MAX_CLASSES:
        return {client: [] for client in prepared.indices}
    classes = 1 + int(labels.max())
    return {
        client: np.bincount(labels[chosen], minlength=classes).tolist()
        for client, chosen in prepared.indices.items()
    }


def write(prepared: Prepared, directory: RunDirectory) -> None:
    """Raises HostError."""
    _save_readable(prepared.test, directory.test_set)
    for client in prepared.indices:
        _save_readable(prepared.shard(client), directory.shard(client))


def write_device_set(prepared: Prepared, topology: Topology, directory: RunDirectory) -> None:
    """Raises HostError."""
    if (device_set := evaluation_parts(prepared, topology).device_set) is not None:
        _save_readable(device_set, directory.device_set)


def _save_readable(shard: Shard, path: Path) -> None:
    try:
        shards.save(shard, path)
    except SafetensorError as error:  # the error has neither the file's name nor a number
        free = shutil.disk_usage(path.parent).free
        raise HostError(
            f"{path} could not be written ({error}); that disk has {free / 2**20:.0f} MiB free. Make "
            "room there (df -h), or name a folder on another disk with --runs."
        ) from error
    path.chmod(0o644)  # containers read it as another user
