"""Outcome of a finished run, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed import console
from testbed.console import print_text, quantity

if TYPE_CHECKING:
    from analysis.load import Run
    from testbed.api.outputs import FinishedRun
    from testbed.fidelity.validity import Judgement


def show(judgement: Judgement | None) -> None:
    """Print the requested and the measured resources, and why the run is not valid or not judged."""
    from testbed.fidelity import table as fidelity_table

    if judgement is None:
        return
    console.out().print(fidelity_table.render(judgement.fidelity))
    if judgement.steps:
        latest = max(step.done - step.due for step in judgement.steps)
        done = quantity(len(judgement.steps), "step")
        print_text(f"Scenario: {done} done, at most {1e3 * latest:.0f} ms late")
    validity = judgement.validity
    for title, style, sentences in (
        ("Not valid", "bold red", validity.reasons),
        ("Not judged", "bold", validity.unjudged),
    ):
        if sentences:
            console.out().print(f"\n{title}:", style=style)
            for sentence in sentences:
                print_text(f"  {sentence}")


def finished_run(run: Run) -> FinishedRun:
    from analysis import summary
    from testbed.api.outputs import FinishedRun

    line = summary.headline(run)
    return FinishedRun(
        run.path.name,
        run.path,
        **{name: run.manifest[name] for name in ("runtime", "rule", "task", "outcome")},
        verdict=summary.verdict(run),
        duration_s=line.duration,
        versions=line.versions,
        updates=line.updates,
        dropped=line.dropped,
        accuracy=line.accuracy,
        best_accuracy=line.best_accuracy,
        loss=line.loss,
        perplexity=line.perplexity,
    )
