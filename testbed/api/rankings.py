"""What `testbed agree --json` and `testbed twin --json` print. The keys of costs have their unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from analysis import summary
from analysis.agreement import RankAgreement
from analysis.manifest import Verdict
from analysis.twins import TwinRow
from testbed.api.studies import AgreeResult
from testbed.api.twins import TwinPair

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class RankedByTime:
    """Times and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_s: float
    """Mean time to the target in virtual time, in seconds; NaN if a seed did not reach the target."""
    real_s: float
    """Mean time to the target with the real runtime, in seconds; NaN if a seed did not reach it."""
    virtual_rank: int
    real_rank: int


@dataclass(frozen=True, slots=True)
class RankedByEnergy:
    """Energies and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_j: float
    """Mean energy of all devices to the target in virtual time, in joules; NaN if a seed did not reach
    the target."""
    real_j: float
    """Mean energy of all devices to the target with the real runtime, in joules; NaN if a seed did not
    reach the target."""
    virtual_rank: int
    real_rank: int


@dataclass(frozen=True, slots=True)
class RankedTwins:
    """Times and ranks of a configuration in runs and in those of their twins."""

    name: str
    twin_s: float
    """Mean time to the target with the twins, in seconds; NaN if a seed did not reach the target."""
    original_s: float
    """Mean time to the target in the runs, in seconds; NaN if a seed did not reach the target."""
    twin_rank: int
    original_rank: int


@dataclass(frozen=True, slots=True)
class RankedDevice:
    """Ranks of a device by the seconds of the run per update."""

    name: str
    twin_s_per_update: float
    original_s_per_update: float
    twin_rank: int
    original_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement(RankAgreement[RankedByTime]):
    """Agreement of two rankings of configurations: in virtual time, and with a real runtime."""

    configurations: tuple[RankedByTime, ...]
    target: float
    """Target accuracy, 0 to 1."""
    runtime: str
    """Name of the real runtime."""
    verdicts: Mapping[Verdict, int]
    """Verdict -> number of real runs with that verdict."""
    by_energy: RankAgreement[RankedByEnergy] | None
    """Agreement of the rankings by energy; None if a run counted no energy."""


@dataclass(frozen=True, slots=True)
class TwinDevice:
    """A device in a run and in the run of its twin."""

    device: str
    updates: int
    staleness: float
    """Mean staleness in versions; NaN without updates."""
    round: float
    """Mean seconds from the dispatch to the arrival of the update; NaN without updates."""
    twin_updates: int
    twin_staleness: float
    twin_round: float


@dataclass(frozen=True, slots=True)
class ComparedTwin:
    """A run beside the run of its twin."""

    original: str
    """Id of the run."""
    twin: str
    """Id of the twin's run."""
    target: float | None
    """Target accuracy, 0 to 1; None if there is none."""
    remarks: Sequence[str]
    """A sentence for each figure that the run's records lack."""
    figures: Sequence[TwinRow]
    devices: Sequence[TwinDevice]
    ranks: RankAgreement[RankedDevice] | None
    """Ranks of the devices, with the twin in place of virtual time; None for a single device."""


@dataclass(frozen=True, slots=True)
class ComparedTwins:
    """Runs beside the runs of their twins."""

    pairs: Sequence[ComparedTwin]
    target: float | None
    """Target accuracy of `ranks`, 0 to 1; None without ranks."""
    ranks: RankAgreement[RankedTwins] | None
    """Ranks of the configurations, with the twins in place of virtual time; None if there is only one,
    or if no run reached an accuracy."""


def of_agreement(found: AgreeResult) -> Agreement:
    times = _ranked(found.agreement, RankedByTime)
    return Agreement(
        **{field.name: getattr(times, field.name) for field in fields(times)},
        target=found.target,
        runtime=found.runtime,
        verdicts=summary.verdicts(found.real),
        by_energy=None if found.by_energy is None else _ranked(found.by_energy, RankedByEnergy),
    )


def of_twins(
    pairs: Sequence[TwinPair], ranked: tuple[RankAgreement[Any], float] | None
) -> ComparedTwins:
    """`ranked`: result of `twins.rank`."""
    ranks, target = (None, None) if ranked is None else (_ranked(ranked[0], RankedTwins), ranked[1])
    return ComparedTwins([_of_pair(pair) for pair in pairs], target, ranks)


def _of_pair(pair: TwinPair) -> ComparedTwin:
    rows: list[Any] = pair.devices.to_dict("records")
    return ComparedTwin(
        pair.original.name,
        pair.twin.name,
        pair.target,
        pair.remarks,
        pair.figures,
        [TwinDevice(**row) for row in rows],
        None if pair.ranks is None else _ranked(pair.ranks, RankedDevice),
    )


def _ranked(result: RankAgreement[Any], kind: type[C]) -> RankAgreement[C]:
    """Return `result` with configurations of `kind`."""
    named = tuple(kind(*astuple(one)) for one in result.configurations)
    return RankAgreement(named, result.tau, result.low, result.high, result.resampled, result.swapped)
