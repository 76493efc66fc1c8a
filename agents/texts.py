"""Parts of messages: texts and values of other processes shortened and safe to print, numbers with a
noun (`3 runs`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

_MAX_NAMED = 12
"""Maximum number of names in a list."""


def make_printable(text: str, most: int, keep: str = "") -> str:
    r"""At most `most` characters, with escapes (`\x1b`) for those that are not printable: control
    characters, marks of writing direction, half surrogate pairs. Those in `keep` are not escaped."""
    text = text[:most]
    if text.isprintable():
        return text
    inert = (each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)
    return "".join(inert)[:most]


def quantity(number: int, singular: str, plural: str | None = None) -> str:
    """Text such as `1 run` or `1,200 runs`. `plural`: None for `singular` with an s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def name_list(names: Sequence[str], most: int = _MAX_NAMED) -> str:
    """Text such as `a, b and 3 more`; `none` if there are none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def describe_value(value: object) -> str:
    """Return a received value as text for an error message, with at most 80 characters. Lists, maps and
    huge integers are represented by their type."""
    if isinstance(value, str | int | float | None):
        with suppress(ValueError):
            return f"{value!r:.80}"
    return type(value).__name__
