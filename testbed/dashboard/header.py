from __future__ import annotations

from contextlib import suppress
from html import escape
from math import isnan, nan
from typing import NamedTuple

from agents import events
from analysis import summary
from analysis.figures import energy
from analysis.load import Run
from testbed.dashboard.feed import Feed
from testbed.fidelity.validity import Validity, recorded_reasons
from testbed.topology import StopSettings
from testbed.traits import is_simulated

_RATE_SECONDS = 10.0


def header(feed: Feed, name: str = "") -> str:
    """`name`: short name of the run; empty if the page shows only one run."""
    run = feed.run
    if run is None:
        return escape(feed.error)
    line, stop = summary.headline(run), _stop(run)
    running = feed.live and run.ended is None
    consumed = run.energy.groupby("device", observed=True)["consumed"].last()
    facts = {
        "device time": _time(line.duration, stop, running=running),
        "updates": _updates(run, feed.updates, stop, running=running),
        "version": f"{line.versions:,}",
        "accuracy": _accuracy(line.accuracy, stop),
        "loss": "–" if isnan(line.loss) else f"{line.loss:.4g}",
        **({} if consumed.empty else {"energy": energy(consumed.sum())}),
        "task": str(run.manifest.get("task", "?")),
        "runtime": _runtime(run),
        "validity": _validity(run, feed),
    }
    items = "".join(f"<span>{name} <b>{escape(value)}</b></span> " for name, value in facts.items())
    problems = filter(None, (run.manifest.get("error"), feed.error))
    problem = "".join(f'<p class="problem">{escape(each)}</p>' for each in problems)
    kind, state = _state(run, feed)
    return (
        f"<style>{_STYLE}</style><h1>{escape(name or line.rule)} <small>{escape(run.name)}</small> "
        f'<em class="{kind}">{escape(state)}</em></h1>'
        f"{_progress(run, feed.updates, stop) if running else ''}<p>{items}</p>{problem}"
    )


_STYLE = """
.bk-clearfix { display: block !important; width: 100% }
h1 { font-size: 18px; margin: 0 0 4px; overflow-wrap: anywhere } p { margin: 0 }
small { font-weight: normal; opacity: .75 }
em { font-style: normal; font-size: 13px; border: 1px solid; border-radius: 9px; padding: 1px 8px;
  display: inline-block }
em.live { color: light-dark(#00714f, #2cc295) } em.bad, .problem { color: light-dark(#b24400, #ff9a5a) }
.problem { white-space: pre-wrap; overflow-wrap: anywhere }
span { margin-right: 16px; display: inline-block } b { font-variant-numeric: tabular-nums }
progress { width: 100%; height: 6px; display: block; margin: 4px 0; accent-color: #009E73 }
"""


class _Stop(NamedTuple):
    """Stop conditions, as in `config.StopConditions`."""

    after: float | None = None
    updates: int | None = None
    target_accuracy: float | None = None


def _stop(run: Run) -> _Stop:
    """All are None if the topology has another version and cannot be read."""
    with suppress(ValueError, TypeError):
        stop = StopSettings.model_validate(run.topology.get("stop")).build()
        return _Stop(stop.after, stop.updates, stop.target_accuracy)
    return _Stop()


def _time(seconds: float, stop: _Stop, *, running: bool) -> str:
    if not running or stop.after is None:
        return f"{seconds:,.1f} s"
    return f"{seconds:,.0f} s of {stop.after:,g} s"


def _updates(run: Run, count: int, stop: _Stop, *, running: bool) -> str:
    limit = f" of {stop.updates:,}" if running and stop.updates is not None else ""
    return f"{count:,}{limit} ({_rate(run, count, running=running):,.1f}/s)"


def _rate(run: Run, count: int, *, running: bool) -> float:
    """Over the last seconds if `running`, else over the whole run."""
    if not running:
        return count / run.duration if run.duration else 0.0
    window = min(_RATE_SECONDS, run.duration)
    recent = int((run.updates["applied"] > run.duration - window).sum())
    return recent / window if window else 0.0


def _accuracy(accuracy: float, stop: _Stop) -> str:
    if isnan(accuracy):
        return "–"
    target = "" if stop.target_accuracy is None else f" (target {stop.target_accuracy:.4g})"
    return f"{accuracy:.1%}{target}"


def _progress(run: Run, updates: int, stop: _Stop) -> str:
    """Return HTML; empty if the progress is unknown."""
    shares = [
        run.duration / stop.after if stop.after else nan,
        updates / stop.updates if stop.updates else nan,
    ]
    known = [share for share in shares if not isnan(share)]
    if not known:
        return ""
    share = min(1.0, max(known))
    return f'<progress value="{share:.4f}" aria-label="progress of the run">{share:.0%}</progress>'


def _state(run: Run, feed: Feed) -> tuple[str, str]:
    if feed.live and run.ended is None:
        return "live", "running"
    outcome: str = run.manifest.get("outcome") or (run.ended.reason if run.ended else "crashed")
    if outcome in ("failed", "crashed"):
        return "bad", outcome
    return "over", f"ended: {events.end_reason(outcome)}"


def _runtime(run: Run) -> str:
    runtime, dilation = run.manifest.get("runtime"), run.manifest.get("dilation", 1.0)
    slow = "" if is_simulated(runtime) or dilation == 1 else f", dilation {dilation:g}"
    return f"{runtime}{slow}"


def _validity(run: Run, feed: Feed) -> str:
    judged = run.manifest.get("validity")
    if judged is None and is_simulated(run.manifest.get("runtime")):
        return "simulated"
    if judged is None and feed.live:
        notes = run.notes[["at", "message"]].itertuples(index=False)
        reasons = recorded_reasons([events.Note(at, message) for at, message in notes])
        return f"not valid so far: {'; '.join(reasons)}" if reasons else "judged at the end"
    if judged is None:
        return "unknown"
    validity = Validity.from_dict(judged)
    return ": ".join(filter(None, [validity.verdict, "; ".join(validity.reasons or validity.unjudged)]))
