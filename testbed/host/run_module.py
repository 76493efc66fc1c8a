"""`python -P run_module.py MODULE ARGUMENT...` runs a module of the testbed as a program.

Unlike `python -m`, the new process always imports the modules of the package that started it, even if
the package is inside a wheel (`testbed.bundle`). Folders called `agents` or `testbed` in the working
directory are ignored (-P).
"""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """`module`: dotted name. For a package, the command runs its module `__main__`."""
    return [sys.executable, "-P", __file__, module, *arguments]


def main() -> None:
    import importlib.util  # here, because `command` does not need these modules
    import runpy
    from pathlib import Path

    package = Path(__file__).parents[1]
    found = importlib.util.find_spec("testbed")
    if found is None or found.origin is None or Path(found.origin).parent != package:
        sys.path.insert(0, str(package.parent))
    importlib.import_module("testbed")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
