"""Links that follow a trace: its files, and the steps that make a device's link do so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agents import config
from agents.device_actions import SetLink
from agents.nanoseconds import from_seconds
from testbed.topology import traces
from testbed.topology.devices import Link, LinkTrace
from testbed.topology.timeline import Step
from testbed.topology.traces import Conditions

_OUTAGE = 1_000
"""bit/s in place of 0, which the kernel's shapers do not take: a packet would need 12 s."""


def read(trace: LinkTrace, folder: Path) -> list[traces.Trace]:
    """The traces of the files, which are relative to `folder`. Raises ValueError that names the file,
    OSError."""
    found = []
    for key in ("up", "down", "csv"):
        if (name := getattr(trace, key)) is None:
            continue
        path = folder / name
        with path.open(encoding="utf-8-sig") as lines:
            try:
                if key == "csv":
                    found.append(traces.read_csv(lines, loop=trace.loop))
                else:
                    found.append(traces.read_mahimahi(lines, "up" if key == "up" else "down"))
            except (ValueError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: {error}") from error
    return found


def at_begin(link: Link) -> config.Link:
    """What `link` is when the run begins. Raises ValueError, OSError."""
    plain = link.plain()
    if link.trace is None:
        return plain
    first = next(iter(traces.together(read(link.trace, Path()))), None)
    if first is None or first[0] > 0:
        return plain
    # Not an outage: nothing could even be started then.
    changes = {name: value for name, value in _changes(first[1]).items() if value != _OUTAGE}
    return plain.changed(changes)


def loses(trace: LinkTrace) -> bool:
    """Whether any packet is lost on the way, of a trace whose paths are absolute. Raises as `read`."""
    return any(any(one.values.get("loss", ())) for one in read(trace, Path()))


def steps(device: str, found: Sequence[traces.Trace]) -> Iterator[Step]:
    """Each change of `device`'s link, in the order of time; without end where a trace repeats."""
    for at, conditions in traces.together(found):
        yield Step(from_seconds(at), device, SetLink(_changes(conditions)))


def _changes(conditions: Conditions) -> dict[str, float | None]:
    """As fields of `agents.config.Link`."""
    said: dict[str, float | None] = {
        name: max(value, _OUTAGE) if name in ("up", "down") else value
        for name, value in conditions._asdict().items()
        if value is not None
    }
    if (delay := said.pop("delay", None)) is not None:
        said["rtt"] = 2 * delay
    return said
