"""Run the checks on platforms, keep their results, and make the table of docs/evidence/platforms.md.

python -m tests.platforms --list
python -m tests.platforms [PLATFORM ...] [--only CHECK,...] [--without CHECK,...]
python -m tests.platforms PLATFORM ... --run COMMAND
python -m tests.platforms --table
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testbed.errors import HostError
from testbed.host.processes import interrupting
from tests.platforms import checks, engines, guests, pythons, results
from tests.platforms.checks import CHECKS, Check
from tests.platforms.local import CHECKOUT
from tests.platforms.machine import Machine

_TRY_SECONDS = 600.0
"""Seconds that a command given by hand may take, before `Machine.slowness`."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A machine that can be brought up here, perhaps."""

    description: str
    open: Callable[[], AbstractContextManager[Machine]]
    """Brings it up. Raises HostError or RuntimeError if that fails."""


def main() -> int:
    """Do what the arguments say; return 1 if a check failed or a platform could not be brought up."""
    options = _arguments()
    found = platforms()
    if options.list:
        for name, platform in found.items():
            print(f"{name:20} {platform.description}")
        return 0
    if unknown := [name for name in options.platforms if name not in found]:
        print(f"there is no platform {', '.join(unknown)}; --list shows all", file=sys.stderr)
        return 2
    good = True
    if options.run:
        with interrupting():
            return max(try_out(found[name], options.run) for name in options.platforms)
    if not options.table:
        chosen = [each for each in CHECKS if each.name not in options.without]
        chosen = [each for each in chosen if not options.only or each.name in options.only]
        with interrupting():
            for name in options.platforms or found:
                good &= check(name, found[name], chosen)
    results.write_page(results.load())
    return 0 if good else 1


def platforms() -> dict[str, Platform]:
    """All platforms by name."""
    return {
        "host": Platform("this host with its own engine, or without one", engines.host),
        **{
            release: Platform(f"engine of Debian {release}", partial(_engine, release))
            for release in ("trixie", "sid")
        },
        **{
            f"{release}-python": Platform(
                f"Debian {release}'s Python and engine, set up by make",
                partial(_engine, release, engines.with_python),
            )
            for release in ("trixie", "forky")
        },
        "sid-containerd": Platform(
            "sid's engine with containerd's image store", partial(_engine, "sid", containerd_store=True)
        ),
        **_binaries(),
        **{
            f"python-{version}": Platform(f"{file}, no engine", partial(pythons.python, file))
            for version, file in sorted(pythons.found().items())
        },
        **{
            name: Platform("guest under QEMU", partial(guests.guest, spec))
            for name, spec in guests.GUESTS.items()
        },
    }


def try_out(platform: Platform, command: str) -> int:
    """Run `command` (bash) on a platform; return its exit code."""
    with platform.open() as machine:
        print(_words(machine.facts), flush=True)
        done = machine.run(command, timeout=_TRY_SECONDS)
    print(f"{done.output}\n[exit code {done.exit_code}, {done.seconds:.0f} s]", flush=True)
    return done.exit_code


def check(name: str, platform: Platform, chosen: Sequence[Check]) -> bool:
    """Bring a platform up, run checks on it and record their outcomes; return whether all passed."""
    print(f"{name}: bringing it up", flush=True)
    commit = _commit()
    good = True
    try:
        with platform.open() as machine:
            print(f"{name}: {_words(machine.facts)}", flush=True)
            with results.changing() as records:
                results.came_up(records, name, machine.facts)
            for each, outcome in checks.run(machine, name, chosen):
                _tell(name, each, outcome)
                with results.changing() as records:
                    results.add(records, name, each.name, outcome, commit)
                good &= outcome.passed
    except (HostError, RuntimeError) as error:
        print(f"{name}: cannot be brought up: {error}", flush=True)
        with results.changing() as records:
            results.unavailable(records, name, str(error))
        good = False
    return good


def _engine(
    release: str,
    make: Callable[..., AbstractContextManager[Machine]] = engines.engine,
    **options: Any,
) -> AbstractContextManager[Machine]:
    if (why := engines.lacking()) is not None:
        raise RuntimeError(why)
    return make(release, **options)


def _binaries() -> dict[str, Platform]:
    """The engine whose binaries are in the folder that TESTBED_ENGINE names, by its version."""
    if (folder := os.environ.get("TESTBED_ENGINE")) is None:
        return {}
    binaries = Path(folder).resolve()
    printed = subprocess.check_output([binaries / "dockerd", "--version"], text=True)
    version = printed.split()[2].rstrip(",")
    opened = partial(_engine, "sid", binaries=binaries)
    return {f"docker-{version}": Platform(f"binaries in {folder}, else those of Debian sid", opened)}


def _tell(name: str, each: Check, outcome: checks.Outcome) -> None:
    word = "passed" if outcome.passed else "FAILED"
    log = f" · {outcome.log}" if outcome.log else ""
    print(f"{name}: {each.name}: {word} in {outcome.seconds:.0f} s: {outcome.detail}{log}", flush=True)


def _words(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _commit() -> str:
    """The commit of the checkout, with a plus sign if it has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(CHECKOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!docs")
    return f"{git('rev-parse', '--short', 'HEAD')}{'+' if changed else ''}"


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if unknown := [name for name in chosen if name not in {each.name for each in CHECKS}]:
            raise argparse.ArgumentTypeError(f"there is no check {unknown[0]!r}")
        return chosen

    parser = argparse.ArgumentParser(description="Check the testbed on other platforms.")
    parser.add_argument("platforms", nargs="*", help="by default all")
    parser.add_argument("--list", action="store_true", help="list the platforms")
    parser.add_argument("--table", action="store_true", help="only write the table, from the records")
    parser.add_argument("--run", metavar="COMMAND", help="only run a command on the platforms named")
    parser.add_argument("--only", type=names, default=[], help="checks, separated by commas")
    parser.add_argument("--without", type=names, default=[], help="checks, separated by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
