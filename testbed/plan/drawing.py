"""Picture of the servers, links and device groups of a plan, as text or SVG.

aggregator ─ broker ─ router
├─ fast × 2  0.25 cpu, 512 MiB ── no limits
└─ wifi, shared: up 20mbit, down 50mbit
   └─ home × 3  0.1 cpu, 512 MiB ── up 1mbit, rtt 80ms ± 10ms, loss 1%
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from xml.sax.saxutils import escape

from agents.config import AccessLink, Segment, path_of
from testbed.plan.plan_tables import KeyDistribution
from testbed.plan.planned_devices import Plan, PlannedDevice
from testbed.topology import Topology
from testbed.topology.units import format_duration, format_rate

T = TypeVar("T")
_NO_LIMITS = "no limits"
_DRAWN = "drawn"
"""Text in place of figures that differ among the drawn devices of a group."""


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """Devices that are drawn as one box."""

    title: str
    hardware: str
    link: str
    segment: str | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    servers: tuple[str, ...]
    groups: tuple[DrawnGroup, ...]
    """In the order in which they are drawn: each segment's own groups come before those of the segments
    below it."""
    segments: Mapping[str, Segment]
    """In the order in which they are drawn: each one before those below it."""

    def path(self, segment: str | None) -> tuple[str, ...]:
        """Names of the segments from the root to `segment`; empty for None."""
        return tuple(one.name for one in path_of(segment, self.segments))[::-1]

    def below(self, segment: str) -> list[int]:
        """Numbers of the groups at `segment` or below it."""
        return [
            number for number, group in enumerate(self.groups) if segment in self.path(group.segment)
        ]


def picture(topology: Topology, plan: Plan) -> Picture:
    """Figures are in device time."""
    members: dict[str, list[PlannedDevice]] = {}
    for one in plan.devices:
        members.setdefault(one.group, []).append(one)
    groups = []
    for group in {group.group_name: group for group in topology.devices}.values():
        devices = members[group.group_name]
        device = devices[0]
        count, name = len(devices), group.group_name
        image = f", image {group.image}" if group.image and plan.traits.images else ""
        gpu = f", {device.gpu.summary}" if device.gpu else ""
        link = "" if device.link is None else _link(device.link, device)
        if group.link is not None and group.link.trace is not None:
            link = f"{link}, by a trace" if link else "by a trace"
        hardware = device.profile
        if group.origin and count > 1:
            hardware = hardware if _are_equal(one.profile for one in devices) else _DRAWN
            link = link if _are_equal(one.link for one in devices) else _DRAWN
        groups.append(
            DrawnGroup(
                name if count == 1 else f"{name} × {count}",
                f"{hardware}{gpu}{image}",
                link or _NO_LIMITS,
                device.segment,
            )
        )
    used = {segment.name for device in plan.devices for segment in device.path}
    segments = {one.name: one for one in _depth_first(plan.segments, None) if one.name in used}
    order = {name: number for number, name in enumerate([None, *segments])}
    groups.sort(key=lambda group: order[group.segment])
    between = {True: ("router",), False: ("relay",)}[plan.traits.cgroups] if plan.shaper else ()
    return Picture((f"aggregator ({topology.rule.name})", "broker", *between), tuple(groups), segments)


def _depth_first(segments: Mapping[str, Segment], parent: str | None) -> Iterator[Segment]:
    for one in segments.values():
        if one.parent == parent:
            yield one
            yield from _depth_first(segments, one.name)


def _are_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(value == first for value in others)


def as_text(drawn: Picture) -> str:
    titles = max(len(group.title) for group in drawn.groups)
    hardware = max(len(group.hardware) for group in drawn.groups)

    def describe(group: DrawnGroup) -> str:
        return f"{group.title:{titles}}  {group.hardware:{hardware}} ── {group.link}"

    def lines_below(segment: str | None) -> Iterator[str]:
        branches = [(describe(one), None) for one in drawn.groups if one.segment == segment]
        inner = [one for one in drawn.segments.values() if one.parent == segment]
        for mark, bar, (line, name) in _with_branch_marks(
            [*branches, *((f"{one.name}, shared: {_segment(one)}", one.name) for one in inner)]
        ):
            yield f"{mark} {line}"
            if name is not None:
                yield from (f"{bar}  {each}" for each in lines_below(name))

    return "\n".join([" ─ ".join(drawn.servers), *lines_below(None)])


def _with_branch_marks(items: Sequence[T]) -> Iterator[tuple[str, str, T]]:
    """Yield each item with two marks: one for its branch, and one for the lines below the item."""
    for number, item in enumerate(items, 1):
        last = number == len(items)
        yield ("└─" if last else "├─"), (" " if last else "│"), item


_ROW, _BOX, _MARGIN = 56, 40, 16
"""Height of a row, height of a box, and margin around the picture, in pixels."""
_PANEL, _COLUMNS = 300, 3
"""Width of a histogram with its margin, in pixels, and number of histograms side by side."""
_CHARACTER = 7.3
"""Approximate width of a character, in pixels (font size 13)."""
_STYLE = (
    "text{font:13px sans-serif;fill:#1f2933}.small{font-size:11px;fill:#52606d}"
    "rect{fill:#fff;stroke:#52606d;rx:6}.cell{fill:#eef4fb;stroke:#3d7ab8}.bar{fill:#3d7ab8;stroke:none;rx:0}path{stroke:#9aa5b1;fill:none}"
)


def as_svg(drawn: Picture, fleet: Sequence[KeyDistribution] = ()) -> str:
    """The background is white. A histogram of each distribution of `fleet` is below, so the height
    depends on the number of groups and histograms."""
    groups = drawn.groups
    height = 2 * _MARGIN + _ROW * max(1, len(groups))
    middle = height / 2
    shapes: list[str] = []
    x = float(_MARGIN)
    for number, server in enumerate(drawn.servers):
        if number:
            shapes.append(_line(x - 30, middle, x, middle))
        width = _width(server)
        shapes += _box(x, middle, width, server)
        x += width + 30
    trunk = x - 30
    texts = {name: f"{name}: {_segment(one)}" for name, one in drawn.segments.items()}
    depth = max((len(drawn.path(group.segment)) for group in groups), default=0)
    cell_width = max(map(_width, texts.values()), default=0.0)
    at_segments, at_groups = trunk + 60, trunk + 60 + depth * (cell_width + 40)
    links = max(_width(group.link) for group in groups)
    boxes = max(max(_width(group.title), _width(group.hardware)) for group in groups)
    rows = [_MARGIN + _ROW * (number + 0.5) for number in range(len(groups))]
    ends: dict[str | None, tuple[float, float]] = {None: (trunk, middle)}
    for name, one in drawn.segments.items():
        below = [rows[number] for number in drawn.below(name)]
        y = sum(below) / len(below)
        x = at_segments + (len(drawn.path(name)) - 1) * (cell_width + 40)
        shapes.append(_line(*ends[one.parent], x, y))
        shapes += _box(x, y, cell_width, texts[name], kind="cell")
        ends[name] = x + cell_width, y
    for y, group in zip(rows, groups, strict=True):
        shapes.append(_line(*ends[group.segment], at_groups, y))
        shapes.append(_line(at_groups, y, at_groups + links, y))
        shapes.append(_text(at_groups + links / 2, y - 5, group.link, "middle", small=True))
        shapes += _box(at_groups + links, y, boxes, group.title, group.hardware)
    width = at_groups + links + boxes + _MARGIN
    for number, distribution in enumerate(fleet):
        x, y = _MARGIN + (number % _COLUMNS) * _PANEL, height + number // _COLUMNS * _PANEL / 2
        shapes += _histogram(distribution, x, y)
    if fleet:
        width = max(width, 2 * _MARGIN + _PANEL * min(len(fleet), _COLUMNS))
        height += math.ceil(len(fleet) / _COLUMNS) * _PANEL // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" style="stroke:none"/>{"".join(shapes)}</svg>\n'
    )


def _histogram(one: KeyDistribution, x: float, y: float) -> Iterator[str]:
    """The upper left corner is at `x`, `y`."""
    width, most, foot = (_PANEL - 2 * _MARGIN) / len(one.bars), max(one.bars), y + _PANEL / 2 - 36
    scale = ", logarithmic" if one.is_logarithmic else ""
    yield _text(x, y + 4, f"{one.group}: {one.key}{scale}", "start", small=True)
    for number, count in enumerate(one.bars):
        tall = (foot - y - 12) * count / most
        yield (
            f'<rect class="bar" x="{x + number * width:.1f}" y="{foot - tall:.1f}" '
            f'width="{width - 1:.1f}" height="{tall:.1f}"/>'
        )
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        at = x + share * width * len(one.bars)
        label = one.quantile(share) if share != 0.5 else f"median {one.quantile(share)}"
        yield _text(at, foot + 14, label, anchor, small=True)


def _width(text: str) -> float:
    return len(text) * _CHARACTER + 20


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    """Draw a curve that is horizontal at both ends."""
    bend = (x + to_x) / 2
    return f'<path d="M{x:.0f} {y:.0f}C{bend:.0f} {y:.0f} {bend:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}"/>'


def _box(x: float, y: float, width: float, *lines: str, kind: str = "box") -> list[str]:
    """The middle of the box's left side is at `x`, `y`."""
    shape = (
        f'<rect class="{kind}" x="{x:.0f}" y="{y - _BOX / 2:.0f}" width="{width:.0f}" height="{_BOX}"/>'
    )
    first = y + 4 if len(lines) == 1 else y - 4
    return [shape] + [
        _text(x + width / 2, first + 16 * number, line, "middle", small=number > 0)
        for number, line in enumerate(lines)
    ]


def _text(x: float, y: float, text: str, anchor: str, *, small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _rates(link: AccessLink | Segment) -> str:
    found = [f"{name} {format_rate(rate)}" for name in ("up", "down") if (rate := getattr(link, name))]
    return ", ".join(found)


def _segment(segment: Segment) -> str:
    facts = [_rates(segment), *_impairments(segment)]
    kinds = dict.fromkeys(one.kind for one in segment.background)
    facts.append(f"background {' + '.join(kinds)}" if kinds else "")
    return ", ".join(filter(None, facts)) or _NO_LIMITS


def _impairments(link: AccessLink | Segment) -> Iterator[str]:
    if link.rtt or link.jitter:
        jitter = f" ± {format_duration(link.jitter)}" if link.jitter else ""
        yield f"rtt {format_duration(link.rtt)}{jitter}"
    if link.loss:
        yield f"loss {link.loss:.3g}"


def _link(link: AccessLink, device: PlannedDevice) -> str:
    """Return a text such as `up 1mbit, rtt 80ms ± 10ms`, with the kind of the device's compression."""
    facts = [_rates(link), *_impairments(link)]
    facts.append(device.step_kind("compression") or "")
    return ", ".join(filter(None, facts))
