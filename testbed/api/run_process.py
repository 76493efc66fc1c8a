"""`python -m testbed.api.run_process RUN_DIRECTORY [tied]`: the process of a run in the background.

It runs the launch that its starter has written into the directory, and prints lines. With `tied` it ends
its run in order at the end of its input.
"""

from __future__ import annotations

import sys
from pathlib import Path

from testbed import console
from testbed.api import launching
from testbed.api.background import ERROR
from testbed.errors import TestbedError, of_os
from testbed.fidelity.validity import Validity
from testbed.host.signals import interrupt_at_end_of_input, interrupting
from testbed.rundir.directory import RunDirectory
from testbed.watching import live, overview


def main(path: str, *more: str) -> int:
    """The exit code, as of `testbed up`."""
    if "tied" in more:
        interrupt_at_end_of_input()
    directory = RunDirectory(Path(path))
    try:
        with interrupting():
            launch = launching.read(directory)
            shown = overview.from_plan(launch.topology, launch.plan, directory.run)
            view = live.LiveView(console.out(), shown)
            try:
                launch.run(directory, view)
            finally:
                if view.judgement is not None:
                    _tell(view.judgement.validity)
    except (TestbedError, OSError) as error:
        told = error if isinstance(error, TestbedError) else of_os(error)
        sys.stdout.flush()
        sys.stderr.write(f"{ERROR}{told}\n")
        return told.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(found: Validity) -> None:
    why = "; ".join(found.reasons or found.unjudged)
    console.print_text(f"Verdict: {found.verdict}{': ' if why else ''}{why}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
