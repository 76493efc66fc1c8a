"""`python -m testbed.api.run_process RUN_DIRECTORY [tied]`: control a run in the background.

The process that starts this command has stored a `Launch` (topology and options) in the run directory.
This process reads the launch, carries out the run, and prints progress lines. With `tied`, it ends the
run cleanly as soon as standard input is closed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from testbed import console
from testbed.api import launching
from testbed.api.launching import ERROR
from testbed.errors import TestbedError, from_os_error
from testbed.host.processes import interrupt_at_end_of_input, interrupting
from testbed.rundir.directory import RunDirectory
from testbed.watching import live, rows


def main(path: str, *more: str) -> int:
    """The exit code is that of `testbed up`."""
    if "tied" in more:
        interrupt_at_end_of_input()
    directory = RunDirectory(Path(path))
    try:
        with interrupting():
            launch = launching.read(directory)
            shown = rows.overview_of_plan(launch.topology, launch.plan, directory.run)
            view = live.LiveView(console.out(), shown)
            try:
                launch.run(directory, view)
            finally:
                if view.judgement is not None:
                    found = view.judgement.validity
                    why = "; ".join(found.reasons or found.unjudged)
                    console.print_text(f"Verdict: {found.verdict}{': ' if why else ''}{why}")
    except (TestbedError, OSError) as error:
        told = error if isinstance(error, TestbedError) else from_os_error(error)
        sys.stdout.flush()
        sys.stderr.write(f"{ERROR}{told}\n")
        return told.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
