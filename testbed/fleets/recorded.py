"""Recorded fleets: the devices of a run, or of a log of another deployment, as keys of device groups.

A device's k-th training takes the k-th recorded duration, and its k-th transfers take the k-th recorded
durations of transfers. After the last recorded duration, the list begins again. What a device does while
it is absent, paused or cut off does not count in these durations: absences, pauses and disconnections
are repeated at their recorded times.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import datetime
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.device_actions import (
    Crash,
    Disconnect,
    Hold,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    Switching,
    from_json,
    holds,
    name_of,
)
from agents.disk import files
from agents.rules import RULES
from agents.texts import quantity
from testbed.fleets import surveys
from testbed.topology import fields, units
from testbed.topology.units import read_number
from testbed.traits import is_simulated

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    from analysis.load import Run

GROUP, STEPS = "group", "recorded_steps"
"""Names of two keys that are no keys of a device group: the group of the device in the recorded run, and
the number of steps of the device's trainings."""
_TRAINING_KEYS = ("local", "data", "byzantine", "steps")
"""Keys of a device group that say what its devices train on, and what they do to their updates."""
_NO_PROCESS = frozenset[Hold]({"down", "unpowered"})
_EXPLAINED = 0.5
"""Seconds from the report that a device is offline to the record of the action that caused it. Different
processes write the two."""
_QUICK_REPLY, _MOST, _MAX_REPLY = 0.05, 0.8, 0.5
"""Seconds from an arrival to a dispatch that it usually caused, the share of all dispatches that are so
quick if arrivals cause them, and the maximum seconds in that case."""
_AT_THE_END = 0.02
"""An update that arrived in these last seconds of the run may be too late when the run is repeated."""
_MAX_BYTES = 2**30
_MAX_SECONDS = 1e11
"""Maximum seconds since 1970: the year 5138. Milliseconds since 1970 are above it."""
_COLUMNS = ("client", "start", "end", "bytes", "download", "upload")
_REQUIRED = ("client", "start", "end")

