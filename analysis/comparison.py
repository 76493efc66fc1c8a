"""Comparison of runs as in the papers' tables: cost of a target accuracy, final accuracy and loss. The
module uses neither I/O nor a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

from agents.events import COMPLETE
from analysis import metrics, summary
from analysis.load import Run
from analysis.manifest import verdict
from analysis.metrics import ConfidenceInterval
from analysis.names import by_settings, distinct

_NAMED = 5
"""Maximum number of runs or rows that a remark names."""
TARGETS = tuple(percent / 100 for percent in (*range(10, 95, 5), 95, 97, 98, 99))
"""Accuracies that `common_target` chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """Results of runs that differ only in their seed: means and 95% confidence intervals (Student's
    t)."""

    name: str
    task: str
    """Name of the task, as `by_task` returns it."""
    target: float
    """Target accuracy, as a share; NaN if there is none."""
    runs: int
    """Number of runs."""
    reached: int
    """Number of runs that reached the target. If a run did not reach it, `time`, `rounds`, `updates` and
    `bytes` are NaN."""
    time: ConfidenceInterval
    """Seconds of device time until the target was reached."""
    rounds: ConfidenceInterval
    """Number of aggregations until the target was reached."""
    updates: ConfidenceInterval
    """Number of applied updates until the target was reached."""
    bytes: ConfidenceInterval
    """Payload size in bytes of the updates applied until the target was reached. Downloads are not
    included."""
    accuracy: ConfidenceInterval
    """Accuracy of the last evaluation, as a share."""
    loss: ConfidenceInterval
    """Loss of the last evaluation."""
    valid: int
    """Number of runs that are valid or simulated."""
    not_judged: int
    """Number of runs in which something could not be checked."""
    repeats: int
    """Number of runs that a sweep has repeated because they were not valid. The other columns do not
    include these runs."""
    speed_up: float
    """Mean time to the target of the first row of the same task, divided by that of this row. NaN if one
    of the two times is NaN."""


def slim(run: Run) -> Run:
    """Return `run` with only the data that this module needs. Many complete runs may not fit into
    memory."""
    updates = run.updates[["applied", "applied_version", "bytes"]].copy()
    return replace(run, updates=updates, telemetry=run.telemetry[:0].copy(), parts=run.parts[:0].copy())


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs in groups, by the name of the group.

    Runs of a group have the same task, the same data of the task, and the same data for evaluation.
    Other accuracies would not be comparable.
    """
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        task, evaluate = run.topology.get("task"), run.topology.get("evaluate")
        task, evaluate = (one if isinstance(one, dict) else {} for one in (task, evaluate))
        key = (str(task.get("name", "?")), repr(task.get("data")), str(evaluate.get("on", "test")))
        groups.setdefault(key, []).append(run)
    names = [name if on == "test" else f"{name} on {on}" for name, _, on in groups]
    return {
        f"{name}, data {names[: place + 1].count(name)}" if names.count(name) > 1 else name: own
        for place, (name, own) in enumerate(zip(names, groups.values(), strict=True))
    }


def remarks(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why figures of `runs` are not comparable."""
    tasks = by_task(runs)
    reasons = []
    if len(tasks) > 1:
        reasons.append(
            f"The runs learn different tasks ({', '.join(tasks)}): "
            "costs are compared only among runs of the same task."
        )
    for task, own in tasks.items():
        ends = {_ends(run): None for run in own}
        if len(ends) > 1:
            which = f"Runs of {task}" if len(tasks) > 1 else "The runs"
            reasons.append(
                f"{which} have different stop conditions ({'; '.join(ends)}): do not compare their "
                "final accuracy and loss."
            )
    cells: dict[tuple[object, ...], int] = {}
    for same in by_settings(runs).values():
        manifest = same[0].manifest
        if (label := manifest.get("label")) is not None:  # a sweep should have one row per label
            cell = (label, manifest.get("runtime"), same[0].path.parent)
            cells[cell] = cells.get(cell, 0) + 1
    if rewritten := list(dict.fromkeys(str(label) for (label, *_), rows in cells.items() if rows > 1)):
        reasons.append(
            f"Several rows belong to {_few(rewritten)}: settings, user code or data files changed "
            "between these runs of a sweep. To leave out the older ones, remove their run directories."
        )
    for name, same in by_settings(runs).items():
        seeds = [run.topology.get("seed") for run in same if verdict(run.manifest) == "simulated"]
        if len(set(seeds)) < len(seeds):
            reasons.append(
                f"Runs of {name} have the same seed, so in virtual time they are identical and the "
                "interval is too narrow: leave out all but one."
            )
    by_hand = {name: "hand" in set(run.scenario["source"]) for name, run in distinct(runs).items()}
    if changed := [name for name, was in by_hand.items() if was]:
        reasons.append(
            f"Changed by hand during the run: {_few(changed)}. Their results do not depend on their "
            "settings alone."
        )
    if early := [name for name, run in distinct(runs).items() if not _is_finished(run)]:
        reasons.append(
            f"Not finished: {_few(early)}. Their accuracy and loss are the latest ones, not final."
        )
    return reasons


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _is_finished(run: Run) -> bool:
    return run.ended is not None and run.ended.reason in COMPLETE


