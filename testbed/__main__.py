"""Entry point of the command `testbed` and of `python -m testbed`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130, even while modules are still being
    imported."""
    try:
        from testbed.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
