"""Add measured devices to a user's `profiles.yaml`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from agents.disk import files
from testbed.errors import BadInputError
from testbed.topology import profiles

_DEVICES = re.compile(r"^devices:[ \t]*(#.*)?$", re.MULTILINE)
_INDENT = "  "


def add(to: Path, entries: str, source: str) -> list[str]:
    """Add devices to the profiles file `to`, and return their names.

    `entries` is the text of a profiles file, which errors call `source`. The rest of `to` stays
    unchanged. Raises BadInputError if `entries` has an error or no device, or if `to` already has a
    device of the same name.
    """
    names = list(profiles.parse(entries, source).devices)
    if not names:
        raise BadInputError(f"{source}: found no devices to add")
    text = to.read_text(encoding="utf-8") if to.is_file() else ""
    known = profiles.read(to).devices if to.is_file() else {}
    for name in names:
        if name in known:
            raise BadInputError(
                f"{to} already has a device {name}: remove it there, or rename the new one"
            )
    new = append_devices(text, entries)
    profiles.parse(new, str(to))
    with files.atomic_write(to) as partial:
        partial.write_text(new, encoding="utf-8")
    return names


def append_devices(text: str, entries: str) -> str:
    """Both are texts of profiles files. Raises BadInputError if `text` has its devices in braces
    (`devices: {...}`)."""
    body = textwrap.dedent(_DEVICES.split(entries, maxsplit=1)[-1].strip("\n"))
    found = _DEVICES.search(text)
    if found is None:
        if re.search(r"^devices:", text, re.MULTILINE):
            raise BadInputError(
                "the devices are written in braces, so that nothing can be added automatically: add "
                "this by hand\n\n"
                f"{textwrap.indent(body, _INDENT)}"
            )
        before = f"{text.rstrip()}\n" if text.strip() else ""
        return f"{before}devices:\n{textwrap.indent(body, _INDENT)}\n"
    rest = text[found.end() :]
    inside = re.match(r"(?:\s*#.*\n|\s*\n)*([ \t]+)\S", rest)
    indent = inside[1] if inside else _INDENT
    return f"{text[: found.end()]}\n{textwrap.indent(body, indent)}\n{rest.lstrip(chr(10))}"
