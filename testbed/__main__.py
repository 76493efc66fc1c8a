"""`testbed`, and `python -m testbed`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. An interrupt is no error, also while all that is needed is imported."""
    try:
        from testbed.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
