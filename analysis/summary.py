"""What a run came to: one line per device, and the run's headline. Pure functions of a `Run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import get_args

import numpy as np
import pandas as pd

from agents.texts import quantity
from analysis import manifest, metrics, privacy
from analysis.load import Run
from analysis.manifest import Verdict as Verdict

SHARES = ("busy", "transfer", "idle", "paused", "offline")
"""What the time of a device goes into, in `devices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Accuracy and loss are on the test set, and NaN where the run was never evaluated."""

    rule: str
    versions: int
    """Global models made, the initial one not counted."""
    updates: int
    """Updates applied."""
    dropped: int = 0
    """Updates that came and were not applied; what came twice is counted once."""
    duration: float
    """Seconds of device time."""
    accuracy: float
    """Of the last evaluation, as is `loss`."""
    loss: float
    best_accuracy: float
    evaluated: bool = True
    """Whether the run has any evaluation."""
    perplexity: float = nan
    """Of the last evaluation; NaN where the task has none."""
    ended: str | None
    """Why the run ended; None where it has not."""

    @property
    def applied(self) -> str:
        """`9 updates in 3 versions`, and how many were dropped, if any."""
        dropped = f", {self.dropped:,} dropped" if self.dropped else ""
        return f"{quantity(self.updates, 'update')} in {quantity(self.versions, 'version')}{dropped}"

    @property
    def quality(self) -> str:
        """`accuracy 91.5% (best 92.0%), loss 0.31`; of a task without accuracy the loss alone; of a
        language task the perplexity too."""
        perplexity = "" if isnan(self.perplexity) else f", perplexity {self.perplexity:.4g}"
        if not isnan(self.accuracy):
            best = f"(best {self.best_accuracy:.1%})"
            return f"accuracy {self.accuracy:.1%} {best}, loss {self.loss:.3g}{perplexity}"
        if isnan(self.loss):
            return "loss nan: the model diverged" if self.evaluated else "never evaluated"
        return f"loss {self.loss:.6g}{perplexity}"


def headline(run: Run) -> Headline:
    evaluations = run.evaluations
    last = evaluations.iloc[-1] if len(evaluations) else {"accuracy": np.nan, "loss": np.nan}
    return Headline(
        rule=str(run.topology.get("rule", {}).get("name", "?")),
        versions=run.versions_made,
        updates=len(run.updates),
        dropped=int((~run.rejected["reason"].astype(str).str.startswith("duplicate")).sum()),
        duration=run.duration,
        accuracy=float(last["accuracy"]),
        loss=float(last["loss"]),
        evaluated=len(evaluations) > 0,
        best_accuracy=float(evaluations["accuracy"].max()),
        perplexity=float(last["perplexity"]) if "perplexity" in last else nan,
        ended=None if run.ended is None else run.ended.reason,
    )


def last_parts(run: Run, part: str) -> pd.DataFrame:
    """The last model that was evaluated on each `part` of the data (`class`, `device`), the lowest loss
    first: the spread of the devices' losses is how unequally the model fits them."""
    found = run.parts[run.parts["part"] == part]
    last: pd.DataFrame = found[found["version"] == found["version"].max()]
    return last.sort_values("loss", kind="stable")


def verdict(run: Run) -> Verdict:
    """Whether the run can be believed, as its manifest has it."""
    return manifest.verdict(run.manifest)


def verdicts(runs: Iterable[Run]) -> dict[Verdict, int]:
    """How many of `runs` have each verdict, without those that none has."""
    count = Counter(map(verdict, runs))
    return {one: count[one] for one in get_args(Verdict) if count[one]}


def devices(run: Run) -> pd.DataFrame:
    """One row per device, in the manifest's order, indexed by `device`. The columns:

    `group`, `profile`, `cpu` (share of one host core), `samples`: as planned.
    `updates`: updates of this device that were applied.
    `staleness`: their mean staleness, in versions; NaN without updates.
    `share`: share of contributions: these updates ÷ all updates applied, whatever weight the rule gave
    them; NaN while there are none at all.
    Shares of the run's duration, which sum to 1 (`timeline` defines the states); NaN without duration:
    `busy`: it trained, or was in a round that came to no applied update, transfers of that included.
    `transfer`: it downloaded or uploaded and did not train.
    `idle`: it waited for the aggregator, or thought.
    `paused`, `offline`: it was frozen; it was not there, or cut off.
    `epsilon`: ε so far, of a run with differential privacy (`analysis.privacy`).
    `energy`: joules (`metrics.energy`), where the power of any device is known; NaN of the others.
    """
    given = metrics.contributions(run)
    grouped = run.updates["staleness"].groupby(run.updates["client"], observed=False)
    spent = metrics.utilisation(run)
    table = pd.DataFrame(
        {
            "updates": given["updates"],
            "staleness": grouped.mean().to_numpy(),
            "share": given["share"],
            **{name: spent[name].to_numpy() for name in SHARES},
        },
        index=given.index,
    )
    planned = run.manifest.get("devices", {})
    for place, key in enumerate(("group", "profile", "cpu", "samples")):
        table.insert(place, key, [planned.get(name, {}).get(key) for name in table.index])
    joules, epsilon = metrics.energy(run).to_numpy(), privacy.by_device(run)
    if epsilon is not None:
        table = table.assign(epsilon=epsilon.to_numpy())
    return table if np.isnan(joules).all() else table.assign(energy=joules)


def groups(devices: pd.DataFrame) -> pd.DataFrame:
    """The rows of `devices` put together by their group, indexed by it: sums of `updates`, `share` and
    `energy`, the highest `epsilon`, means of `staleness` (over the updates) and of `SHARES` (over the
    devices), and `count`."""
    weighted = devices.assign(staleness=(devices["staleness"] * devices["updates"]).fillna(0.0))
    gathered = weighted.groupby("group", sort=False).agg(
        profile=("profile", "first"),
        count=("updates", "size"),
        updates=("updates", "sum"),
        staleness=("staleness", "sum"),
        share=("share", "sum"),
        **{name: (name, "mean") for name in SHARES},
    )
    if "epsilon" in devices:
        gathered["epsilon"] = weighted.groupby("group", sort=False)["epsilon"].max()
    if "energy" in devices:
        gathered["energy"] = weighted.groupby("group", sort=False)["energy"].sum(min_count=1)
    return gathered.assign(staleness=gathered["staleness"] / gathered["updates"].replace(0, np.nan))
