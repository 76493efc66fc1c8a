"""Comparison of runs as in the papers' tables: cost of a target accuracy, final accuracy and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite, isnan, nan

import pandas as pd

from agents.events import COMPLETE
from analysis import metrics, summary
from analysis.features import COSTS
from analysis.load import Run
from analysis.manifest import verdict
from analysis.metrics import ConfidenceInterval, Cost
from analysis.names import by_settings, coordinates, distinct

_NAMED = 5
"""Maximum number of runs or rows that a remark names."""
TARGETS = tuple(percent / 100 for percent in (*range(10, 95, 5), 95, 97, 98, 99))
"""Accuracies that `common_target` chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """Means of runs that differ only in their seed, with 95% confidence intervals (Student's t) for at
    least three runs."""

    name: str
    settings: Mapping[str, str]
    """Settings in which the row differs from others, with their text (`names.coordinates`)."""
    task: str
    """Group of comparable runs: the task, and if necessary the evaluation and the data (`by_task`)."""
    target: float
    """Accuracy as a share; NaN if there is no target."""
    runs: int
    """Number of runs."""
    reached: int
    """Number of runs that reached the target. If any missed it, costs have no mean, but a median or a
    lower bound of the median."""
    time: Cost
    """Seconds of device time, interpolated between evaluations."""
    resolution: float
    """Seconds between the two evaluations around the target (maximum over the runs); NaN if no run
    reached it."""
    rounds: Cost
    """Aggregations up to the first evaluated model that reached the target."""
    updates: Cost
    """Updates applied up to the first evaluated model that reached the target."""
    bytes: Cost
    """Payload bytes of the updates applied up to the first evaluated model that reached the target,
    without downloads."""
    others: Mapping[str, Cost]
    """Further costs of all devices at the first evaluated model that reached the target, by name
    (`features.COSTS`). Without values if they were not counted."""
    accuracy: ConfidenceInterval
    """Last evaluation, as a share."""
    loss: ConfidenceInterval
    valid: int
    """Runs that are valid or simulated."""
    not_judged: int
    """Runs of which some requested value could not be checked."""
    repeats: int
    """Runs that a sweep has repeated because they were not valid. Other columns do not include them."""
    baseline: str
    """Row that `speed_up` refers to: with the baseline's setting, and otherwise the same settings; empty
    if there is none."""
    speed_up: float
    """Mean time to the target in the baseline's row ÷ that in this row; of medians if a run of the two
    missed the target. NaN if a median is unknown, or without a baseline."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of configurations: runs that differ only in their seed are one."""

    target: float | None
    """Target accuracy, 0 to 1; None if the tasks have different targets."""
    remarks: Sequence[str]
    """Differences that make runs incomparable."""
    rows: Sequence[ComparisonRow]


def slim(run: Run) -> Run:
    """Only the data that this module needs: many complete runs may not fit into memory."""
    updates = run.updates[["applied", "applied_version", "bytes"]].copy()
    return replace(run, updates=updates, telemetry=run.telemetry[:0].copy(), parts=run.parts[:0].copy())


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """By name of the group. Its runs have the same task, data of the task, and data for evaluation;
    accuracies of different groups are not comparable."""
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
    """Reasons why figures of `runs` are not comparable."""
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
    stop = run.topology.get("stop")
    conditions = stop if isinstance(stop, dict) else {}
    return ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None)


def common_target(runs: Sequence[Run]) -> float | None:
    """Highest of `TARGETS` that every run reached, or else any run; None if no run reached any."""
    best = [float(run.evaluations["accuracy"].max()) for run in runs]
    some = [target for target in TARGETS if any(target <= one for one in best)]
    common = [target for target in some if all(target <= one for one in best)]
    return max(common or some, default=None)


def compare(
    runs: Sequence[Run], target: float | None, baseline: str | None = None
) -> list[ComparisonRow]:
    """Return one row for each set of runs that differ only in their seed, in the order of `runs`.

    `target`: accuracy (share) whose cost is compared; without it, costs are NaN.

    `baseline`: name of a row, or text of a setting such as `fedavg` or `lr 0.1`, or several such texts
    with commas between them. If it is None, each task has its own: the rule of its first row, or, if all
    rows have this rule, the first setting of that row that differs from another row. Raises ValueError
    if no row of any task has the baseline's setting.
    """
    sets = by_settings(runs)
    made: dict[str, ComparisonRow] = {}
    refused: list[ValueError] = []
    for task, own in by_task(runs).items():
        same_task = {name: same for name, same in sets.items() if any(same[0] is run for run in own)}
        settings = coordinates([same[0] for same in same_task.values()])
        rows = [
            _row(name, task, same, target, of_row)
            for (name, same), of_row in zip(same_task.items(), settings, strict=True)
        ]
        try:
            made |= {row.name: row for row in _with_speed_up(rows, baseline)}
        except ValueError as error:
            refused.append(error)
            made |= {row.name: row for row in _with_speed_up(rows, None)}
    if refused and len(refused) == len(by_task(runs)):
        raise refused[0]
    return [made[name] for name in sets]


