"""Sets of CPUs in the kernel's notation."""

from __future__ import annotations


def cpu_numbers(cpuset: str) -> set[int]:
    """The CPUs of a cpuset: `0-2,5` is {0, 1, 2, 5}; none of an empty one."""
    numbers: set[int] = set()
    for part in filter(None, cpuset.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
