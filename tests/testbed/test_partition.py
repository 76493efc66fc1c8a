"""Partition of the samples among the clients."""

from __future__ import annotations

import hashlib
from typing import Any

import flwr_datasets.partitioner as flower
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2_contingency

from testbed.errors import BadInputError
from testbed.topology.partition import (
    MIN_SAMPLES,
    SCHEMES,
    Dirichlet,
    GroupedNaturalIdPartitioner,
    Iid,
    Indices,
    Natural,
    Pathological,
    Resampled,
    SampleRequest,
    Shards,
    SizePartitioner,
    TooFewSamplesError,
    _deal,
    draw_requested,
)

CLIENTS = [f"pi-{number}" for number in range(1, 9)]


def labels(samples: int) -> Indices:
    """Sample k is of class k mod 10."""
    return np.arange(samples) % 10


def deal(samples: int, scheme: str, params: dict[str, Any], seed: int = 7) -> list[Indices]:
    parts = SCHEMES[scheme](**params).deal(labels(samples), CLIENTS, seed)
    assert list(parts) == CLIENTS
    return list(parts.values())


def classes(parts: list[Indices]) -> NDArray[np.int64]:
    """How many samples of each class each client has, shape (clients, 10)."""
    return np.array([np.bincount(part % 10, minlength=10) for part in parts])


@pytest.mark.parametrize(
    ("scheme", "params", "digest"),
    [
        ("iid", {}, "2e8f2744ac27b450"),
        ("dirichlet", {"alpha": 0.3}, "4d76dee2594d95bb"),
        ("pathological", {"classes_per_client": 3}, "101898eab46e2b73"),
        ("power_law", {"exponent": 1.5}, "6e9a79111770d76d"),
        ("shards", {"shards_per_client": 2}, "50843449216e039e"),
        ("resampled", {"samples": 60}, "b13f48730de5e402"),
    ],
)
def test_shards_follow_from_the_seed_and_are_unchanged_across_versions(
    scheme: str, params: dict[str, Any], digest: str
) -> None:
    """All but two schemes assign every sample once."""
    parts, again, other = (deal(1003, scheme, params, seed) for seed in (7, 7, 8))
    assert parts[0].tolist() == again[0].tolist() != other[0].tolist()
    if scheme not in ("shards", "resampled"):
        assert sorted(np.concatenate(parts)) == list(range(1003))
        assert all(part.dtype == np.int64 and len(part) >= MIN_SAMPLES for part in parts)
    together = np.concatenate(parts).astype("<i8").tobytes()
    assert hashlib.sha256(together).hexdigest()[:16] == digest


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    scheme=st.one_of(
        st.builds(Iid),
        st.builds(Dirichlet, st.floats(0.2, 5), st.integers(1, 12), st.booleans()),
        st.builds(
            Pathological,
            st.integers(1, 11),
            st.sampled_from(["random", "deterministic", "first-deterministic"]),
        ),
        st.builds(Shards, st.integers(1, 5), st.none() | st.integers(5, 40), st.booleans()),
        st.builds(Shards, st.none(), st.integers(5, 120), st.booleans()),
    ),
    counts=st.lists(st.integers(1, 60), min_size=3, max_size=10),
    clients=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_partitions_are_those_of_flwr_datasets(
    scheme: Any, counts: list[int], clients: int, seed: int
) -> None:
    labels = np.repeat(np.arange(len(counts)) * 3, counts)  # some numbers are no class
    names = CLIENTS[:clients]
    assume(len(labels) >= 12 * clients)
    partitioner: Any = {
        Iid: lambda: flower.IidPartitioner(clients),
        Dirichlet: lambda: flower.DirichletPartitioner(
            clients, "label", scheme.alpha, scheme.min_samples, scheme.self_balancing, seed=seed
        ),
        Pathological: lambda: flower.PathologicalPartitioner(
            clients, "label", scheme.classes_per_client, scheme.assignment, seed=seed
        ),
        Shards: lambda: flower.ShardPartitioner(
            clients,
            "label",
            scheme.shards_per_client,
            scheme.shard_size,
            scheme.keep_incomplete_shard,
            seed=seed,
        ),
    }[type(scheme)]()
    try:
        theirs = _deal(partitioner, labels, names, seed)
    except ValueError:
        with pytest.raises(BadInputError, match=r"task\.partition"):
            scheme.deal(labels, names, seed)
        return
    ours = scheme.deal(labels, names, seed)
    assert {name: own.tolist() for name, own in ours.items()} == {
        name: own.tolist() for name, own in theirs.items()
    }


