"""Malformed topology files, given to `testbed validate` and `plan`.

    python -m tests.fuzz_topologies --count 2000 [--seed 1]

Each is one of those under `topologies/` with some changes: other types, unknown keys, aliases, huge
numbers, NaN, dates, tags, keys twice, bytes that are no text. It may be valid all
the same; else it has to be refused with an error that names the place, within five seconds.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from agents.disk.yaml_loader import Loader
from testbed.cli.main import app
from tests.fuzz_directories import outcome, run_by_hand
from tests.running import TOPOLOGIES

_SCALARS = (
    "null", "true", "-1", "0", "1.5", "1e308", "1e-320", "9" * 400, "9" * 5000, ".nan", ".inf",
    "-.inf", "NaN", "2001-01-01", "2001-01-01T00:00:00Z", "''", "x", "'\\ud800'", '"\\0"',
    '"\\ud83d"', "!!binary aGk=", "!!set {a}", "!!python/object/apply:os.system [ls]",
    "!!timestamp x", "!!int x", "!x y", "*a", "&a [*a]", "[]", "{}", "[[]]", "{a: 1}", "[1, 2, 3]",
    "1000000000000s", "1e9s", "0s", "0.0000001us", "99999999999999999999999999999mbit", "200%",
    "/dev/zero", "~", "x" * 300, "<<", "=", "? a", "0x10", "1_000", "010", "12:30:45", "é",
    "\U0001f600", "a\tb",
)  # fmt: skip
"""Values as written in a file."""


def changed(text: str, draw: random.Random) -> bytes:
    """`text` with some changes."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        text = draw.choice(_CHANGES)(text, draw)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.1:
        for _ in range(draw.randrange(1, 10)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _value(text: str, draw: random.Random) -> str:
    """A value in the text becomes another one."""
    found = list(re.finditer(r"(?<=: )[^\s{}\[\],]+|(?<=[\[,] )[^\s{}\[\],:]+(?=[,\]])", text))
    if not found:
        return text
    one = draw.choice(found)
    return text[: one.start()] + draw.choice(_SCALARS) + text[one.end() :]


def _tree(text: str, draw: random.Random) -> str:
    """Something in the data is replaced, doubled, moved or left out."""
    try:
        data = Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError):
        return text
    if not isinstance(data, dict):
        return text
    inner: Any = data
    while True:
        keys: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            return text
        key = draw.choice(keys)
        if isinstance(inner[key], dict | list) and draw.random() < 0.7:
            inner = inner[key]
            continue
        match draw.randrange(5):
            case 0:
                inner[key] = draw.choice(
                    [None, True, -1, 10**30, float("nan"), "x", [], {}, [None], {"a": {}}, 1e300]
                )
            case 1:
                del inner[key]
            case 2 if isinstance(inner, list):
                inner.extend([inner[key]] * draw.choice([1, 10, 3000]))
            case 3:
                inner[key] = draw.choice(list(data.values()))
            case _ if isinstance(inner, dict):
                inner[draw.choice(["nam", "x" * 100, "class", "1", "", "for", "é"])] = inner[key]
        try:
            return yaml.safe_dump(data, sort_keys=False)
        except RecursionError:
            return text


def _line(text: str, draw: random.Random) -> str:
    """Lines are cut, doubled, indented otherwise."""
    lines = text.splitlines() or [""]
    number = draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            del lines[number]
        case 1:
            lines.insert(number, draw.choice(lines))
        case 2:
            lines[number] = (
                draw.choice([" ", "\t", "  ", "- ", "? ", ": ", "#", "---\n", "...\n"]) + lines[number]
            )
        case 3:
            lines[number] = lines[number][: draw.randrange(len(lines[number]) + 1)]
        case 4:
            lines[number] = lines[number].lstrip()
    return "\n".join(lines) + "\n"


_CHANGES: Sequence[Callable[[str, random.Random], str]] = (
    *[_value] * 8,
    *[_tree] * 6,
    *[_line] * 4,
)


def _run(command: str) -> Callable[[Path], None]:
    arguments = (
        [command] if command == "validate" else [command, "--runtime", "virtual", "--oversubscribe"]
    )
    return lambda path: app([*arguments, str(path)], standalone_mode=False)


def fuzz(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How often each command came to what, and what should not have been."""
    texts = [
        path.read_text()
        for path in sorted(TOPOLOGIES.rglob("*.yaml"))
        if "\ndevices:" in path.read_text()
    ]
    found, bad = Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.yaml"
        for number in range(seed, seed + count):
            draw = random.Random(number)
            path.write_bytes(changed(draw.choice(texts), draw))
            for command in ("validate", "plan"):
                kind, text = outcome(_run(command), path)
                if kind == "refused" and not re.search(r"fuzzed\.yaml|devices\[|--|task", text):
                    kind = "error without a place"
                found[f"{command} {kind}"] += 1
                if kind not in ("done", "refused"):
                    bad.append(f"--seed {number}: {command}: {kind}\n{text}")
    return found, bad


if __name__ == "__main__":
    run_by_hand(fuzz, "topologies", 2000)
