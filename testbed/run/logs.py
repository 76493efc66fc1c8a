"""Logs of a run's components: from the run directory, or from the engine while they live."""

from __future__ import annotations

from collections.abc import Iterator

from agents.texts import visible
from testbed.errors import BadInputError, listed
from testbed.run import live_runs
from testbed.rundir.directory import RunDirectory, tail_of
from testbed.runtimes import emulator
from testbed.traits import is_simulated

_MAX_LINE = 10_000
"""Characters of a line that are shown: a device may have written it."""


def read(directory: RunDirectory, component: str | None, tail: int) -> Iterator[tuple[str, str]]:
    """Name and last `tail` lines of each component of a run, or of `component` alone, which may be a
    group of devices. Raises BadInputError where there is no such component."""
    name = directory.run
    live = next((found for found in live_runs.find() if found.run == name), None)
    texts = {path.stem: tail_of(path, tail) for path in directory.logs.glob("*.log")}
    if live is not None and live.runtime is not None:
        texts |= emulator(live.runtime).logs(name, tail)
    if not texts and is_simulated(directory.read_manifest().get("runtime")):
        raise BadInputError(
            f"{name} has no logs: in virtual time no process writes any; `testbed watch {name}` tells "
            "what happened"
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
        raise BadInputError(f"{name} has no log of {component}; it has {listed(sorted(texts))}")
    for each in wanted:
        lines = (visible(line, _MAX_LINE, keep="\t") for line in texts[each])
        yield each, "\n".join(lines)
