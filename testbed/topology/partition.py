"""Partition schemes: which samples each client has. To add one: a dataclass, and a row in SCHEMES."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.checks import at_least
from agents.texts import quantity
from testbed.errors import BadInputError
from testbed.topology import seeds

MIN_SAMPLES = 10
"""The least number of samples per client, on average, where a scheme has no bound of its own."""

Indices = NDArray[np.int64]
Key = Literal["label", "client", "nothing"]


class Scheme(Protocol):
    """The parameters of a scheme; its constructor raises ValueError for invalid ones."""

    by: ClassVar[Key]
    """What samples are dealt out by: their class, whose they are, or nothing but their number."""

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        """Indices of the samples of each client, by `labels` of shape (n,), each ≥ 0: their classes, or
        whose they are.

        The same for the same arguments. Raises BadInputError that names the setting to change.
        """


@dataclass(frozen=True)
class Iid:
    """Every sample goes to one client, as it comes; all have equally many, to within one."""

    by: ClassVar[Key] = "nothing"

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import IidPartitioner

        _check_enough(labels, clients, MIN_SAMPLES)
        return _deal(IidPartitioner(len(clients)), labels, clients, seed)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is dealt out in shares drawn from Dirichlet(alpha): the smaller, the more skewed."""

    by: ClassVar[Key] = "label"
    alpha: float | tuple[float, ...]
    """One number, or one for each device."""
    min_samples: int = MIN_SAMPLES
    """No client gets fewer."""
    self_balancing: bool = False
    """Whether a device that has its even share of all samples gets no more."""

    def __post_init__(self) -> None:
        for alpha in self._alphas:
            if not alpha > 0:
                raise ValueError(f"alpha is {alpha:g}, expected a number above 0")
        at_least("min_samples", self.min_samples, 1)

    @property
    def _alphas(self) -> tuple[float, ...]:
        return self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import DirichletPartitioner

        _check_enough(labels, clients, self.min_samples)
        alphas = [float(alpha) for alpha in self._alphas]
        if isinstance(self.alpha, tuple) and len(alphas) != len(clients):
            raise BadInputError(
                f"task.partition.alpha has {quantity(len(alphas), 'number')}, expected one, or "
                f"{len(clients)}: one for each device"
            )
        partitioner = DirichletPartitioner(
            len(clients),
            "label",
            alphas if isinstance(self.alpha, tuple) else alphas[0],
            min_partition_size=self.min_samples,
            self_balancing=self.self_balancing,
            seed=seed,
        )
        try:
            return _deal(partitioner, labels, clients, seed)
        except ValueError as error:
            raise BadInputError(
                f"task.partition: dirichlet with alpha {min(alphas):g} leaves some of the "
                f"{len(clients)} devices fewer than {self.min_samples} samples, in every draw. Raise "
                "task.partition.alpha, lower task.partition.min_samples, or use fewer devices."
            ) from error


