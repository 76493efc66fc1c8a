"""Sets of CPUs in the kernel's notation."""

from __future__ import annotations

from collections.abc import Sequence


def cpu_numbers(cpuset: str) -> set[int]:
    """`0-2,5` is {0, 1, 2, 5}; an empty text is the empty set."""
    numbers: set[int] = set()
    for part in filter(None, cpuset.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def cpuset(cores: Sequence[int]) -> str:
    """Format sorted CPU numbers: `0`, `1-3`, `0,2-3`."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, span)) for span in ranges)