def _row(
    name: str, task: str, runs: Sequence[Run], target: float | None, settings: Mapping[str, str]
) -> ComparisonRow:
    level = nan if target is None else target
    needed = [metrics.reached(run, level) for run in runs]
    crossed = [metrics.crossing(run, "accuracy", level) for run in runs]
    limits = [metrics.UNKNOWN if target is None else metrics.observed(run) for run in runs]
    times = [one.time if isfinite(one.time) else nan for one in crossed]
    verdicts = summary.verdicts(runs)
    return ComparisonRow(
        name=name,
        settings=settings,
        task=task,
        target=level,
        runs=len(runs),
        reached=sum(not isnan(time) for time in times),
        time=metrics.cost(times, [one.time for one in limits]),
        resolution=max((one.resolution for one in crossed if not isnan(one.resolution)), default=nan),
        rounds=metrics.cost([one.rounds for one in needed], [one.rounds for one in limits]),
        updates=metrics.cost([one.updates for one in needed], [one.updates for one in limits]),
        bytes=metrics.cost([one.bytes for one in needed], [one.bytes for one in limits]),
        others={
            name: metrics.cost(
                [one.others[name] for one in needed], [one.others[name] for one in limits]
            )
            for name in COSTS
        },
        accuracy=_final(runs, lambda line: line.accuracy),
        loss=_final(runs, lambda line: line.loss),
        valid=verdicts.get("valid", 0) + verdicts.get("simulated", 0),
        not_judged=verdicts.get("not judged", 0),
        repeats=sum(int(run.manifest.get("repeats") or 0) for run in runs),
        baseline="",
        speed_up=nan,
    )


def _with_speed_up(rows: Sequence[ComparisonRow], baseline: str | None) -> list[ComparisonRow]:
    """Rows of one task. Raises ValueError if none has the setting `baseline`."""
    fixed = _baseline_settings(rows, baseline)
    by_place = {tuple(sorted(row.settings.items())): row for row in reversed(rows)}
    bases = [by_place.get(tuple(sorted({**row.settings, **fixed}.items()))) for row in rows]
    return [
        row if of is None else replace(row, baseline=of.name, speed_up=_speed_up(row.time, of.time))
        for row, of in zip(rows, bases, strict=True)
    ]


def _baseline_settings(rows: Sequence[ComparisonRow], baseline: str | None) -> Mapping[str, str]:
    if baseline is None:
        for key, text in rows[0].settings.items() if rows else ():
            if any(row.settings.get(key) != text for row in rows):
                return {key: text}
        return {}
    if named := next((row for row in rows if row.name == baseline), None):
        return named.settings
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    known = {row.settings[key]: key for key in keys for row in rows if key in row.settings}
    parts = [baseline] if baseline in known else baseline.split(", ")
    if unknown := [part for part in parts if part not in known]:
        raise ValueError(
            f"found {unknown[0]!r}, expected one of {', '.join(known)}, or several of these"
        )
    return {known[part]: part for part in parts}


def _speed_up(time: Cost, baseline: Cost) -> float:
    if isnan(time.mean) or isnan(baseline.mean):
        return metrics.speed_up(time.median, baseline.median)
    return metrics.speed_up(time.mean, baseline.mean)


def _final(runs: Sequence[Run], figure: Callable[[summary.Headline], float]) -> ConfidenceInterval:
    return metrics.seed_interval([figure(summary.headline(run)) for run in runs])


def caption(rows: Sequence[ComparisonRow], *, given: bool) -> str:
    """Sentence on the table of `rows`. `given`: whether the user has set the target."""
    targets = {row.target for row in rows}
    if all(map(isnan, targets)):
        told = "These runs have no test accuracy, so their losses are compared"
    elif len(targets) > 1:
        told = "Needed to reach the highest test accuracy that all runs of the task reached"
    else:
        told = f"Needed to reach a test accuracy of {percent(rows[0].target)}"
        if not given:
            which = "all runs" if all(row.reached == row.runs for row in rows) else "any run"
            told += f", the highest that {which} reached (compare --target sets another)"
    if any(isfinite(row.accuracy.high) or isfinite(row.loss.high) for row in rows):
        told += "; ± is half the width of the 95% interval over seeds"
    if any(row.resolution > 0 for row in rows):
        told += (
            "; times are interpolated between two evaluations, whose distance is the resolution, and "
            "other costs are those of the later one"
        )
    if any(row.reached < row.runs for row in rows):
        told += "; medians are Kaplan–Meier's, with runs that missed the target as censored"
    if len(names := {row.baseline for row in rows if row.baseline}) == 1 and len(rows) > 1:
        told += f"; speed-ups are against {names.pop()}"
    elif names and len(rows) > 1:
        told += "; speed-ups are against the baseline of the same setting"
    return f"{told}."


