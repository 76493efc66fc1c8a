"""Devices of a manifest that are alike: they have consecutive numbers and equal facts, and share an
entry.

The entry has the name of the first device, and `count`, the number of devices:
`"client-1": {"count": 3, "group": "client", …}` stands for client-1, client-2 and client-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEVICES = 1_000_000


def expand(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Devices of the same entry share the facts. Raises ValueError if an entry stands for several
    devices and its name has no number, or for more than `MAX_DEVICES`."""
    if (total := sum(facts.get("count", 1) for facts in entries.values())) > MAX_DEVICES:
        raise ValueError(f"devices: found {total:,}, expected at most {MAX_DEVICES:,}")
    devices: dict[str, Mapping[str, Any]] = {}
    for name, facts in entries.items():
        count = facts.get("count", 1)
        own = {key: value for key, value in facts.items() if key != "count"}
        stem, dash, number = name.rpartition("-")
        if count == 1:
            devices[name] = own
        elif not (dash and number.isdecimal()):
            raise ValueError(f"devices.{name}: count is {count}, but the name has no number")
        else:
            first = int(number)
            names = (f"{stem}-{k}" for k in range(first, first + count))
            devices.update(dict.fromkeys(names, own))
    return devices
