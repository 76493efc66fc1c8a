"""`python -P run_module.py MODULE ARGUMENT...` runs a module of ours as a program.

Unlike `python -m`, it finds the modules of the package that started it: not those of a folder `agents`
or `testbed` that the user happens to be in (-P), and also where a wheel has them (`testbed.bundle`).
"""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """What starts `module` (dotted; a package's `__main__`) as a program."""
    return [sys.executable, "-P", __file__, module, *arguments]


def main() -> None:
    import importlib.util  # here, as whoever wants a command alone has no use for them
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