@pytest.mark.parametrize(
    ("name", "params", "sizes"),
    [
        ("ContinuousPartitioner", {"strictness": 1.0}, [90] * 8),
        ("dirichlet", {"alpha": (0.5,) * 8, "self_balancing": True}, None),
        ("ExponentialPartitioner", {}, None),
        ("InnerDirichletPartitioner", {"partition_sizes": (90,) * 8, "alpha": (1.0,) * 10}, [90] * 8),
        ("LinearPartitioner", {}, [20 * k for k in range(1, 9)]),
        ("pathological", {"classes_per_client": 3, "assignment": "random"}, None),
        ("shards", {"shards_per_client": None, "shard_size": 45}, [90] * 8),
        ("SizePartitioner", {"partition_sizes": (10, 20, 30, 40, 50, 60, 70, 80)}, [*range(10, 90, 10)]),
        ("SquarePartitioner", {}, None),
        (
            "DistributionPartitioner",
            {
                "distribution_array": ((1.0, 3.0),) * 8,
                "num_unique_labels_per_partition": 2,
                "preassigned_num_samples_per_label": 1,
            },
            None,
        ),
    ],
)
def test_flower_partitioners_take_their_parameters(
    name: str, params: dict[str, Any], sizes: list[int] | None
) -> None:
    """They choose the sizes, and assign no sample twice. One of them needs as many classes as
    devices."""
    samples = 7200 if name == "ExponentialPartitioner" else 720
    classes = 8 if name == "DistributionPartitioner" else 10
    scheme = SCHEMES[name](**params)
    first, again = (scheme.deal(np.arange(samples) % classes, CLIENTS, 7) for _ in range(2))
    parts = [*first.values()]
    assert [*map(list, parts)] == [*map(list, again.values())]
    together = np.concatenate(parts)
    assert len(set(together)) == len(together) > 350
    assert all(len(part) for part in parts)
    if sizes is not None:
        assert [len(part) for part in parts] == sizes


def test_flower_partitions_by_the_clients_of_the_dataset() -> None:
    owners = np.arange(240) % 24
    first = Natural(choice="first").deal(owners, CLIENTS, 7)
    assert [{*owners[part].tolist()} for part in first.values()] == [{k} for k in range(8)]
    (one,) = {len(part) for part in first.values()}
    grouped = GroupedNaturalIdPartitioner(group_size=3).deal(owners, CLIENTS, 7)
    assert one == 10
    assert all(len(set(owners[part])) == 3 for part in grouped.values())
    with pytest.raises(BadInputError, match="240 samples among 8 devices: it makes"):
        GroupedNaturalIdPartitioner(group_size=4).deal(owners, CLIENTS, 7)
    with pytest.raises(BadInputError, match=r"greater than zero\."):
        SizePartitioner(partition_sizes=(0,) * 8).deal(owners, CLIENTS, 7)
    with pytest.raises(BadInputError, match=r"partition\.alpha has 2 numbers"):
        Dirichlet(alpha=(1.0, 2.0)).deal(owners, CLIENTS, 7)
    with pytest.raises(BadInputError, match="shards cannot divide"):
        Shards(shards_per_client=None, shard_size=200).deal(owners, CLIENTS, 7)


def test_shards_scheme_gives_equal_pieces_of_few_classes() -> None:
    parts = deal(1603, "shards", {"shards_per_client": 2})
    assert [len(part) for part in parts] == [200] * 8
    assert len(set(np.concatenate(parts))) == 1600
    assert (classes(parts) > 0).sum(axis=1).max() <= 4  # a piece of 100 meets two classes at most


def test_resampled_scheme_serves_any_number_of_clients() -> None:
    clients = [f"pi-{number}" for number in range(50_000)]
    parts = Resampled(samples=500).deal(labels(1000), clients, seed=1)
    assert len(parts) == 50_000
    drawn = parts["pi-49999"]
    assert drawn.shape == (500,)
    assert len(set(drawn)) < 500  # with replacement
    assert 0 <= drawn.min() < drawn.max() < 1000
    assert drawn.tolist() != parts["pi-0"].tolist()
    alone = Resampled(samples=500).deal(labels(1000), ["pi-49999"], seed=1)
    assert alone["pi-49999"].tolist() == drawn.tolist()


def test_iid_class_counts_match_random_assignment() -> None:
    """Pearson's statistic of a table of devices and classes has the mean (8−1)(10−1) = 63 and
    twice that as its variance."""
    found = [chi2_contingency(classes(deal(8000, "iid", {}, seed))).statistic for seed in range(8)]
    assert np.mean(found) == pytest.approx(63, abs=3 * np.sqrt(2 * 63 / 8))


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution() -> None:
    """A device's share of a class has the mean 1/N and the variance (1/N)(1 − 1/N)/(αN + 1)."""
    alpha, n = 0.7, len(CLIENTS)
    tables = [
        classes(deal(5_000, "dirichlet", {"alpha": alpha, "min_samples": 1}, seed)) for seed in range(20)
    ]
    shares = np.concatenate([table / table.sum(axis=0) for table in tables])
    assert shares.mean() == pytest.approx(1 / n)
    assert shares.var() == pytest.approx((1 / n) * (1 - 1 / n) / (alpha * n + 1), rel=0.1)


