"""Whether pip finds versions for each extra alone, and for all extras that go together.

    python -m tests.platforms.extras

Nothing is installed: pip only resolves, as in an empty environment. Takes minutes and a network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.platforms.local import CHECKOUT

_APART = {"broker", "flower"}
"""Extras that do not go together: their versions of typer differ."""


def main() -> int:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted({*project["optional-dependencies"]} - {"dev"})
    wrong = 0
    for chosen in (
        *([name] for name in extras),
        [name for name in extras if name != "broker"],
        [name for name in extras if name != "flower"],
        ["dev"],
    ):
        begin = time.monotonic()
        complaint = resolve(chosen)
        wrong += complaint is not None
        seconds = time.monotonic() - begin
        print(f"{', '.join(chosen)}: {complaint or 'resolved'}, {seconds:.0f} s", flush=True)
    if resolve(sorted(_APART)) is None:
        print(f"{' and '.join(sorted(_APART))} go together by now: say so in README.md", flush=True)
        wrong += 1
    print("extras: nothing wrong" if not wrong else f"extras: {wrong} wrong")
    return 1 if wrong else 0


def resolve(extras: list[str]) -> str | None:
    """Return why pip finds no versions for the project with `extras`; None if it finds some."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", f"--report={report}"]
        wanted = f"{CHECKOUT}[{','.join(extras)}]"
        command = [sys.executable, "-m", "pip", "install", *options, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None if done.returncode == 0 else (lines or ["pip failed"])[-1]


if __name__ == "__main__":
    sys.exit(main())
