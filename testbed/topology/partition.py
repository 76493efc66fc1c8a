"""Partition schemes: which samples each client gets. To add a scheme, write a dataclass in this module
and add a row to SCHEMES."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agents import extras, random_generators
from agents.checks import at_least
from agents.texts import quantity
from testbed.errors import BadInputError

MIN_SAMPLES = 10
"""Schemes without a parameter `min_samples` require at least this number on average."""

Indices = NDArray[np.int64]
Key = Literal["label", "client", "nothing"]
_DRAWS = 11
"""Draws of dirichlet until each client has enough samples. Like all draws in this module, it is that of
flwr-datasets, so that both give the same partition."""


class Scheme(Protocol):
    """A scheme with its parameters. The constructor raises ValueError for invalid parameters."""

    by: ClassVar[Key]
    """Property of a sample that the scheme uses: its class (`label`), or the client that it belongs to.
    `nothing` if only the number of samples counts."""

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        """Return the indices of each client's samples. The result depends only on the arguments.

        `labels` has shape (n,) and values ≥ 0. A value is the class of the sample. In a scheme by
        client, a value is the number of the sample's client. Raises BadInputError that names the setting
        to change.
        """


@dataclass(frozen=True)
class Iid:
    """Each sample goes to a random client. The numbers of samples of any two clients differ by at most
    one."""

    by: ClassVar[Key] = "nothing"

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        _check_enough(labels, clients, MIN_SAMPLES)
        order = _shuffled(labels, seed)
        return dict(zip(clients, np.array_split(order, len(clients)), strict=True))


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided into shares drawn from Dirichlet(alpha). The smaller alpha is, the more
    unequal the shares are."""

    by: ClassVar[Key] = "label"
    alpha: float | tuple[float, ...]
    """Concentration: one number, or a list with one number for each device."""
    min_samples: int = MIN_SAMPLES
    """Minimum number of samples per device."""
    self_balancing: bool = False
    """Whether a device gets no more samples when it has the average number."""

    def __post_init__(self) -> None:
        for alpha in self._alphas:
            if not alpha > 0:
                raise ValueError(f"alpha is {alpha:g}, expected a number above 0")
        at_least("min_samples", self.min_samples, 1)

    @property
    def _alphas(self) -> tuple[float, ...]:
        return self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        _check_enough(labels, clients, self.min_samples)
        alphas = [float(alpha) for alpha in self._alphas]
        if isinstance(self.alpha, tuple) and len(alphas) != len(clients):
            raise BadInputError(
                f"task.partition.alpha has {quantity(len(alphas), 'number')}, expected one, or "
                f"{len(clients)}: one for each device"
            )
        order, rng = _shuffled(labels, seed), np.random.default_rng(seed)
        members = _members(labels[order])
        for _ in range(_DRAWS):
            parts = self._draw(members, np.resize(alphas, len(clients)), rng)
            if min(map(len, parts)) >= self.min_samples:
                return _shuffled_parts(clients, order, parts, rng)
        raise BadInputError(
            f"task.partition: in every draw of dirichlet with alpha {min(alphas):g} some of the "
            f"{len(clients)} devices get fewer than {self.min_samples} samples. Raise "
            "task.partition.alpha, lower task.partition.min_samples, or use fewer devices."
        )

    def _draw(
        self, members: Mapping[int, Indices], alphas: NDArray[np.float64], rng: np.random.Generator
    ) -> list[Indices]:
        """`members`: class -> its samples."""
        pieces = []
        sizes = np.zeros(len(alphas))
        average = sum(map(len, members.values())) / len(alphas)
        for own in members.values():
            shares = rng.dirichlet(alphas)
            if self.self_balancing:
                shares[sizes > average] = 0
                # Added up one by one: NumPy's own sum may differ in the last bit, and a sample with it.
                shares /= sum(shares.tolist())
            pieces.append(np.split(own, (np.cumsum(shares) * len(own)).astype(int)[:-1]))
            sizes += [len(piece) for piece in pieces[-1]]
        return [np.concatenate(one) for one in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Pathological:
    """Each device has samples of exactly `classes_per_client` classes. Each class is divided evenly
    among the devices that have it (Li et al. 2022, arXiv 2102.02079)."""

    by: ClassVar[Key] = "label"
    classes_per_client: int = 2
    """Number of classes of each device."""
    assignment: Literal["random", "deterministic", "first-deterministic"] = "first-deterministic"
    """How classes are assigned to devices. `random`: at random. `deterministic`: in turn.
    `first-deterministic`: the first class of a device in turn, and its other classes at random."""

    def __post_init__(self) -> None:
        at_least("classes_per_client", self.classes_per_client, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        _check_enough(labels, clients, MIN_SAMPLES)
        order, rng = _shuffled(labels, seed), np.random.default_rng(seed)
        members = _members(labels[order])
        enough = self.classes_per_client <= len(members)
        chosen = self._choose([*members], len(clients), rng) if enough else []
        holders = {
            label: [place for place, own in enumerate(chosen) if label in own] for label in members
        }
        if not enough or any(len(holders[label]) > len(own) for label, own in members.items()):
            raise BadInputError(
                f"task.partition: pathological cannot give each of {len(clients)} devices samples of "
                f"{self.classes_per_client} classes: the data has {len(members)} classes. "
                "Lower task.partition.classes_per_client, or use fewer devices."
            )
        pieces: list[list[Indices]] = [[] for _ in clients]
        for label, own in members.items():
            if holders[label]:
                split = np.array_split(own, len(holders[label]))
                for place, piece in zip(holders[label], split, strict=True):
                    pieces[place].append(piece)
        return _shuffled_parts(clients, order, [*map(np.concatenate, pieces)], rng)

    def _choose(self, classes: list[int], count: int, rng: np.random.Generator) -> list[list[int]]:
        chosen = []
        for place in range(count):
            if self.assignment == "random":
                own = rng.choice(classes, size=self.classes_per_client, replace=False).tolist()
            elif self.assignment == "deterministic":
                own = [classes[(place + k) % len(classes)] for k in range(self.classes_per_client)]
            else:
                own = [classes[place % len(classes)]]
                while len(own) < self.classes_per_client:
                    if (label := int(rng.choice(classes))) not in own:
                        own.append(label)
            chosen.append(own)
        return chosen


@dataclass(frozen=True)
class Shards:
    """The samples are sorted by class and cut into equal pieces. Each device gets `shards_per_client`
    pieces at random (McMahan et al. 2017, arXiv 1602.05629). A smaller remainder is left out."""

    by: ClassVar[Key] = "label"
    shards_per_client: int | None = 2
    """Number of pieces of each device; null if all pieces of `shard_size` are divided."""
    shard_size: int | None = None
    """Number of samples in a piece; null if it follows from `shards_per_client`."""
    keep_incomplete_shard: bool = False
    """Whether the last piece is used even if it is smaller than `shard_size`."""

    def __post_init__(self) -> None:
        at_least("shards_per_client", self.shards_per_client, 1)
        at_least("shard_size", self.shard_size, 1)
        if self.shards_per_client is None and self.shard_size is None:
            raise ValueError("found neither shards_per_client nor shard_size, expected one or both")

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        _check_enough(labels, clients, max(MIN_SAMPLES, self.shards_per_client or 1))
        size, usable, counts = self._pieces(len(labels), len(clients))
        if usable < max(len(clients), counts.sum()):
            raise BadInputError(
                f"task.partition: shards cannot divide {len(labels)} samples among {len(clients)} "
                f"devices: there are {usable} pieces of {size} samples, and "
                f"{max(len(clients), counts.sum())} are needed. Lower task.partition.shard_size or "
                "task.partition.shards_per_client, or use fewer devices."
            )
        order, rng = _shuffled(labels, seed), np.random.default_rng(seed)
        order = order[np.argsort(labels[order], kind="stable")]
        drawn = np.split(rng.permutation(usable)[: counts.sum()], np.cumsum(counts)[:-1])
        samples = np.arange(len(labels))
        parts = [np.concatenate([samples[k * size : (k + 1) * size] for k in own]) for own in drawn]
        return _shuffled_parts(clients, order, parts, rng)

    def _pieces(self, samples: int, clients: int) -> tuple[int, int, Indices]:
        """Return the size of a piece, the number of pieces that can be used, and each client's number of
        pieces."""
        size = self.shard_size or samples // (clients * (self.shards_per_client or 1))
        # With both numbers given, an incomplete piece is never used, as in flwr-datasets.
        keep = self.keep_incomplete_shard and None in (self.shard_size, self.shards_per_client)
        usable = -(-samples // size) if keep else samples // size
        if self.shards_per_client is not None:
            return size, usable, np.full(clients, self.shards_per_client)
        counts = np.full(clients, usable // clients)
        counts[: usable % clients] += 1
        return size, usable, counts


@dataclass(frozen=True)
class Resampled:
    """Each device draws `samples` samples from the whole set with replacement, so that there may be any
    number of devices."""

    by: ClassVar[Key] = "nothing"
    samples: int = 60
    """Number of samples of each device."""

    def __post_init__(self) -> None:
        at_least("samples", self.samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        return ResampledIndices(dict.fromkeys(clients, self.samples), len(labels), seed)


@dataclass(frozen=True, slots=True)
class ResampledIndices(Mapping[str, Indices]):
    """Indices of each client's samples, drawn whenever they are requested: of a million devices, most
    never train."""

    sizes: Mapping[str, int]
    total: int
    """Number of samples to draw from."""
    seed: int

    def __getitem__(self, client: str) -> Indices:
        size = self.sizes[client]
        return random_generators.generator(self.seed, client, "resampled").integers(
            self.total, size=size
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def sizes(indices: Mapping[str, Indices]) -> Mapping[str, int]:
    if isinstance(indices, ResampledIndices):
        return indices.sizes
    return {client: len(own) for client, own in indices.items()}


@dataclass(frozen=True)
class PowerLaw:
    """Numbers of samples follow a power law. Each device gets `min_samples`. The rest is divided in
    proportion to r^(−exponent), where r is the rank of the device. Ranks are random. Classes have no
    influence."""

    by: ClassVar[Key] = "nothing"
    exponent: float = 1.0
    """Exponent of the power law; with 0, all devices get equally many samples."""
    min_samples: int = MIN_SAMPLES
    """Minimum number of samples per device."""

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise ValueError(f"exponent is {self.exponent:g}, expected a number of at least 0")
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
    """Each device gets the samples of one client of the dataset, such as a writer or a role. If a client
    of the dataset has no device, its samples are left out."""

    by: ClassVar[Key] = "client"
    min_samples: int = MIN_SAMPLES
    """Minimum number of samples. Clients of the dataset with fewer samples are left out."""
    choice: Literal["random", "first"] = "random"
    """Which of the dataset's clients to use: random ones, or the first ones."""

    def __post_init__(self) -> None:
        at_least("min_samples", self.min_samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        counts = np.bincount(labels)
        large = np.flatnonzero(counts >= self.min_samples)
        if len(large) < len(clients):
            every = int(np.count_nonzero(counts))
            lower = ", or lower task.partition.min_samples" * (every >= len(clients))
            raise BadInputError(
                f"task.partition: there are {len(clients)} devices, but the dataset has only "
                f"{quantity(len(large), 'client')} with at least {self.min_samples} samples ({every} in "
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


class FlowerScheme:
    """Base class of schemes that wrap a partitioner of flwr-datasets.

    The scheme's name is the name of the partitioner's class. The scheme's fields are the parameters of
    that class's constructor. The number of partitions, the column and the seed come from the topology.
    If there are more partitions than devices, the remaining partitions are left out.
    """

    by: ClassVar[Key] = "label"

    @staticmethod
    def version() -> str:
        """Raises BadInputError if flwr-datasets is not installed."""
        if message := extras.missing("flwr_datasets"):
            raise BadInputError(f"task.partition: {message}")
        return metadata.version("flwr-datasets")

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        self.version()
        import flwr_datasets.partitioner as flower

        name = type(self).__name__
        cls = getattr(flower, name, None)
        if cls is None:
            raise BadInputError(f"task.partition: the installed flwr-datasets has no {name}.")
        known = inspect.signature(cls).parameters
        fixed = {"num_partitions": len(clients), "partition_by": "label", "seed": seed}
        arguments = {key: value for key, value in fixed.items() if key in known} | self._arguments()
        try:
            return _deal(cls(**arguments), labels, clients, seed)
        except (ValueError, TypeError, LookupError) as error:
            reason = "it makes fewer partitions" if isinstance(error, LookupError) else str(error)
            raise BadInputError(
                f"task.partition: {name} of flwr-datasets cannot divide {len(labels)} samples among "
                f"{len(clients)} devices: {' '.join(reason.split())}"
            ) from error

    def _arguments(self) -> dict[str, Any]:
        """A list in place of each tuple."""
        return {
            name: [*value] if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class InnerDirichletPartitioner(FlowerScheme):
    """The number of samples per device is given. Each device draws its own shares of the classes from
    Dirichlet(alpha)."""

    partition_sizes: tuple[int, ...]
    """Number of samples of each device, in device order."""
    alpha: float | tuple[float, ...]
    """Concentration: one number, or a list with one number for each class."""


@dataclass(frozen=True)
class DistributionPartitioner(FlowerScheme):
    """Devices get classes in turn. A table gives each device's share of each of its classes."""

    distribution_array: tuple[tuple[float, ...], ...]
    """Table with a row for each class. A row has a share for each device that has the class."""
    num_unique_labels_per_partition: int
    """Number of classes of each device."""
    preassigned_num_samples_per_label: int
    """Number of samples of each of its classes that a device gets before the table is applied."""
    rescale: bool = True
    """Whether the table has shares. If false, the table has numbers of samples."""

    def _arguments(self) -> dict[str, Any]:
        if len({len(row) for row in self.distribution_array}) > 1:
            raise BadInputError("task.partition: the rows of distribution_array differ in length.")
        return {**vars(self), "distribution_array": np.array(self.distribution_array)}


@dataclass(frozen=True)
class ContinuousPartitioner(FlowerScheme):
    """The samples are sorted by their class number with added noise, and cut into equal pieces."""

    strictness: float
    """Order of the sorting, from 0 (random) to 1 (strictly by class)."""


@dataclass(frozen=True)
class SizePartitioner(FlowerScheme):
    """The number of samples per device is given."""

    by: ClassVar[Key] = "nothing"
    partition_sizes: tuple[int, ...]
    """Number of samples of each device, in device order."""


@dataclass(frozen=True)
class LinearPartitioner(FlowerScheme):
    """Numbers of samples in proportion to 1, 2, 3, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class SquarePartitioner(FlowerScheme):
    """Numbers of samples in proportion to 1, 4, 9, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class ExponentialPartitioner(FlowerScheme):
    """Numbers of samples in proportion to e, e², e³, … in device order."""

    by: ClassVar[Key] = "nothing"


@dataclass(frozen=True)
class GroupedNaturalIdPartitioner(FlowerScheme):
    """Each device gets the samples of `group_size` clients of the dataset."""

    by: ClassVar[Key] = "client"
    group_size: int
    """Number of the dataset's clients per device."""
    mode: Literal["allow-smaller", "allow-bigger", "drop-reminder", "strict"] = "allow-smaller"
    """Treatment of a remainder, if `group_size` does not divide the number of clients. `allow-smaller`:
    a smaller last group. `allow-bigger`: some bigger groups. `drop-reminder`: no group for the
    remainder. `strict`: an error."""
    sort_unique_ids: bool = False
    """Whether the dataset's clients are sorted by their ids before they are grouped."""


FLOWER_SCHEMES: tuple[type[FlowerScheme], ...] = (
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
class SampleRequest:
    """Samples that the topology gives a device explicitly (`data` of its group)."""

    samples: int
    labels: tuple[int, ...] | None
    """Classes to draw from; None if samples of all classes may be drawn."""
    group: int
    """Index in the topology."""


class TooFewSamplesError(ValueError):
    def __init__(self, request: SampleRequest, setting: str, message: str) -> None:
        """`setting` is the key of `data` to change."""
        super().__init__(message)
        self.request, self.setting = request, setting


def draw_requested(
    requests: Mapping[str, SampleRequest], labels: NDArray[Any], seed: int
) -> tuple[dict[str, Indices], Indices]:
    """Draw at random without replacement.

    Requests for fewer classes are served before requests for more classes, which have more choice.
    Requests without classes come last. Returns the indices of each device's samples, and the indices of
    all samples that are left. Raises TooFewSamplesError if a request cannot be met.
    """
    if not requests:
        return {}, np.arange(len(labels))
    has_classes = labels.ndim == 1 and labels.dtype.kind == "i"
    rng = random_generators.generator(seed, "", "by hand")
    left = np.arange(len(labels))
    taken: dict[str, Indices] = {}
    every = len(labels) + 1
    for client, request in sorted(
        requests.items(), key=lambda item: every if item[1].labels is None else len(item[1].labels)
    ):
        fits = np.ones(len(left), dtype=bool)
        if request.labels is not None:
            if not has_classes:
                raise TooFewSamplesError(
                    request, "labels", "the labels of the data are not classes: remove this"
                )
            if missing := [label for label in request.labels if not (labels == label).any()]:
                raise TooFewSamplesError(
                    request,
                    "labels",
                    f"no training sample has class {missing[0]}, expected classes from "
                    f"{int(labels.min())} to {int(labels.max())}",
                )
            fits = np.isin(labels[left], request.labels)
        places = np.flatnonzero(fits)
        if len(places) < request.samples:
            kind = "" if request.labels is None else f" of class {', '.join(map(str, request.labels))}"
            raise TooFewSamplesError(
                request,
                "samples",
                f"{client} needs {request.samples} samples{kind}, but the other devices leave only "
                f"{len(places)}: lower samples here or in their groups",
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
    **{cls.__name__: cls for cls in FLOWER_SCHEMES},
}


def _shuffled(labels: Indices, seed: int) -> Indices:
    """Return indices in random order, so that a contiguous piece is random."""
    return np.random.default_rng(seed).permutation(len(labels))


def _members(labels: Indices) -> dict[int, Indices]:
    """Return class -> indices of its samples, sorted."""
    return {label: np.flatnonzero(labels == label) for label in np.unique(labels).tolist()}


def _shuffled_parts(
    clients: Sequence[str], order: Indices, parts: Sequence[Indices], rng: np.random.Generator
) -> Mapping[str, Indices]:
    """`parts`: places in `order`. Return client -> shuffled entries of `order`."""
    for part in parts:
        rng.shuffle(part)
    return {client: order[part] for client, part in zip(clients, parts, strict=True)}


def _deal(partitioner: Any, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
    """Raises ValueError if the `partitioner` of flwr-datasets cannot divide the samples."""
    from datasets import Dataset as Table

    # Permuted, because the iid partitioner cuts contiguous pieces. In arrow's format, because any other
    # passes labels one by one, which takes seconds.
    order = np.random.default_rng(seed).permutation(len(labels))
    partitioner.dataset = Table.from_dict({"index": order, "label": labels[order]}).with_format("arrow")
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some draw progress bars
        warnings.simplefilter("ignore")  # one for each draw that gave a client too few samples
        dealt = [partitioner.load_partition(number)["index"] for number in range(len(clients))]
    return dict(zip(clients, map(np.asarray, dealt), strict=True))


def _check_enough(labels: Indices, clients: Sequence[str], least: int) -> None:
    if len(labels) < least * len(clients):
        most = len(labels) // least
        fewer = f"at most {quantity(most, 'device')}, " if most else ""
        raise BadInputError(
            f"{quantity(len(clients), 'device')} for {len(labels)} training samples: each needs at "
            f"least {least}. Use {fewer}a larger dataset, or task.partition: {{scheme: resampled}}."
        )
