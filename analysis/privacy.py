"""Differential privacy of each client: ε for the δ in the run's topology (docs/concepts/privacy.md).

ε is composed over the client's own participations, with dp-accounting's RDP accountant. Amplification by
sampling is not claimed, because asynchronous clients decide themselves when they take part.

A participation has Gaussian noise with a multiplier z. Participations with z_1, z_2, … have the same RDP
as one participation with 1/z² = Σ 1/z_k². The history of a client is therefore one number, Σ 1/z_k².
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from analysis.part import AnalysisPart, ProgressFigure, SummaryColumn

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run


def settings(run: Run) -> Mapping[str, Any] | None:
    """`privacy.differential` of the topology (`clip`, `noise`, `at`, `delta`)."""
    differential: Mapping[str, Any] | None = (run.topology.get("privacy") or {}).get("differential")
    return differential


@functools.lru_cache(maxsize=4096)
def epsilon(spent: float, delta: float) -> float:
    """ε at δ = `delta`: 0 if `spent` is 0, otherwise NaN if dp-accounting is not installed. `spent`: Σ
    1/z_k² over the client's participations, with noise multipliers z_k."""
    if spent == 0:
        return 0.0
    if importlib.util.find_spec("dp_accounting") is None:
        return math.nan
    from dp_accounting import dp_event  # takes seconds to import
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(1 / math.sqrt(spent)))
    return float(accountant.get_epsilon(delta))


def participations(run: Run) -> pd.DataFrame:
    """Return the participations in a run with differential privacy, in order of time. Columns: `client`,
    `at` (s), and `spent`, which is 1/z² of the participation.

    With noise at the client, each update that arrived is a participation, even if it was rejected or
    lost.

    With noise at the server, each version is a participation of every client that contributed to it. The
    noise is z times the bound of the version's heaviest update. 1/z of a participation is therefore
    multiplied by the total weight of the client's updates ÷ the weight of the heaviest update.
    """
    import pandas as pd

    wanted = settings(run)
    if wanted is None:
        raise ValueError(f"{run.name} has no privacy.differential")
    if wanted["at"] == "server":
        found = _of_versions(run)
    else:
        applied = run.updates[["client", "arrived", "dispatch"]].rename(columns={"arrived": "at"})
        others = run.rejected.loc[run.rejected["dispatch"] > 0, ["client", "at", "dispatch"]]
        # Updates that were in the rule's buffer when the run was interrupted: their rounds were recorded
        # as unfinished, with their arrival in `until`.
        held = run.unfinished.query("until < at and dispatch > 0").assign(at=lambda rows: rows["until"])
        parts = (applied, others, held[["client", "at", "dispatch"]])
        found = pd.concat([part.astype({"client": object}) for part in parts])
        found = found.drop_duplicates(["client", "dispatch"]).assign(share=1.0)
    spent = (found["share"] / float(wanted["noise"])) ** 2
    found = found.assign(spent=spent).sort_values("at", kind="stable")
    return found[["client", "at", "spent"]].reset_index(drop=True)


def _of_versions(run: Run) -> pd.DataFrame:
    """A row per client and version: `at`, the time of the version in seconds, and `share`, the total
    weight of the client's updates ÷ the weight of the version's heaviest update."""
    updates = run.updates.astype({"client": object})
    heaviest = updates.groupby("applied_version")["weight"].transform("max")
    updates = updates.assign(share=updates["weight"] / heaviest)
    grouped = updates.groupby(["client", "applied_version"], sort=False)
    return grouped.agg(at=("applied", "first"), share=("share", "sum")).reset_index()


def by_device(run: Run) -> pd.Series[float] | None:
    """ε of each client so far, in the order of `run.devices`; None without differential privacy."""
    wanted = settings(run)
    if wanted is None:
        return None
    names = run.updates["client"].cat.categories
    total = participations(run).groupby("client")["spent"].sum().reindex(names).fillna(0.0)
    return total.map(lambda spent: epsilon(float(spent), float(wanted["delta"]))).rename("epsilon")


def highest(run: Run, at: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Highest ε of any client at each of the device times `at` (s); NaN without differential privacy."""
    wanted, at = settings(run), np.asarray(at, np.float64)
    if wanted is None:
        return np.full(at.shape, math.nan)
    found = participations(run)
    total = found.groupby("client")["spent"].cumsum().cummax().to_numpy()
    place = np.searchsorted(found["at"].to_numpy(), at, side="right")
    spent = np.append(0.0, total)[place]
    return np.array([epsilon(float(one), float(wanted["delta"])) for one in spent])


def record(run: Run) -> dict[str, Any] | None:
    """Entry for the manifest: δ and the ε of each client; None without differential privacy."""
    wanted, found = settings(run), by_device(run)
    if wanted is None or found is None:
        return None
    known = {str(name): None if math.isnan(one) else round(one, 6) for name, one in found.items()}
    return {"delta": wanted["delta"], "epsilon": known}


PART = AnalysisPart(
    summary=[SummaryColumn("epsilon", by_device, together="max", title="ε")],
    progress=[ProgressFigure("epsilon", "highest ε of a client", "", highest)],
)
