"""Energy counters of this host's processors (RAPL), as the kernel shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:[0-9]+")
"""Folder of a processor. Parts of a processor, such as its memory, have longer names."""
_MICROJOULES_PER_JOULE = 1e6


@dataclass(frozen=True, slots=True)
class RaplSurvey:
    readable: Mapping[str, Path]
    """Name of each processor, such as `package-0` -> its folder."""
    unreadable: tuple[str, ...]
    """Processors whose counter exists, but may not be read by this user."""


def survey(powercap: Path = POWERCAP) -> RaplSurvey:
    """Most virtual machines have no counters."""
    readable: dict[str, Path] = {}
    unreadable: list[str] = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if _ZONE.fullmatch(folder.name) is None:
            continue
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if not name.startswith("package"):  # `psys` contains the packages
            continue
        try:
            _microjoules(folder / "energy_uj")
        except (OSError, ValueError):
            unreadable.append(name)
        else:
            readable[name] = folder
    return RaplSurvey(readable, tuple(unreadable))


class RaplMeter:
    """Sum of the energy of the processors in `folders` since the meter was made. Call `joules` at least
    once per minute, because a counter starts again from 0 when it has reached its largest value."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = tuple(folders.values())
        self._ranges = [_microjoules(folder / "max_energy_range_uj") for folder in self._folders]
        self._last = self._read()
        self._sum = 0

    def joules(self) -> float:
        """Energy since the meter was made. Raises OSError, ValueError."""
        now = self._read()
        for before, after, size in zip(self._last, now, self._ranges, strict=True):
            self._sum += after - before if after >= before else after - before + size
        self._last = now
        return self._sum / _MICROJOULES_PER_JOULE

    def _read(self) -> list[int]:
        return [_microjoules(folder / "energy_uj") for folder in self._folders]


def meter(powercap: Path = POWERCAP) -> RaplMeter | None:
    """None if not all processors of this host can be read."""
    found = survey(powercap)
    if not found.readable or found.unreadable:
        return None
    try:
        return RaplMeter(found.readable)
    except (OSError, ValueError):
        return None


def _microjoules(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