def test_pathological_classes_are_split_evenly_among_their_devices() -> None:
    counts = classes(deal(8000, "pathological", {"classes_per_client": 3}))
    assert (counts > 0).sum(axis=1).tolist() == [3] * 8
    for column in counts.T:
        held = column[column > 0]
        assert held.max() - held.min() <= 1
        assert held.sum() in (0, 800)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    samples=st.integers(160, 3000),
    exponent=st.floats(0, 3),
    least=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_sizes_follow_the_power_law(samples: int, exponent: float, least: int, seed: int) -> None:
    """n_r = m + (n − N·m)·r^(−a) / Σ s^(−a), to within a sample."""
    parts = deal(samples, "power_law", {"exponent": exponent, "min_samples": least}, seed)
    assert sorted(np.concatenate(parts)) == list(range(samples))
    ranks = np.arange(1, 9) ** -exponent
    expected = least + (samples - 8 * least) * ranks / ranks.sum()
    assert np.sort([len(part) for part in parts])[::-1] == pytest.approx(expected, abs=1)


def test_each_device_is_one_client_of_the_dataset() -> None:
    owners = np.repeat(np.arange(12), [*[10] * 9, 9, 1, 100])
    owners = np.random.default_rng(0).permutation(owners)
    parts = [*Natural(min_samples=10).deal(owners, CLIENTS, seed=1).values()]
    found = [set(owners[part].tolist()) for part in parts]
    assert all(len(owner) == 1 for owner in found)
    assert len(set.union(*found)) == 8
    assert not set.union(*found) & {9, 10}  # too small
    assert all(
        len(part) == (owners == owner.pop()).sum() for part, owner in zip(parts, found, strict=True)
    )
    message = r"8 devices, but .* 1 client with at least 11 samples \(12 in all\)\. .*, or lower"
    with pytest.raises(BadInputError, match=message):
        Natural(min_samples=11).deal(owners, CLIENTS, seed=1)
    with pytest.raises(BadInputError, match=r"\(6 in all\)\. Use fewer devices\.$"):
        Natural(min_samples=11).deal(owners[owners < 6], CLIENTS, seed=1)


def test_devices_with_few_classes_choose_first() -> None:
    requests = {"any": SampleRequest(950, None, 0), "zero": SampleRequest(50, (0,), 1)}
    given_, rest = draw_requested(requests, labels(1000), seed=3)
    assert list(given_) == ["any", "zero"]
    assert sorted(np.concatenate([*given_.values()])) == list(range(1000))
    assert not len(rest)
    assert (given_["zero"] % 10 == 0).all()
    with pytest.raises(TooFewSamplesError, match=r"zero needs 101 samples of class 0, .* only 100"):
        draw_requested({"zero": SampleRequest(101, (0,), 0)}, labels(1000), seed=3)


def test_impossible_partition_names_the_key_to_change() -> None:
    with pytest.raises(BadInputError, match=r"alpha 0\.01 .* 8 devices .* Raise task\.partition\.alpha"):
        deal(100, "dirichlet", {"alpha": 0.01})
    with pytest.raises(BadInputError, match=r"8 devices for 79 training samples: .* at most 7 devices"):
        deal(79, "iid", {})
    with pytest.raises(BadInputError, match=r"has 10 classes\. Lower"):
        deal(100, "pathological", {"classes_per_client": 11})
    with pytest.raises(BadInputError, match=r"each needs at least 13\. Use at most 7 devices"):
        deal(100, "shards", {"shards_per_client": 13})
    with pytest.raises(BadInputError, match=r"lower task\.partition\.min_samples"):
        deal(100, "dirichlet", {"alpha": 0.5})
    assert min(map(len, deal(100, "dirichlet", {"alpha": 0.5, "min_samples": 1}))) >= 1
    with pytest.raises(BadInputError, match="cannot give each of 8 devices samples of 2 classes"):
        Pathological(2).deal(np.array([0, *[1] * 99]), CLIENTS, seed=1)


@pytest.mark.parametrize(
    ("scheme", "params"),
    [
        ("dirichlet", {"alpha": 0}),
        ("dirichlet", {"alpha": 1, "min_samples": 0}),
        ("pathological", {"classes_per_client": 0}),
        ("natural", {"min_samples": 0}),
        ("power_law", {"exponent": -1}),
        ("power_law", {"min_samples": 0}),
        ("shards", {"shards_per_client": 0}),
        ("resampled", {"samples": 0}),
    ],
)
def test_invalid_parameters_are_refused(scheme: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SCHEMES[scheme](**params)
