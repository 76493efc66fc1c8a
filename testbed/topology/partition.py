"""Partition schemes: which samples each client has. To add one: a dataclass, and a row in SCHEMES."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.checks import at_least
from testbed.errors import BadInputError
from testbed.topology import seeds

MIN_SAMPLES = 10
"""The least number of samples per client, on average, where a scheme has no bound of its own."""

Indices = NDArray[np.int64]


class Scheme(Protocol):
    """The parameters of a scheme; its constructor raises ValueError for invalid ones."""

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        """Indices of the samples of each client, by `labels` of shape (n,), each ≥ 0.

        The same for the same arguments. Raises BadInputError that names the setting to change.
        """


@dataclass(frozen=True)
class Iid:
    """Every sample goes to one client, as it comes; all have equally many, to within one."""

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import IidPartitioner

        _check_enough(labels, clients, MIN_SAMPLES)
        return _deal(IidPartitioner(len(clients)), labels, clients, seed)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is dealt out in shares drawn from Dirichlet(alpha): the smaller, the more skewed."""

    alpha: float
    min_samples: int = MIN_SAMPLES
    """No client gets fewer."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha:g}, expected a number above 0")
        at_least("min_samples", self.min_samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import DirichletPartitioner

        _check_enough(labels, clients, self.min_samples)
        partitioner = DirichletPartitioner(
            len(clients), "label", float(self.alpha), min_partition_size=self.min_samples, seed=seed
        )
        try:
            return _deal(partitioner, labels, clients, seed)
        except ValueError as error:
            raise BadInputError(
                f"task.partition: dirichlet with alpha {self.alpha:g} leaves some of the {len(clients)} "
                f"devices fewer than {self.min_samples} samples, in every draw. Raise "
                "task.partition.alpha, lower task.partition.min_samples, or use fewer devices."
            ) from error


@dataclass(frozen=True)
class Pathological:
    """Every client has samples of exactly so many classes: its first by turns, the others at random;
    each class is dealt out evenly to those that have it (Li et al. 2022, arXiv 2102.02079)."""

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        at_least("classes_per_client", self.classes_per_client, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import PathologicalPartitioner

        _check_enough(labels, clients, MIN_SAMPLES)
        partitioner = PathologicalPartitioner(
            len(clients), "label", self.classes_per_client, "first-deterministic", seed=seed
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

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        at_least("shards_per_client", self.shards_per_client, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        from flwr_datasets.partitioner import ShardPartitioner

        _check_enough(labels, clients, max(MIN_SAMPLES, self.shards_per_client))
        partitioner = ShardPartitioner(len(clients), "label", self.shards_per_client, seed=seed)
        return _deal(partitioner, labels, clients, seed)


@dataclass(frozen=True)
class Resampled:
    """Every client draws so many samples from the whole, with replacement: no limit to the clients."""

    samples: int = 60

    def __post_init__(self) -> None:
        at_least("samples", self.samples, 1)

    def deal(self, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
        size = self.samples
        return {
            client: seeds.generator(seed, client, "resampled").integers(len(labels), size=size)
            for client in clients
        }


SCHEMES: dict[str, type[Scheme]] = {
    "dirichlet": Dirichlet,
    "iid": Iid,
    "pathological": Pathological,
    "resampled": Resampled,
    "shards": Shards,
}


def _deal(partitioner: Any, labels: Indices, clients: Sequence[str], seed: int) -> Mapping[str, Indices]:
    """The partition by `partitioner` of flwr-datasets, which raises ValueError where there is none."""
    from datasets import Dataset as Table

    # Permuted, as the iid partitioner deals out contiguous pieces. Labels alone, and in arrow's format:
    # in any other they are handed over one by one, which takes seconds.
    order = np.random.default_rng(seed).permutation(len(labels))
    partitioner.dataset = Table.from_dict({"index": order, "label": labels[order]}).with_format("arrow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for every draw that left a client too few samples
        parts = [partitioner.load_partition(number)["index"] for number in range(len(clients))]
    return dict(zip(clients, map(np.asarray, parts), strict=True))


def _check_enough(labels: Indices, clients: Sequence[str], least: int) -> None:
    if len(labels) < least * len(clients):
        raise BadInputError(
            f"{len(clients)} devices for {len(labels)} training samples: each needs at least {least}. "
            f"Use at most {len(labels) // least} devices, a larger dataset, or "
            "task.partition: {scheme: resampled}."
        )
