"""Texts that others sent, as they may be recorded and printed: bounded, and inert on a screen; and
numbers of things."""

from __future__ import annotations

from contextlib import suppress


def make_printable(text: str, most: int, keep: str = "") -> str:
    """`text` in `most` characters at most, with an escape (`\\x1b`) for each that a screen does not just
    show: controls, what turns the direction of writing, half of a surrogate pair. `keep` stays."""
    text = text[:most]
    if text.isprintable():
        return text
    inert = (each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)
    return "".join(inert)[:most]


def quantity(number: int, singular: str, plural: str | None = None) -> str:
    """`1 run`, `1,200 runs`; `plural` where that is not the singular with an s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def describe_value(value: object) -> str:
    """A value that was sent, for an error's text. Lists and maps, which may be deep, by their type
    alone, as integers with more digits than Python writes."""
    if isinstance(value, str | int | float | None):
        with suppress(ValueError):
            return f"{value!r:.80}"
    return type(value).__name__