@dataclass(frozen=True)
class Pathological:
    """Every client has samples of exactly so many classes, and each class is dealt out evenly to those
    that have it (Li et al. 2022, arXiv 2102.02079)."""

    by: ClassVar[Key] = "label"
    classes_per_client: int = 2
    assignment: Literal["random", "deterministic", "first-deterministic"] = "first-deterministic"
    """Of classes to clients: at random, by turns, or the first by turns and the others at random."""

    def __post_init__(self) -> None:
        at_least("classes_per_client", self.classes_per_client, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import PathologicalPartitioner

        _check_enough(labels, clients, MIN_SAMPLES)
        partitioner = PathologicalPartitioner(
            len(clients), "label", self.classes_per_client, self.assignment, seed=seed
        )
        try:
            return _deal(partitioner, labels, clients, seed)
        except ValueError as error:
            raise BadInputError(
                f"task.partition: pathological finds no {self.classes_per_client} classes with a sample "
                f"left for each of the {len(clients)} devices: the data has "
                f"{len(np.unique(labels))} classes. Lower task.partition.classes_per_client, or use "
                "fewer devices."
            ) from error


@dataclass(frozen=True)
class Shards:
    """Samples sorted by class are cut into equal pieces, and each client gets so many at random
    (McMahan et al. 2017, arXiv 1602.05629). A remainder smaller than the pieces is left out."""

    by: ClassVar[Key] = "label"
    shards_per_client: int | None = 2
    """None: as many as there are of `shard_size`."""
    shard_size: int | None = None
    """Samples in a piece; None: as follows from `shards_per_client`."""
    keep_incomplete_shard: bool = False
    """Whether a smaller last piece of `shard_size` is dealt out, too."""

    def __post_init__(self) -> None:
        at_least("shards_per_client", self.shards_per_client, 1)
        at_least("shard_size", self.shard_size, 1)
        if self.shards_per_client is None and self.shard_size is None:
            raise ValueError("give shards_per_client, shard_size, or both")

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import ShardPartitioner

        _check_enough(labels, clients, max(MIN_SAMPLES, self.shards_per_client or 1))
        partitioner = ShardPartitioner(
            len(clients),
            "label",
            self.shards_per_client,
            self.shard_size,
            self.keep_incomplete_shard,
            seed=seed,
        )
        try:
            return _deal(partitioner, labels, clients, seed)
        except (ValueError, LookupError) as error:
            raise BadInputError(
                f"task.partition: shards finds no partition of {len(labels)} samples for {len(clients)} "
                f"devices: {' '.join(str(error).split())}"
            ) from error


@dataclass(frozen=True)
class Resampled:
    """Every client draws so many samples from the whole, with replacement: no limit to the clients."""

    by: ClassVar[Key] = "nothing"
    samples: int = 60

    def __post_init__(self) -> None:
        at_least("samples", self.samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        size = self.samples
        return {
            client: seeds.generator(seed, client, "resampled").integers(len(labels), size=size)
            for client in clients
        }


@dataclass(frozen=True)
class PowerLaw:
    """Sizes follow a power law: beside `min_samples`, the device of rank r gets a share of all that is
    left, in proportion to r^(−exponent). Ranks are drawn; samples are dealt whatever their class."""

    by: ClassVar[Key] = "nothing"
    exponent: float = 1.0
    min_samples: int = MIN_SAMPLES
    """No client gets fewer."""

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise ValueError(f"exponent is {self.exponent:g}, expected a number from 0 on")
        at_least("min_samples", self.min_samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        _check_enough(labels, clients, self.min_samples)
        rng = np.random.default_rng(seed)
        weights = np.arange(1, len(clients) + 1) ** -float(self.exponent)
        more = (len(labels) - self.min_samples * len(clients)) * np.cumsum(weights) / weights.sum()
        sizes = self.min_samples + np.diff(np.round(more).astype(np.int64), prepend=0)
        sizes = rng.permutation(sizes)
        order = rng.permutation(len(labels))
        return dict(zip(clients, np.split(order, np.cumsum(sizes)[:-1]), strict=True))


@dataclass(frozen=True)
class Natural:
    """Every device has the samples of one client of the dataset, such as a writer or a role. The samples
    of the others are left out."""

    by: ClassVar[Key] = "client"
    min_samples: int = MIN_SAMPLES
    """Clients of the dataset with fewer are left out."""
    choice: Literal["random", "first"] = "random"
    """Which of the dataset's clients the devices have."""

    def __post_init__(self) -> None:
        at_least("min_samples", self.min_samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        counts = np.bincount(labels)
        large = np.flatnonzero(counts >= self.min_samples)
        if len(large) < len(clients):
            every = int(np.count_nonzero(counts))
            lower = ", or lower task.partition.min_samples" * (every >= len(clients))
            raise BadInputError(
                f"task.partition: {len(clients)} devices, and the dataset has "
                f"{quantity(len(large), 'client')} with {self.min_samples} samples or more ({every} in "
                f"all). Use fewer devices{lower}."
            )
        if self.choice == "random":
            large = np.random.default_rng(seed).permutation(large)
        chosen = large[: len(clients)]
        order = np.argsort(labels, kind="stable")
        ends = np.cumsum(counts)
        return {
            client: order[ends[own] - counts[own] : ends[own]]
            for client, own in zip(clients, chosen.tolist(), strict=True)
        }


class OfFlower:
    """One of flwr-datasets' partitioners, by its own name: the fields are what its constructor takes.

    The number of partitions, the column and the seed are the topology's. A partition that no device is
    there for is left out.
    """

    by: ClassVar[Key] = "label"

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        import flwr_datasets.partitioner as flower

        name = type(self).__name__
        cls = getattr(flower, name, None)
        if cls is None:
            raise BadInputError(f"task.partition: the flwr-datasets that is installed has no {name}.")
        known = inspect.signature(cls).parameters
        ours = {"num_partitions": len(clients), "partition_by": "label", "seed": seed}
        arguments = {key: value for key, value in ours.items() if key in known} | self._arguments()
        try:
            dealt = _deal(cls(**arguments), labels, clients, seed)
        except (ValueError, TypeError, LookupError) as error:
            said = "it makes fewer partitions" if isinstance(error, LookupError) else str(error)
            raise BadInputError(
                f"task.partition: {name} of flwr-datasets finds no partition of {len(labels)} samples "
                f"for {len(clients)} devices: {' '.join(said.split())}"
            ) from error
        if empty := [client for client, indices in dealt.items() if not len(indices)]:
            raise BadInputError(
                f"task.partition: {name} of flwr-datasets leaves {empty[0]} without samples, and "
                f"{len(empty) - 1} other devices. Change its parameters, or use fewer devices."
            )
        return dealt

    def _arguments(self) -> dict[str, Any]:
        """The fields, with lists for tuples."""
        return {
            name: [*value] if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class InnerDirichletPartitioner(OfFlower):
    """So many samples for each device, of classes drawn by its own draw from Dirichlet(alpha)."""

    partition_sizes: tuple[int, ...]
    """Samples of each device, in device order."""
    alpha: float | tuple[float, ...]
    """One number, or one for each class."""


@dataclass(frozen=True)
class DistributionPartitioner(OfFlower):
    """Classes by turns, and of each class the shares that a table gives."""

    distribution_array: tuple[tuple[float, ...], ...]
    """A row for each class, with a share for each time that a device has it."""
    num_unique_labels_per_partition: int
    preassigned_num_samples_per_label: int
    rescale: bool = True
    """Whether the table has shares, and not numbers of samples."""

    def _arguments(self) -> dict[str, Any]:
        if len({len(row) for row in self.distribution_array}) > 1:
            raise BadInputError("task.partition: the rows of distribution_array differ in length.")
        return {**vars(self), "distribution_array": np.array(self.distribution_array)}


@dataclass(frozen=True)
class ContinuousPartitioner(OfFlower):
    """Samples sorted by their class as a number, with noise, are cut into equal pieces."""

    strictness: float
    """From 0, noise alone, to 1, no noise."""


@dataclass(frozen=True)
class SizePartitioner(OfFlower):
    """So many samples for each device."""

    by: ClassVar[Key] = "nothing"
    partition_sizes: tuple[int, ...]
    """Samples of each device, in device order."""


@dataclass(frozen=True)
class LinearPartitioner(OfFlower):
    """Sizes in proportion to 1, 2, 3, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class SquarePartitioner(OfFlower):
    """Sizes in proportion to 1, 4, 9, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class ExponentialPartitioner(OfFlower):
    """Sizes in proportion to e, e², e³, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class GroupedNaturalIdPartitioner(OfFlower):
    """Every device has the samples of so many clients of the dataset."""

    by: ClassVar[Key] = "client"
    group_size: int
    mode: Literal["allow-smaller", "allow-bigger", "drop-reminder", "strict"] = "allow-smaller"
    sort_unique_ids: bool = False


OF_FLOWER: tuple[type[OfFlower], ...] = (
    ContinuousPartitioner,
    DistributionPartitioner,
    ExponentialPartitioner,
    GroupedNaturalIdPartitioner,
    InnerDirichletPartitioner,
    LinearPartitioner,
    SizePartitioner,
    SquarePartitioner,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What one device has by hand."""

    samples: int
    labels: tuple[int, ...] | None
    """Classes; None: of all."""
    group: int
    """Its place in the topology's list."""


class TooFewError(ValueError):
    """A request that the data cannot fulfil."""

    def __init__(self, request: Request, setting: str, message: str) -> None:
        super().__init__(message)
        self.request, self.setting = request, setting


def take_by_hand(
    requests: Mapping[str, Request], labels: NDArray[Any], seed: int
) -> tuple[dict[str, Indices], Indices]:
    """Each requesting device's samples, drawn at random without replacement, and all samples that are
    left. Those that ask for the fewest classes choose first. Raises TooFewError."""
    if not requests:
        return {}, np.arange(len(labels))
    has_classes = labels.ndim == 1 and labels.dtype.kind == "i"
    rng = seeds.generator(seed, "", "by hand")
    left = np.arange(len(labels))
    taken: dict[str, Indices] = {}
    every = len(labels) + 1
    for client, request in sorted(
        requests.items(), key=lambda item: every if item[1].labels is None else len(item[1].labels)
    ):
        fits = np.ones(len(left), dtype=bool)
        if request.labels is not None:
            if not has_classes:
                raise TooFewError(request, "labels", "the data's labels are no classes: remove this")
            if missing := [label for label in request.labels if not (labels == label).any()]:
                raise TooFewError(
                    request,
                    "labels",
                    f"no training sample is of class {missing[0]}: there are {int(labels.min())} to "
                    f"{int(labels.max())}",
                )
            fits = np.isin(labels[left], request.labels)
        places = np.flatnonzero(fits)
        if len(places) < request.samples:
            of = "" if request.labels is None else f" of class {', '.join(map(str, request.labels))}"
            raise TooFewError(
                request,
                "samples",
                f"{client} is to have {request.samples} samples{of}, and {len(places)} are left after "
                "other devices took theirs: lower it here or there",
            )
        chosen = rng.permutation(places)[: request.samples]
        taken[client] = left[chosen]
        left = np.delete(left, chosen)
    return {client: taken[client] for client in requests}, left


SCHEMES: dict[str, type[Scheme]] = {
    "dirichlet": Dirichlet,
    "iid": Iid,
    "natural": Natural,
    "pathological": Pathological,
    "power_law": PowerLaw,
    "resampled": Resampled,
    "shards": Shards,
    **{cls.__name__: cls for cls in OF_FLOWER},
}


def _deal(partitioner: Any, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
    """The partition by `partitioner` of flwr-datasets, which raises ValueError where there is none."""
    from datasets import Dataset as Table

    # Permuted, as the iid partitioner deals out contiguous pieces. Labels alone, and in arrow's format:
    # in any other they are handed over one by one, which takes seconds.
    order = np.random.default_rng(seed).permutation(len(labels))
    partitioner.dataset = Table.from_dict({"index": order, "label": labels[order]}).with_format("arrow")
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some draw bars there
        warnings.simplefilter("ignore")  # one for every draw that left a client too few samples
        dealt = [partitioner.load_partition(number)["index"] for number in range(len(clients))]
    return dict(zip(clients, map(np.asarray, dealt), strict=True))


def _check_enough(labels: Indices, clients: Sequence[str], least: int) -> None:
    if len(labels) < least * len(clients):
        raise BadInputError(
            f"{quantity(len(clients), 'device')} for {len(labels)} training samples: each needs at "
            f"least {least}. Use at most {len(labels) // least} devices, a larger dataset, or "
            "task.partition: {scheme: resampled}."
        )
