"""Logs of a run's components. While the run is live, logs come from its runtime; afterwards, from the
run directory."""

from __future__ import annotations

from collections.abc import Iterator

from agents import events
from agents.texts import make_printable, name_list
from analysis.client_story import story as story_of
from testbed.errors import BadInputError
from testbed.run import live_runs
from testbed.rundir.directory import RunDirectory, last_log_lines
from testbed.runtimes import emulator
from testbed.traits import is_simulated

_MAX_LINE = 10_000
"""A limit is needed, because a device may have written the line."""


def read(directory: RunDirectory, component: str | None, tail: int) -> Iterator[tuple[str, str]]:
    """Yield name and lines of each component.

    `component`: the only component or device group to read. Raises BadInputError if the run has no such
    component.
    """
    name = directory.run
    live = next((found for found in live_runs.find_live_runs() if found.run == name), None)
    texts = {path.stem: last_log_lines(path, tail) for path in directory.logs.glob("*.log")}
    if live is not None and live.runtime is not None:
        texts |= emulator(live.runtime).logs(name, tail)
    if not texts and is_simulated(directory.read_manifest().get("runtime")):
        raise BadInputError(
            f"{name} has no logs: in virtual time no process writes any. See `testbed watch {name}` and "
            f"`testbed logs {name} DEVICE --story`"
        )
    wanted = sorted(texts)
    if component is not None and component in texts:
        wanted = [component]
    elif component is not None:
        devices = directory.read_manifest().get("devices", {})
        wanted = [
            each for each, facts in devices.items() if facts["group"] == component and each in texts
        ]
    if component is not None and not wanted:
        raise BadInputError(f"{name} has no log of {component}; it has {name_list(sorted(texts))}")
    for each in wanted:
        lines = (make_printable(line, _MAX_LINE, keep="\t") for line in texts[each])
        yield each, "\n".join(lines)


def story(directory: RunDirectory, device: str) -> str:
    """One line per event in the records so far. Raises BadInputError if the run has no such device."""
    devices = directory.read_manifest().get("devices", {})
    if device not in devices:
        raise BadInputError(
            f"{directory.run} has no device {device}; it has {name_list(sorted(devices))}"
        )
    if not directory.events.is_file():
        return ""
    moments = story_of(events.read(directory.events), device)
    return "\n".join(make_printable(str(moment), _MAX_LINE) for moment in moments)