def _ends(run: Run) -> str:
    """Return the stop conditions of a run as text."""
    stop = run.topology.get("stop")
    conditions = stop if isinstance(stop, dict) else {}
    return ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None)


def common_target(runs: Sequence[Run]) -> float | None:
    """Return the highest of `TARGETS` that every run reached. If there is none, return the highest of
    `TARGETS` that any run reached; None if no run reached any."""
    best = [float(run.evaluations["accuracy"].max()) for run in runs]
    some = [target for target in TARGETS if any(target <= one for one in best)]
    common = [target for target in some if all(target <= one for one in best)]
    return max(common or some, default=None)


def compare(runs: Sequence[Run], target: float | None) -> list[ComparisonRow]:
    """Return one row for each set of runs that differ only in their seed, in the order of `runs`.

    `target`: accuracy, as a share, whose cost is compared; None to compare no cost. In that case, the
    costs are NaN.
    """
    rows: list[ComparisonRow] = []
    tasks = {id(run): task for task, own in by_task(runs).items() for run in own}
    for name, same in by_settings(runs).items():
        cost = [metrics.reached(run, nan if target is None else target) for run in same]
        time = metrics.t_interval([one.time for one in cost])
        verdicts = summary.verdicts(same)
        task = tasks[id(same[0])]
        first = next((row.time.mean for row in rows if row.task == task), time.mean)
        rows.append(
            ComparisonRow(
                name=name,
                task=task,
                target=nan if target is None else target,
                runs=len(same),
                reached=sum(not isnan(one.time) for one in cost),
                time=time,
                rounds=metrics.t_interval([one.rounds for one in cost]),
                updates=metrics.t_interval([one.updates for one in cost]),
                bytes=metrics.t_interval([one.bytes for one in cost]),
                accuracy=_final(same, lambda line: line.accuracy),
                loss=_final(same, lambda line: line.loss),
                valid=verdicts.get("valid", 0) + verdicts.get("simulated", 0),
                not_judged=verdicts.get("not judged", 0),
                repeats=sum(int(run.manifest.get("repeats") or 0) for run in same),
                speed_up=metrics.speed_up(time.mean, first),
            )
        )
    return rows


def _final(runs: Sequence[Run], figure: Callable[[summary.Headline], float]) -> ConfidenceInterval:
    return metrics.t_interval([figure(summary.headline(run)) for run in runs])


def percent(share: float) -> str:
    """Format a share as percentage, such as `90%` or `97.5%`."""
    return f"{100 * share:.4g}%"


def texts(rows: Sequence[ComparisonRow]) -> tuple[list[str], list[list[str]]]:
    """Return the rows as headings and cells. A cell is `mean ± half of the interval`, or `–` if there is
    no value."""
    columns: dict[str, Callable[[ComparisonRow], str]] = {
        "": lambda row: row.name,
        "task": lambda row: row.task,
        "runs": lambda row: str(row.runs),
        "time s": lambda row: _spread(row.time, 1.0, 1),
        "rounds": lambda row: _spread(row.rounds, 1.0, 0),
        "updates": lambda row: _spread(row.updates, 1.0, 0),
        "MB up": lambda row: _spread(row.bytes, 1e-6, 2),
        "speed-up": lambda row: "–" if isnan(row.speed_up) else f"{row.speed_up:.2f}×",
        "final accuracy %": lambda row: _spread(row.accuracy, 100.0, 1),
        "final loss": lambda row: _spread(row.loss, 1.0, 3),
    }
    if len({row.task for row in rows}) < 2:
        del columns["task"]
    if all(isnan(row.accuracy.mean) for row in rows):
        costs = ("time s", "rounds", "updates", "MB up", "speed-up", "final accuracy %")
        columns = {name: cell for name, cell in columns.items() if name not in costs}
    elif any(row.reached < row.runs for row in rows):
        columns["reached"] = lambda row: f"{row.reached} of {row.runs}"
    if any(row.valid < row.runs for row in rows):
        columns["valid"] = lambda row: f"{row.valid} of {row.runs}{_not_judged(row)}"
    if any(row.repeats for row in rows):
        columns["repeats"] = lambda row: str(row.repeats)
    return list(columns), [[cell(row) for cell in columns.values()] for row in rows]


def _not_judged(row: ComparisonRow) -> str:
    return f", {row.not_judged} not judged" if row.not_judged else ""


def _spread(interval: ConfidenceInterval, scale: float, digits: int) -> str:
    if isnan(interval.mean):
        return "–"
    mean = f"{interval.mean * scale:,.{digits}f}"
    if isnan(interval.low):
        return mean
    return f"{mean} ± {(interval.high - interval.mean) * scale:,.{digits}f}"