def percent(share: float) -> str:
    """Text such as `90%` or `97.5%`."""
    return f"{100 * share:.4g}%"


def texts(rows: Sequence[ComparisonRow]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the table, and its rows as texts.

    A cell is one of:

    - `mean ± half of the interval`
    - `mean`, if there are fewer than three runs
    - `median`, if a run missed the target; `median > 120.0` if only a lower bound is known
    - `–`, if there is no value
    """
    columns: dict[str, Callable[[ComparisonRow], str]] = {
        "": lambda row: row.name,
        "task": lambda row: row.task,
        "runs": lambda row: str(row.runs),
        "time s": lambda row: _cost(row.time, 1.0, 1),
        "resolution s": lambda row: "–" if isnan(row.resolution) else f"{row.resolution:,.1f}",
        "rounds": lambda row: _cost(row.rounds, 1.0, 0),
        "updates": lambda row: _cost(row.updates, 1.0, 0),
        "MB up": lambda row: _cost(row.bytes, 1e-6, 2),
        **{f"{name} {cost.unit}": partial(_other_cost, name) for name, cost in COSTS.items()},
        "speed-up": lambda row: "–" if isnan(row.speed_up) else f"{row.speed_up:.2f}×",
        "final accuracy %": lambda row: _spread(row.accuracy, 100.0, 1),
        "final loss": lambda row: _spread(row.loss, 1.0, 3),
    }
    if len({row.task for row in rows}) < 2:
        del columns["task"]
    if all(isnan(row.accuracy.mean) and not row.reached for row in rows):
        kept = ("", "task", "runs", "final loss")
        columns = {name: cell for name, cell in columns.items() if name in kept}
    elif any(row.reached < row.runs for row in rows):
        columns["reached"] = lambda row: f"{row.reached} of {row.runs}"
    for name, cost in COSTS.items():
        if all(_other_cost(name, row) == "–" for row in rows):
            columns.pop(f"{name} {cost.unit}", None)
    if any(row.valid < row.runs for row in rows):
        columns["valid"] = lambda row: f"{row.valid} of {row.runs}{_not_judged(row)}"
    if any(row.repeats for row in rows):
        columns["repeats"] = lambda row: str(row.repeats)
    return list(columns), [[cell(row) for cell in columns.values()] for row in rows]


def _not_judged(row: ComparisonRow) -> str:
    return f", {row.not_judged} not judged" if row.not_judged else ""


def _other_cost(name: str, row: ComparisonRow) -> str:
    return _cost(row.others[name], 1.0, 0)


def _cost(cost: Cost, scale: float, digits: int) -> str:
    if not isnan(cost.mean):
        return _spread(cost, scale, digits)
    sign, value = ("> ", cost.above) if isnan(cost.median) else ("", cost.median)
    if isnan(value):
        return "–"
    return f"{'median ' if cost.count > 1 else ''}{sign}{value * scale:,.{digits}f}"


def _spread(interval: ConfidenceInterval, scale: float, digits: int) -> str:
    if isnan(interval.mean):
        return "–"
    mean = f"{interval.mean * scale:,.{digits}f}"
    if isnan(interval.low):
        return mean
    return f"{mean} ± {(interval.high - interval.mean) * scale:,.{digits}f}"


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    ">": "$>$",
    "<": "$<$",
    "ε": r"$\varepsilon$",
}


def paper_table(rows: Sequence[ComparisonRow]) -> pd.DataFrame:
    """Fields of `ComparisonRow`. An interval such as `time` (s) has the columns `time_mean`, `time_low`
    and `time_high`, a cost also `time_median` and `time_above`, a setting one such as
    `settings_rule`."""
    table = pd.json_normalize([{**(own := asdict(row)), **own.pop("others")} for row in rows], sep="_")
    return table.drop(columns=table.filter(regex="_count$").columns)


def _csv(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    return str(paper_table(rows).to_csv(index=False))


def _markdown(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    headings, cells = texts(rows)
    rule = [":--", *["--:"] * (len(headings) - 1)]
    lines = [" | ".join(cell.replace("|", r"\|") for cell in line) for line in (headings, rule, *cells)]
    table = "\n".join(f"| {line} |" for line in lines)
    return f"{table}\n\n{caption(rows, given=given)}\n"


def _latex(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    headings, cells = texts(rows)
    table = pd.DataFrame([[_escaped(cell) for cell in line] for line in cells])
    text = table.to_latex(
        index=False,
        header=[_escaped(heading) for heading in headings],
        escape=False,
        column_format="l" + "r" * (len(headings) - 1),
    )
    return f"% {caption(rows, given=given)}\n% Needs \\usepackage{{booktabs}}\n{text}"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


TABLE_FORMATS: Mapping[str, Callable[[Sequence[ComparisonRow], bool], str]] = {
    ".csv": _csv,
    ".md": _markdown,
    ".tex": _latex,
}
"""By suffix of the file. Parameters: the rows, and whether the user has set the target."""
