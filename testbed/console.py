"""Where the command line prints."""

from __future__ import annotations

import os

from rich.console import Console


def _console(*, stderr: bool = False) -> Console:
    """A console whose tables get all the width that they want where nobody's screen sets a limit."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000
    return console


out = _console()
err = _console(stderr=True)
