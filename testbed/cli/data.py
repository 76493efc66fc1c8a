"""`testbed data`: show which samples the devices of a topology would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed import console
from testbed.cli.app import AsJson, DataRoot
from testbed.console import fits, number_table, print_json, print_text, quantity, remark, shorten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table
    from rich.text import Text

    from testbed.api.launching import SampleDistribution

_MAX_ROWS = 40
"""If there are more devices, a histogram is shown."""
_BAR, _SHORTEST_BAR = 40, 10
"""Longest bar in characters: usual value, and minimum on a narrow terminal."""
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
_COLORS = ("blue", "yellow", "green", "red", "magenta", "cyan", "white", "bright_black")


def add_to(app: typer.Typer) -> None:
    app.command("data")(data)


def data(
    topology: Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")],
    root: DataRoot = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Also draw a figure (.png, .pdf or .svg).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many samples of which classes each device would have."""
    from testbed.api import launching, results

    if figure is not None:
        results.writable_figure(figure)
    with console.busy("Preparing the data"):
        found = launching.distribution(
            topology, data=root, on_progress=console.silent if as_json else remark
        )
    if figure is not None:
        found.draw(figure)
    if as_json:
        print_json(found.summary())
        return
    print_text(
        f"{found.name}: {quantity(found.total, 'training sample')} of shape {_shape(found.shape)} for "
        f"{quantity(len(found.devices), 'device')}, {quantity(found.test, 'sample')} for evaluation."
    )
    for line in found.remarks:
        print_text(line)
    print_text("")
    if len(found.devices) <= _MAX_ROWS:
        _show(_devices, found)
    else:
        _show(_groups, found)
        print_text("")
        _show(_histogram, found)
    if found.counts.size:
        print_text(f"\n{_legend(found)}")
    if figure is not None:
        print_text(f"{figure}: drawn")
    remark(f"Next: testbed up {topology}")


def _show(table: Callable[[SampleDistribution, int], Table], found: SampleDistribution) -> None:
    """Bars are as long as the terminal allows. `table`: makes the table for a given length of the
    longest bar."""
    length = _BAR
    while not fits(made := table(found, length)) and length > _SHORTEST_BAR:
        length -= 1
    console.out().print(made)


def _devices(found: SampleDistribution, length: int) -> Table:
    numbers = bool(found.labels)
    columns = ("least", "mean", "greatest") if numbers else ("classes",) if found.counts.size else ()
    table = number_table("device", "samples", *columns, "")
    table.columns[-1].justify = "left"
    most = int(found.samples.max())
    for place, name in enumerate(found.devices):
        own = int(found.samples[place])
        if numbers:
            cells = [f"{value:.4g}" for value in found.labels[name]] if own else ["–"] * 3
        else:
            cells = [str(found.classes_held[place])] if found.counts.size else []
        bar = _bar(found.counts[place], max(1, round(length * own / most)))
        table.add_row(shorten(name), f"{own:,}", *cells, bar)
    return table


def _groups(found: SampleDistribution, length: int) -> Table:
    import numpy as np

    table = number_table("device", "devices", "least", "median", "most", "classes", "")
    table.columns[0].header = "group"
    table.columns[-1].justify = "left"
    groups = np.array(found.groups)
    for group in dict.fromkeys(found.groups):
        own = groups == group
        sizes = found.samples[own]
        held = found.classes_held[own]
        classes = _range_text(int(held.min()), int(held.max())) if found.counts.size else "–"
        spread = [f"{int(value):,}" for value in (sizes.min(), np.median(sizes), sizes.max())]
        bar = _bar(found.counts[own].sum(axis=0), length)
        table.add_row(shorten(group), f"{own.sum():,}", *spread, classes, bar)
    return table


def _histogram(found: SampleDistribution, length: int) -> Table:
    import numpy as np

    table = number_table("samples", "devices", "")
    table.columns[-1].justify = "left"
    counts, edges = np.histogram(found.samples, bins=_bins(found.samples))
    for count, low, high in zip(counts.tolist(), edges, edges[1:], strict=False):
        bar = "█" * -(-count * length // int(counts.max()))
        table.add_row(_range_text(int(low), max(int(low), int(high) - 1)), f"{count:,}", bar)
    return table


def _bins(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Edges of at most ten ranges of whole numbers."""
    import numpy as np

    low, high = int(samples.min()), int(samples.max())
    width = -(-(high - low + 1) // 10)
    return np.arange(low, high + width + 1, width)


def _range_text(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _bar(counts: NDArray[np.int64], length: int) -> Text:
    """Each character of a bar stands for a part of the samples, and shows the class, or the range of
    classes, of that part."""
    import numpy as np
    from rich.text import Text

    if not counts.size:
        return Text("█" * length)
    parts = np.add.reduceat(counts, np.arange(0, counts.size, _classes_per_mark(counts.size)))
    ends = np.round(np.cumsum(parts) / max(1, parts.sum()) * length).astype(int)
    bar = Text()
    for mark, width in enumerate(np.diff(ends, prepend=0).tolist()):
        bar.append(_MARKS[mark] * width, style=_COLORS[mark % len(_COLORS)])
    return bar


def _classes_per_mark(classes: int) -> int:
    """Classes that share a character of a bar."""
    return 1 if classes <= len(_MARKS) else -(-classes // 10)


def _legend(found: SampleDistribution) -> str:
    classes = found.counts.shape[1]
    per = _classes_per_mark(classes)
    marks = -(-classes // per)
    what = "class" if per == 1 else f"range of {per} classes"
    return (
        f"Each character of a bar stands for a {what}, {_MARKS[0]} to {_MARKS[marks - 1]}. Skew: "
        f"{found.skew:.2f} (mean total variation distance between the class shares of a device and "
        "those of all devices; 0: all equal)."
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"