Keys = dict[str, Any]
_Order = tuple[float, int]
"""Time and number of the dispatch, by which a device's rounds are sorted."""
Spans = Sequence[tuple[float, float]]
"""Begin and end in seconds of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedRound:
    """Seconds and bytes. A part that did not begin is None: when the run is repeated, it takes no value
    of its list."""

    download: float = 0.0
    train: float | None
    think: float | None = 0.0
    upload: float | None = 0.0
    model_bytes: float = 0.0
    """0 if unknown."""
    update_bytes: float = 0.0
    """0 if unknown."""


def _keys(rounds: Sequence[_RecordedRound], usual: _RecordedRound) -> Keys:
    """`usual`: for a part that no round has."""
    found: Keys = {"timing": _trace(_known(rounds, "train") or _known([usual], "train"))}
    if any(values := _known(rounds, "think")):
        found["think"] = _trace(values)
    transfers: Keys = {}
    for key in ("download", "upload"):
        if any(values := _known(rounds, key) or _known([usual], key)):
            transfers[key] = _trace(values)
    for key in ("model_bytes", "update_bytes") if transfers else ():
        if known := [size for one in rounds if (size := getattr(one, key)) > 0]:
            transfers[key] = round(statistics.median(known))
    return found | ({"transfers": transfers} if transfers else {})


def _known(rounds: Iterable[_RecordedRound], part: str) -> list[float]:
    return [value for one in rounds if (value := getattr(one, part)) is not None]


def _usual(rounds: Iterable[_RecordedRound]) -> _RecordedRound:
    rounds = list(rounds)
    medians = {
        each.name: statistics.median(_known(rounds, each.name) or [0.0])
        for each in dataclasses.fields(_RecordedRound)
    }
    return _RecordedRound(**medians)


def from_run(path: Path) -> dict[str, Keys]:
    """Return device -> keys. `GROUP` and `STEPS` are left out if they are unknown.

    A training without an end (lost, or not finished when the run ended) gets the device's median
    duration, or the time for which it was seen to train if that is longer. A device without any finished
    training gets the medians of its group, or of all devices if its group has none. Raises ValueError if
    the directory has no run, or if the run has no update.
    """
    from analysis import load

    try:
        run = load.load(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is no run directory{_nearby(path)}") from None
    if run.updates.empty:
        raise ValueError(
            f"{path}: the run has no update, so that no duration is known: name another run"
        )
    devices = [str(name) for name in run.devices["device"]] or [
        str(name) for name in run.updates["client"].cat.categories
    ]
    groups = dict(zip(devices, map(str, run.devices["group"]), strict=False))
    actions = {name: what_happened(run, name) for name in devices}
    timed = run.updates.assign(reply=_reply_times(run))
    updates = {str(name): own for name, own in timed.groupby("client", observed=True)}
    rounds = {
        name: _rounds(run, updates[name], groups.get(name, ""), actions[name])
        for name in devices
        if name in updates
    }
    found: dict[str, Keys] = {}
    for name in devices:
        usual = _usual_of_group(name, groups, rounds)
        own = rounds.get(name) or [one for _, one in _unapplied(run, name, usual, actions[name])]
        listed = [[_seconds(at), name_of(action)] for at, action in actions[name]]
        found[name] = {
            **({GROUP: groups[name]} if name in groups else {}),
            **({STEPS: count} if (count := _steps(run, groups.get(name, ""))) else {}),
            **_keys(own, usual),
            **({"actions": listed} if listed else {}),
            **training_keys(run, groups.get(name, "")),
        }
    return found


def from_log(path: Path, columns: Mapping[str, str], remark: Callable[[str], object]) -> dict[str, Keys]:
    """Return device -> keys. The CSV file has a row per training.

    `columns`: name of the file's column for any of `client`, `start`, `end`, `bytes`, `download` and
    `upload`; other columns have these names themselves. `remark`: called with a sentence on how the file
    was read. Rows of a client are sorted by start. Raises ValueError that names the line.
    """
    text = files.read(path, _MAX_BYTES).decode("utf-8-sig", "replace")
    rows = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(rows, [])]
    places: dict[str, int] = {}
    for key in _COLUMNS:
        wanted = columns.get(key, key)
        if wanted in header:
            places[key] = header.index(wanted)
        elif key in columns or key in _REQUIRED:
            raise ValueError(
                f"{path}:1: found no column {wanted!r} among {', '.join(header) or 'none'}: name it "
                f"with columns: {{{key}: NAME}}"
            )
    rounds: dict[str, list[_RecordedRound]] = {}
    begun: dict[str, float] = {}
    without_zone = 0
    written: dict[str, str] = {}
    for row in rows:
        if not any(map(str.strip, row)):
            continue
        where = f"{path}:{rows.line_num}"
        if len(row) != len(header):
            raise ValueError(f"{where}: found {len(row)} values, expected {len(header)}")
        cells = {key: row[place].strip() for key, place in places.items()}
        client = _device_name(cells["client"], where)
        if written.setdefault(client, cells["client"]) != cells["client"]:
            raise ValueError(
                f"{where}: the clients {written[client]!r} and {cells['client']!r} would both be called "
                f"{client}: rename one of the two"
            )
        start, end = (_time(cells[key], key, where) for key in ("start", "end"))
        dates = (_date(cells[key]) for key in ("start", "end"))
        without_zone += sum(at is not None and at.tzinfo is None for at in dates)
        if end < start:
            raise ValueError(f"{where}: end is before start ({cells['end']} < {cells['start']})")
        if start < begun.get(client, -math.inf):
            raise ValueError(
                f"{where}: start of {cells['client']} is before the start in an earlier row: sort rows"
            )
        begun[client] = start
        download, upload, size = (
            _number(cells.get(key, ""), key, where) for key in ("download", "upload", "bytes")
        )
        if download + upload > end - start + 1e-9:
            raise ValueError(f"{where}: download and upload take longer than the time from start to end")
        found = _RecordedRound(
            download=download,
            train=end - start - download - upload,
            upload=upload,
            model_bytes=size,
            update_bytes=size,
        )
        rounds.setdefault(client, []).append(found)
    if without_zone:
        remark(f"{path}: {quantity(without_zone, 'time')} without a zone, read as UTC")
    if not rounds:
        raise ValueError(f"{path}: no row follows the header, expected one per training")
    # A log has every part of a round, so that no usual round is needed.
    return {client: _keys(own, own[0]) for client, own in rounds.items()}


def _nearby(path: Path) -> str:
    """Look in the folder `runs` and in the working directory."""
    for folder in (Path("runs"), Path()):
        other = folder / path.name
        if (other / "manifest.json").is_file():
            return f": the path is relative to the topology file; write {other.absolute()}"
    return " (it has no manifest.json): the path is relative to the topology file"


def _device_name(text: str, where: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    if not name:
        raise ValueError(f"{where}: client is {text!r:.40}, expected a name with letters or digits")
    return name


def _time(text: str, key: str, where: str) -> float:
    """Read seconds, or a date and time. A date without a zone is in UTC: the host's zone differs from
    machine to machine, and skips and repeats hours."""
    try:
        value = float(text)
    except ValueError:
        at = _date(text)
        value = math.nan
        if at is not None:
            value = (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
    if not math.isfinite(value):
        raise ValueError(
            f"{where}: {key} is {text!r:.40}, expected seconds, or a time such as 2026-01-31T12:00:00.5"
        )
    if abs(value) > _MAX_SECONDS:
        raise ValueError(
            f"{where}: {key} is {text!r:.40}, which is no number of seconds: divide milliseconds by "
            "1000, and write dates as in 2026-01-31T12:00:00.5"
        )
    return value


def _date(text: str) -> datetime.datetime | None:
    """None if `text` is no date, or a number."""
    with suppress(ValueError):
        return None if text.isdecimal() else datetime.datetime.fromisoformat(text)
    return None


def _number(text: str, key: str, where: str) -> float:
    """0 for an empty cell."""
    try:
        return read_number(text or "0", key)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _trace(values: Sequence[float]) -> Any:
    written = [_seconds(value) for value in values]
    if len(set(written)) == 1:
        return written[0]
    return {"distribution": "trace", "values": written}


def _seconds(value: float) -> str:
    return units.format_duration(round(max(0.0, value), 6))


def _rounds(
    run: Run, updates: pd.DataFrame, group: str, actions: Sequence[tuple[float, Switching]]
) -> list[_RecordedRound]:
    """Return the rounds that a device began, in order. `updates`: applied ones. `actions`: what happened
    to the device."""
    frozen, cut = _spans(actions, Pause, Resume), _spans(actions, Disconnect, Reconnect)
    # A client reads at once in virtual time, where records have microseconds.
    prompt = 2e-6 if is_simulated(run.manifest.get("runtime")) else _QUICK_REPLY
    steps = _steps(run, group)
    pulls = _pulls(run.topology.get("rule", {}))
    applied: list[tuple[_Order, _RecordedRound]] = []
    gaps: list[float] = []
    free, sequence = 0.0, 0
    rows: Iterable[Any] = updates.sort_values(["train_start", "sequence"]).itertuples()
    for one in rows:
        begun = one.train_start - one.masking
        train = _without(begun, one.train_end, frozen)
        if one.kind != "gradient" and 0 < one.steps < steps:  # the rule ended the training early
            train *= steps / one.steps
        # From when the training could begin. It is unknown after an update that was not applied.
        known = one.sequence == sequence + 1
        gaps.append(_without(max(free, one.downloaded), begun, frozen) if known else math.nan)
        found = _RecordedRound(
            download=one.reply
            + _without(one.dispatched, one.downloaded, [*_ended(frozen, one.downloaded, prompt), *cut]),
            train=train,
            think=0.0 if pulls else _without(one.train_end, one.sent, frozen),
            upload=_without(one.sent, one.arrived, cut),  # packets pass while the client is paused
            update_bytes=one.bytes,
            model_bytes=one.bytes if math.isnan(one.bytes_before) else one.bytes_before,
        )
        applied.append(((one.dispatched, one.dispatch), found))
        free, sequence = one.sent, one.sequence
    usual_gap = statistics.median([gap for gap in gaps if not math.isnan(gap)] or [0.0])
    applied = [
        (at, replace(one, train=(one.train or 0.0) + (usual_gap if math.isnan(gap) else gap)))
        for (at, one), gap in zip(applied, gaps, strict=True)
    ]
    name, usual = str(updates["client"].iloc[0]), _usual(one for _, one in applied)
    lost = [] if pulls else list(_unapplied(run, name, usual, actions))
    return [one for _, one in sorted([*applied, *lost], key=lambda pair: pair[0])]


def _unapplied(
    run: Run, name: str, usual: _RecordedRound, actions: Sequence[tuple[float, Switching]]
) -> Iterator[tuple[_Order, _RecordedRound]]:
    """Yield the rounds of a device without an applied update. A training cannot begin before the update
    of the device's previous round is sent. If the update arrived, the training gets what the `usual`
    transfers leave of the round. Otherwise the round was lost or was under way at the end of the run: if
    it lasted longer than the `usual` download, its training lasts as usual, or else longer than it was
    seen to last, so that it does not end either when the run is repeated."""
    train, think, upload = (usual.train or 0.0, usual.think or 0.0, usual.upload or 0.0)
    held = [*_spans(actions, Pause, Resume), *_spans(actions, Disconnect, Reconnect)]
    applied = run.updates[run.updates["client"] == name].sort_values("dispatch")
    dispatches, sent = applied["dispatch"].tolist(), [0.0, *applied["sent"].tolist()]
    arrived = set(run.rejected["dispatch"][run.rejected["client"] == name]) - {0}
    over = math.inf if run.ended is None else run.ended.at - _AT_THE_END
    since = 0.0
    own = run.unfinished[run.unfinished["client"] == name].sort_values("dispatch")
    rows: Iterable[Any] = own.itertuples()
    for one in rows:
        since = max(since, sent[bisect.bisect(dispatches, one.dispatch)])
        lasted = min(
            _without(one.dispatched, one.until, held) - usual.download,
            _without(since, one.until, held),
        )
        if one.dispatch in arrived and one.until < over:
            found = replace(usual, train=max(0.0, lasted - think - upload))
            since = one.until - upload
        else:
            begun = lasted > 0 or not usual.download  # without a download, it begins at once
            lasts = max(train, lasted + _AT_THE_END) if begun else None
            found = replace(usual, train=lasts, think=None, upload=None)
        yield (float(one.dispatched), int(one.dispatch)), found


def _reply_times(run: Run) -> npt.NDArray[np.float64]:
    """Return for each update the seconds from what caused its dispatch to the dispatch, in which the
    server worked. The cause is the last arrival of an update, or of a client's report, before the
    dispatch. They are 0 if arrivals do not seem to cause dispatches, as with a rule that waits for a
    timer, and in virtual time, in which the server takes no time."""
    updates = run.updates
    if is_simulated(run.manifest.get("runtime")):
        return np.zeros(len(updates))
    arrived = np.sort(np.concatenate([updates["arrived"], run.statuses["at"]]).astype(np.float64))
    dispatched = updates["dispatched"].to_numpy(np.float64)
    place = np.searchsorted(arrived, dispatched, side="right")
    later = place > 0
    took = np.zeros(len(updates))
    took[later] = dispatched[later] - arrived[place[later] - 1]
    if later.any() and (took[later] <= _QUICK_REPLY).mean() >= _MOST:
        return np.where(took <= _MAX_REPLY, took, 0.0)
    return np.zeros(len(updates))


def _without(begin: float, end: float, spans: Spans) -> float:
    """Return the seconds from `begin` to `end` that are outside `spans`; 0 if a time is unknown."""
    if not end > begin:
        return 0.0
    took, at = 0.0, begin
    for since, until in sorted(spans):
        if until > at and since < end:
            took += max(0.0, since - at)
            at = max(at, until)
    return took + max(0.0, end - at)


def _ended(pauses: Spans, downloaded: float, within: float) -> Spans:
    """A model may have waited for a pause that ended at most `within` seconds before the client had
    it."""
    return [(begin, end) for begin, end in pauses if end <= downloaded <= end + within]


def _spans(
    actions: Sequence[tuple[float, Switching]], begin: type[Switching], end: type[Switching]
) -> list[tuple[float, float]]:
    """Return the spans from an action of the kind `begin` to the next one of the kind `end`, or to the
    next `Join`, which ends every hold."""
    found: list[tuple[float, float]] = []
    since: float | None = None
    for at, action in actions:
        if isinstance(action, begin) and since is None:
            since = at
        elif isinstance(action, end | Join) and since is not None:
            found.append((since, at))
            since = None
    return found if since is None else [*found, (since, math.inf)]


def _usual_of_group(
    name: str, groups: Mapping[str, str], rounds: Mapping[str, Sequence[_RecordedRound]]
) -> _RecordedRound:
    """Look at all devices if nobody in the group has finished a round."""
    done = {other: [one for one in own if one.upload is not None] for other, own in rounds.items()}
    alike = [one for other, own in done.items() if groups.get(other) == groups.get(name) for one in own]
    return _usual(alike or [one for own in done.values() for one in own])


def what_happened(run: Run, name: str, *, ready: bool = True) -> list[tuple[float, Switching]]:
    """Look at recorded actions, and at ends and returns that nobody ordered; times are seconds. `ready`:
    whether the time of a start is that at which the client was ready, and not that of the order."""
    acted = run.scenario[run.scenario["device"] == name]
    ordered = [
        (float(at), action)
        for at, action in zip(acted["at"], map(_action, acted["details"]), strict=True)
        if action is not None
    ]
    own = run.statuses[run.statuses["client"] == name]
    returns = sorted(own["at"][own["state"] == "ready"])
    offline = sorted(own["at"][own["state"] == "offline"])
    found: list[tuple[float, Switching]] = []
    if any(name in start.missing for start in run.starts[:1]) and not any(
        isinstance(action, Join) for _, action in ordered[:1]
    ):
        first = next(iter(returns), None)
        ordered.insert(0, (0.0, Leave()) if first is None else (float(first), Join()))
    held: set[Hold] = set()
    spans: list[tuple[float, float]] = []
    since = math.nan
    ends = [*(at for at, _ in ordered), math.inf][1:]
    for (at, action), until in zip(ordered, ends, strict=True):
        runs, was_held = not held & _NO_PROCESS, bool(held)
        for hold, begins in holds(action).items():
            (held.add if begins else held.discard)(hold)
        moved: Switching | None = None
        if isinstance(action, Leave | Join):
            moved = action
        elif runs != (not held & _NO_PROCESS):
            moved = Crash() if runs else Restart()
        # The goodbye of a device that leaves may arrive after the order of its return.
        back = at
        if isinstance(moved, Restart | Join):
            back = next((float(when) for when in returns if at <= when < until), at)
        if held and not was_held:
            since = at
        elif was_held and not held:
            spans.append((since, back))
        if moved is not None:
            found.append((back if ready else at, moved))
        elif isinstance(action, Pause | Resume | Disconnect | Reconnect):
            found.append((at, action))
    if held:
        spans.append((since, math.inf))
    found += _unordered(run, name, offline, returns, spans)
    return sorted(found, key=lambda one: one[0])


def _unordered(
    run: Run, name: str, offline: Sequence[float], ready: Sequence[float], spans: Spans
) -> Iterator[tuple[float, Switching]]:
    """If an update survived the absence, the device only lost its network. `spans`: times at which an
    action kept the device from working."""
    updates = run.updates[run.updates["client"] == name]
    over = math.inf if run.ended is None else run.ended.at
    back = -math.inf
    for at in offline:
        if at >= over or at < back or any(a - _EXPLAINED <= at <= b for a, b in spans):
            continue
        back = next((when for when in ready if when > at), math.inf)
        survived = ((updates["train_start"] < at) & (updates["arrived"] >= back)).any()
        yield float(at), Disconnect() if survived else Crash()
        if back < math.inf:
            yield float(back), Reconnect() if survived else Restart()


def _action(details: str) -> Switching | None:
    action = from_json(json.loads(details))
    return action if isinstance(action, Switching) else None


def _groups_of(run: Run) -> list[Any]:
    groups = run.topology.get("devices", [])
    return groups if isinstance(groups, list) else []


def training_keys(run: Run, group: str) -> Keys:
    """Keys that say what the group's devices train on. Settings of local training are left out if they
    are those of the task."""
    written: Keys = next((one for one in _groups_of(run) if one.get("name") == group), {})
    found = {key: written[key] for key in _TRAINING_KEYS if written.get(key)}
    task = run.topology.get("task", {}).get("local", {})
    local = {key: value for key, value in found.pop("local", {}).items() if value != task.get(key)}
    compression = (written.get("link") or {}).get("compression")
    return {
        **found,
        **({"local": local} if any(value is not None for value in local.values()) else {}),
        **({"link": {"compression": compression}} if compression else {}),
    }


def _steps(run: Run, group: str) -> int:
    """Steps of a whole training: those of the run's topology, or the most that a device of the group
    did."""
    own = training_keys(run, group).get("local", {})
    steps = {**run.topology.get("task", {}).get("local", {}), **own}.get("steps")
    if isinstance(steps, int):
        return steps
    done = run.updates["steps"][run.updates["group"] == group]
    return int((done if len(done) else run.updates["steps"]).max())


def _pulls(rule: Mapping[str, Any]) -> bool:
    """Whether clients keep a finished update until the server asks for it. The time from the end of a
    training to the upload then says nothing about the device."""
    parameters = RULES.get(rule.get("name", ""))
    if parameters is None:
        return False
    given = {key: surveys.as_written(value) for key, value in rule.items() if key != "name"}
    try:
        made = fields.parameters_of(parameters).model_validate(given).build()
    except ValueError:
        return False
    return made.client_side.send_buffer is not None
