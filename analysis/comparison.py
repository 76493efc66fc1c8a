"""Runs beside each other as in the papers' tables: what a target cost, what came of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

from agents.events import COMPLETE
from analysis import metrics, summary
from analysis.load import Run
from analysis.manifest import verdict
from analysis.metrics import Interval
from analysis.names import by_settings, distinct

_NAMED = 5
"""Runs, or rows, that a remark names."""
TARGETS = tuple(percent / 100 for percent in (*range(10, 95, 5), 95, 97, 98, 99))
"""Accuracies that `common_target` chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Runs that differ in nothing but their seed. Means and their 95% intervals (Student's t)."""

    name: str
    task: str
    """As `by_task` names it."""
    target: float
    """Accuracy (share) that costs are those of; NaN where there is none."""
    runs: int
    reached: int
    """Of them, those that reached the target. Where it is not all, what the target cost is NaN."""
    time: Interval
    """To the target: seconds of device time; `rounds`: global models; `updates`; `bytes`: payload of
    these updates, which devices sent up. What went down to them is not counted."""
    rounds: Interval
    updates: Interval
    bytes: Interval
    accuracy: Interval
    """Of the last evaluation, as is `loss`."""
    loss: Interval
    valid: int
    """Of the runs, those that can be believed: valid, or simulated."""
    not_judged: int
    """Of the runs, those of which something could not be checked."""
    repeats: int
    """Runs that a sweep has repeated as they were not valid; they count nowhere else."""
    speed_up: float
    """Mean time to the target of the first row of the same task ÷ that of this one; NaN where either
    is."""


def slim(run: Run) -> Run:
    """`run` with no more than the functions here take: of many runs at once, the rest may not fit into
    memory."""
    updates = run.updates[["applied", "applied_version", "bytes"]].copy()
    return replace(run, updates=updates, telemetry=run.telemetry[:0].copy(), parts=run.parts[:0].copy())


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by what they learn and are measured on: the name of the task, its data, and what the
    model is evaluated on. An accuracy of one has nothing to do with the same accuracy of another."""
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        task, evaluate = run.topology.get("task"), run.topology.get("evaluate")
        task, evaluate = (one if isinstance(one, dict) else {} for one in (task, evaluate))
        key = (str(task.get("name", "?")), repr(task.get("data")), str(evaluate.get("on", "test")))
        found.setdefault(key, []).append(run)
    names = [name if on == "test" else f"{name} on {on}" for name, _, on in found]
    return {
        f"{name}, data {names[: place + 1].count(name)}" if names.count(name) > 1 else name: own
        for place, (name, own) in enumerate(zip(names, found.values(), strict=True))
    }


def remarks(runs: Sequence[Run]) -> list[str]:
    """What keeps figures of these runs from being compared."""
    tasks = by_task(runs)
    told = []
    if len(tasks) > 1:
        told.append(
            f"The runs learn different tasks ({', '.join(tasks)}): "
            "what they cost is compared only among runs of the same task."
        )
    for task, own in tasks.items():
        ends = {_ends(run): None for run in own}
        if len(ends) > 1:
            which = f"Runs of {task}" if len(tasks) > 1 else "The runs"
            told.append(
                f"{which} end by different conditions ({'; '.join(ends)}): do not compare their final "
                "accuracy and loss."
            )
    cells: dict[tuple[object, ...], int] = {}
    for same in by_settings(runs).values():
        manifest = same[0].manifest
        if (label := manifest.get("label")) is not None:  # of a sweep, in which it has one row
            cell = (label, manifest.get("runtime"), same[0].path.parent)
            cells[cell] = cells.get(cell, 0) + 1
    if rewritten := list(dict.fromkeys(str(label) for (label, *_), rows in cells.items() if rows > 1)):
        told.append(
            f"Several rows are of {_few(rewritten)}: settings, own code or data files changed between "
            "these runs of a sweep. To leave out former ones, remove their run directories."
        )
    for name, same in by_settings(runs).items():
        seeds = [run.topology.get("seed") for run in same if verdict(run.manifest) == "simulated"]
        if len(set(seeds)) < len(seeds):
            told.append(
                f"Runs of {name} have the same seed: in virtual time they are the same run, so leave "
                "out all but one, or their interval is too narrow."
            )
    by_hand = {name: "hand" in set(run.scenario["source"]) for name, run in distinct(runs).items()}
    if changed := [name for name, was in by_hand.items() if was]:
        told.append(
            f"Changed by hand during the run: {_few(changed)}. What came of them is not due to their "
            "settings alone."
        )
    if early := [name for name, run in distinct(runs).items() if not _came_to_its_end(run)]:
        told.append(
            f"Not finished: {_few(early)}. Their accuracy and loss are the latest ones, and not final."
        )
    return told


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _came_to_its_end(run: Run) -> bool:
    return run.ended is not None and run.ended.reason in COMPLETE


def _ends(run: Run) -> str:
    stop = run.topology.get("stop")
    given = stop if isinstance(stop, dict) else {}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest of `TARGETS` that every run reached, or where there is none, that any run did; None
    where no run has an accuracy."""
    best = [float(run.evaluations["accuracy"].max()) for run in runs]
    some = [target for target in TARGETS if any(target <= one for one in best)]
    common = [target for target in some if all(target <= one for one in best)]
    return max(common or some, default=None)


def compare(runs: Sequence[Run], target: float | None) -> list[Row]:
    """A row for each set of runs that are alike but for their seed, in the order given.

    Without a `target` (a share) what one cost is NaN.
    """
    rows: list[Row] = []
    tasks = {id(run): task for task, own in by_task(runs).items() for run in own}
    for name, same in by_settings(runs).items():
        cost = [metrics.reached(run, nan if target is None else target) for run in same]
        time = metrics.t_interval([one.time for one in cost])
        verdicts = summary.verdicts(same)
        task = tasks[id(same[0])]
        first = next((row.time.mean for row in rows if row.task == task), time.mean)
        rows.append(
            Row(
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


def _final(runs: Sequence[Run], of: Callable[[summary.Headline], float]) -> Interval:
    return metrics.t_interval([of(summary.headline(run)) for run in runs])


def percent(share: float) -> str:
    """`90%`, `97.5%`."""
    return f"{100 * share:.4g}%"


def texts(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells for people: `mean ± half of the interval`; `–` is what there is not."""
    columns: dict[str, Callable[[Row], str]] = {
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


def _not_judged(row: Row) -> str:
    return f", {row.not_judged} not judged" if row.not_judged else ""


def _spread(interval: Interval, scale: float, digits: int) -> str:
    if isnan(interval.mean):
        return "–"
    mean = f"{interval.mean * scale:,.{digits}f}"
    if isnan(interval.low):
        return mean
    return f"{mean} ± {(interval.high - interval.mean) * scale:,.{digits}f}"
