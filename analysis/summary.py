"""Summary of a run: one line per device, and a headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import get_args

import numpy as np
import pandas as pd

from agents.texts import name_list, quantity
from analysis import manifest, metrics
from analysis.features import SUMMARY
from analysis.load import Run
from analysis.manifest import Verdict as Verdict

_MOST_NAMED = 3
SHARES = ("busy", "transfer", "idle", "paused", "offline")
"""Columns of `devices` that are shares of a device's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Accuracy and loss are on the test set; NaN if the run was never evaluated."""

    rule: str
    versions: int
    """Global models made, without the initial one."""
    updates: int
    """Applied updates."""
    dropped: int = 0
    """Updates that arrived but were not applied. Duplicates do not count."""
    duration: float
    """Seconds of device time."""
    accuracy: float
    """Last evaluation, as a share."""
    loss: float
    """Last evaluation."""
    best_accuracy: float
    """Highest of all evaluations, as a share."""
    evaluated: bool = True
    has_loss: bool = True
    """A Flower app may report no loss."""
    perplexity: float = nan
    """Last evaluation; NaN if the task has none."""
    ended: str | None
    """Why the run ended; None if it has not."""

    @property
    def applied(self) -> str:
        """Text such as `9 updates in 3 versions`, with the number of dropped updates if there are
        any."""
        dropped = f", {self.dropped:,} dropped" if self.dropped else ""
        return f"{quantity(self.updates, 'update')} in {quantity(self.versions, 'version')}{dropped}"

    @property
    def quality(self) -> str:
        """Text such as `accuracy 91.5% (best 92.0%), loss 0.31`; without accuracy if the task has none,
        with the perplexity of a language task."""
        perplexity = "" if isnan(self.perplexity) else f", perplexity {self.perplexity:.4g}"
        if not isnan(self.accuracy):
            best = f"(best {self.best_accuracy:.1%})"
            return f"accuracy {self.accuracy:.1%} {best}, loss {self.loss:.3g}{perplexity}"
        if isnan(self.loss):
            if not self.evaluated:
                return "never evaluated"
            return "loss nan: the model diverged" if self.has_loss else "no loss reported"
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
        has_loss=bool(evaluations["loss"].notna().any()),
        best_accuracy=float(evaluations["accuracy"].max()),
        perplexity=float(last["perplexity"]) if "perplexity" in last else nan,
        ended=None if run.ended is None else run.ended.reason,
    )


def unused_devices(run: Run) -> str:
    """Sentence on devices of which updates arrived, but none was applied, such as those that are always
    above `bounds.staleness`; empty if there are none."""
    applied = {*map(str, run.updates["client"].unique())}
    client, reason = (run.rejected[name].astype(str) for name in ("client", "reason"))
    unused = run.rejected[~client.isin(applied) & ~reason.str.startswith("duplicate")]
    if unused.empty:
        return ""
    names = sorted({*map(str, unused["client"])})
    last = unused["reason"].iloc[-1]
    return f"No update of {name_list(names, _MOST_NAMED)} was used. The last one: {last}"


def last_parts(run: Run, part: str) -> pd.DataFrame:
    """`part`: `class` or `device`. The lowest loss comes first; the spread shows how unequally the model
    fits the parts."""
    evaluations = run.parts[run.parts["part"] == part]
    last: pd.DataFrame = evaluations[evaluations["version"] == evaluations["version"].max()]
    return last.sort_values("loss", kind="stable")


def verdict(run: Run) -> Verdict:
    return manifest.verdict(run.manifest)


def verdicts(runs: Iterable[Run]) -> dict[Verdict, int]:
    """Verdicts that no run has are left out."""
    count = Counter(map(verdict, runs))
    return {one: count[one] for one in get_args(Verdict) if count[one]}


def devices(run: Run) -> pd.DataFrame:
    """Return one row per device, in the manifest's order, indexed by `device`. The columns:

    - `group`, `profile`, `cpu` (share of one host core), `samples`: as in the run's plan.
    - `updates`: number of applied updates of the device.
    - `staleness`: mean staleness of these updates, in versions; NaN without updates.
    - `share`: number of these updates ÷ number of all applied updates. Weights do not count. NaN if
      the run has no applied update.

    The following columns are shares of the run's duration, and sum to 1. They are NaN if the duration
    is 0. `device_states` describes the states.

    - `busy`: training, making a mask, or in a round whose update is not applied. The transfers of
      such a round count as `busy`.
    - `transfer`: downloading or uploading, without training.
    - `idle`: waiting for the aggregator, or think time.
    - `paused`: frozen. `offline`: absent, cut off from the network, or without power.

    Some runs have columns of features (`analysis.features`), too.
    """
    shares = metrics.contributions(run)
    grouped = run.updates["staleness"].groupby(run.updates["client"], observed=False)
    spent = metrics.utilisation(run)
    spent["offline"] += spent["unpowered"]
    table = pd.DataFrame(
        {
            "updates": shares["updates"],
            "staleness": grouped.mean().to_numpy(),
            "share": shares["share"],
            **{name: spent[name].to_numpy() for name in SHARES},
        },
        index=shares.index,
    )
    planned = run.manifest.get("devices", {})
    facts = [planned.get(name, {}) for name in table.index]
    for place, key in enumerate(("group", "profile", "cpu", "samples")):
        table.insert(place, key, [one.get(key) for one in facts])
    more = {column.name: column.values(run) for column in SUMMARY}
    return table.assign(**{name: own.to_numpy() for name, own in more.items() if own is not None})


def _common(profiles: pd.Series) -> object:
    """Value that all have, or `drawn` if they differ."""
    return profiles.iloc[0] if profiles.nunique(dropna=False) == 1 else "drawn"


def groups(devices: pd.DataFrame) -> pd.DataFrame:
    """Aggregate the rows of `devices`; return a table indexed by group.

    It has the sums of `updates` and `share`, and the means of `staleness` (over the updates) and of
    `SHARES` (over the devices). `profile` is `drawn` if the devices have different ones. `count`: number
    of devices. Columns of features say themselves how they are aggregated.
    """
    weighted = devices.assign(staleness=(devices["staleness"] * devices["updates"]).fillna(0.0))
    table = weighted.groupby("group", sort=False).agg(
        profile=("profile", _common),
        count=("updates", "size"),
        updates=("updates", "sum"),
        staleness=("staleness", "sum"),
        share=("share", "sum"),
        **{name: (name, "mean") for name in SHARES},
    )
    for column in SUMMARY:
        if column.name in devices:
            own = weighted.groupby("group", sort=False)[column.name]
            table[column.name] = own.max() if column.together == "max" else own.sum(min_count=1)
    return table.assign(staleness=table["staleness"] / table["updates"].replace(0, np.nan))
