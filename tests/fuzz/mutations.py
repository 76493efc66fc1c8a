"""Changes that make a hostile input of a right one."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**63, 2**64, 10**30, 10**400, -(10**400), 1e308, -1e300, 5e-324,
    float("nan"), float("inf"), "", "x", "nan", "1e999", "³.¹¹", "\ud800", "\0", "\x1b[2J\x1b]0;x\x07",
    "\u202e", "a\nb", "/dev/zero", "x" * 5000, "9" * 5000, [], {}, [None],
    {"a": 1}, {"": {}}, [[[]]], [{}], {"a": {"b": {"c": {}}}}, [0] * 3000,
)  # fmt: skip
"""Values in place of any value of a message or of a JSON file."""
CELLS = (
    "", "null", "true", "-1", "-0", "0", "1.5", "1e308", "1e-320", "1e999", "9" * 400, "9" * 5000, "nan",
    ".nan", "NaN", "inf", ".inf", "-inf", "0x10", "1_000", "010", "٣", "³.¹¹", "12:30:45", "2001-01-01",
    "2001-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "''", "x", "é",
    '"', '"a,b', "'\\ud800'", '"\\0"', '"\\ud83d"', "a\tb", "\x1b[2J", "\u202e", "\ufeff", "\0",
    "\U0001f600", "x" * 300, "x" * 20_000, "!!binary aGk=", "!!set {a}", "!!int x", "!x y",
    "!!timestamp x", "!!python/object/apply:os.system [ls]", "*a", "&a [*a]", "[]", "{}", "[[]]",
    "{a: 1}", "[1, 2, 3]", "<<", "=", "? a", "~", "1000000000000s", "1e9s", "0s", "0.0000001us", "200%",
    "99999999999999999999999999999mbit", "/dev/zero",
)  # fmt: skip
"""Words in place of any word of a text file."""
_BYTES = (
    b"[" * 5000, b'{"a":' * 3000, b"- " * 3000, b"\xff", b"\x00", b"\\ud800", b"9" * 5000, b"1e999",
    b"NaN", b"", b"\x1b[31m", b"\r\n", b"\xef\xbb\xbf", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff",
)  # fmt: skip
_LONGEST = 500_000
"""Text files are cut after this many characters."""
_WORD = re.compile(r"[^\s{}\[\],:]+")


def damage(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with something cut out, put in, overwritten, doubled or flipped."""
    found = bytearray(data)
    at = draw.randrange(len(found) + 1)
    match draw.randrange(6):
        case 0:
            return bytes(found[:at])
        case 1:
            found[at : at + draw.choice([0, 1, 8, len(found)])] = draw.choice(_BYTES)
        case 2:
            length = draw.randrange(1, 200)
            found[at : at + length] = draw.randbytes(length)
        case 3:
            found[at:at] = found[draw.randrange(at + 1) : at]
        case _:
            for _ in range(draw.randrange(1, 20) if found else 0):
                found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def replace_value(value: Any, draw: random.Random) -> Any:
    """Return a copy of a JSON-like value with one value in it replaced, left out, doubled or moved."""
    found = copy.deepcopy(value)
    if not isinstance(found, dict | list) or not found or draw.random() < 0.03:
        return draw.choice(VALUES)
    inner: Any = found
    while True:
        key = draw.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
        if isinstance(inner[key], dict | list) and inner[key] and draw.random() < 0.7:
            inner = inner[key]
            continue
        match draw.randrange(8):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, list):
                inner.extend([inner[key]] * draw.choice([1, 10, 3000]))
            case 1:
                inner[draw.choice(["nam", "x" * 100, "class", "1", "", "for", "é"])] = inner[key]
            case 2:
                others = [*found.values()] if isinstance(found, dict) else found
                inner[key] = copy.deepcopy(draw.choice(others))
            case _:
                inner[key] = draw.choice(VALUES)
        return found


def change_text(text: str, draw: random.Random) -> bytes:
    """Return a text file with some words, lines or bytes changed."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        text = (_change_word if draw.random() < 0.7 else _change_line)(text[:_LONGEST], draw)
    data = text.encode("utf-8", "surrogatepass")
    return damage(data, draw) if draw.random() < 0.1 else data


def _change_word(text: str, draw: random.Random) -> str:
    words = list(_WORD.finditer(text))
    if not words:
        return text
    one = draw.choice(words)
    return text[: one.start()] + draw.choice(CELLS) + text[one.end() :]


def _change_line(text: str, draw: random.Random) -> str:
    lines = text.splitlines() or [""]
    number = draw.randrange(len(lines))
    line = lines[number]
    match draw.randrange(6):
        case 0:
            del lines[number]
        case 1:
            lines[number:number] = [draw.choice(lines)] * draw.choice([1, 1, 1000])
        case 2:
            mark = draw.choice([" ", "\t", "  ", "- ", "? ", ": ", "#", "---\n", "...\n", ","])
            lines[number] = mark + line
        case 3:
            lines[number] = line[: draw.randrange(len(line) + 1)]
        case 4:
            lines[number] = line.lstrip()
        case 5:
            draw.shuffle(lines)
    return "\n".join(lines) + "\n"
