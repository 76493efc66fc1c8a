"""The size of the product against its limits: `python -m tests.budget` prints it, and fails where it is
above `budget.yaml`. `make check` runs this.

A feature should live in folders of its own name: `mentions` counts the modules elsewhere that name it,
by words (± 20 %). To raise a limit, edit the file and say why in the commit. `--write` sets the limits
to the sizes of today, with room for some lines.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from testbed.topology import json_schema

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tests" / "budget.yaml"
FEATURES = {
    "energy": (r"energy|battery|joule|charger", r"energy"),
    "segments": (r"\bsegment", r"segment"),
    "selection": (r"\bselection", r"selection"),
    "secure sums": (r"\bsecure|\bmask(ed|s)\b", r"secure"),
    "gpu": (r"\bgpu|\bmps\b", r"gpu"),
    "swarm": (r"\bswarm", r"swarm"),
    "real devices": (r"real_device|RealHosts|\bssh\b", r"ssh|real|remote"),
    "dilation": (r"\bdilation", r"dilation"),
}
"""Feature -> patterns of the text that names it, and of the paths that are its own."""


def sizes() -> dict[str, dict[str, int]]:
    """Return the sizes of the product: group of sizes -> name -> size."""
    listed = ["git", "ls-files", "agents/*.py", "analysis/*.py", "testbed/*.py"]
    paths = subprocess.check_output(listed, cwd=ROOT, text=True).split()
    texts = {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}
    lines = Counter[str]()
    for path, text in texts.items():
        room = path.split("/")[:-1][:2]
        lines["/".join(room)] += text.count("\n")
    return {
        "total": {"lines": lines.total(), "modules": len(texts), "schema keys": _keys(json_schema())},
        "lines": dict(lines),
        "mentions": {feature: _mentions(feature, texts) for feature in FEATURES},
    }


def _keys(schema: Any) -> int:
    match schema:
        case dict():
            own = schema.get("properties")
            return (len(own) if isinstance(own, dict) else 0) + sum(map(_keys, schema.values()))
        case list():
            return sum(map(_keys, schema))
    return 0


def _mentions(feature: str, texts: Mapping[str, str]) -> int:
    named, own = (re.compile(pattern, re.IGNORECASE) for pattern in FEATURES[feature])
    return sum(not own.search(path) and bool(named.search(text)) for path, text in texts.items())


def _with_room(found: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    lines = {name: 50 * math.ceil((size + 25) / 50) for name, size in found["lines"].items()}
    total = {**found["total"], "lines": 100 * math.ceil((found["total"]["lines"] + 100) / 100)}
    return {"total": total, "lines": lines, "mentions": dict(found["mentions"])}


def exceeded(found: Mapping[str, Mapping[str, int]], limits: Any) -> Iterator[str]:
    for group, of_group in found.items():
        for name, size in of_group.items():
            limit = limits.get(group, {}).get(name)
            if limit is None or size > limit:
                yield f"{name} ({group}): {size}, but tests/{LIMITS.name} allows {limit or 'none'}"


def main() -> int:
    found = sizes()
    if "--write" in sys.argv[1:]:
        LIMITS.write_text(yaml.safe_dump(_with_room(found), sort_keys=False))
    print(", ".join(f"{size:,} {name}" for name, size in found["total"].items()), end="; ")
    print(f"named elsewhere: {', '.join(f'{name} {size}' for name, size in found['mentions'].items())}")
    wrong = [*exceeded(found, yaml.safe_load(LIMITS.read_text()))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
