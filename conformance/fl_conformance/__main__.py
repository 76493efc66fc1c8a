"""The command `fl-conformance`, which is `python -m fl_conformance`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fl_conformance import __version__, report
from fl_conformance.adapter import Adapter
from fl_conformance.checking import check, raised_text
from fl_conformance.scenario import FORMAT, ConformanceError, load, rule_names
from fl_conformance.steps import Tolerance

_METHODS = ("start", "receive", "model", "join", "leave")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is 0 if the implementation conforms, 1 if it differs, 2 if the input or the adapter
    is faulty."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except ConformanceError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def run_apart() -> int:
    """Run `main` in a process of its own. Foreign code may end its process at any point, with any exit
    code; the answer counts only if `main` itself has returned it."""
    sys.path.insert(0, "")  # the user's folder has the adapter; with `python -m` it is there already
    if not hasattr(os, "fork"):
        return main()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        try:
            code = main()
        except SystemExit as error:  # of argparse
            code = int(error.code or 0)
        sys.stdout.flush()
        os.write(writer, bytes([code]))
        os._exit(code)
    os.close(writer)
    with open(reader, "rb") as answers:  # noqa: PTH123
        while True:
            try:
                answer = answers.read(1)
                _, status = os.waitpid(child, 0)
                break
            except KeyboardInterrupt:  # the child gets Ctrl-C, too, and ends
                continue
    if answer:
        return answer[0]
    ended = os.waitstatus_to_exitcode(status)
    how = f"exit code {ended}" if ended >= 0 else f"signal {-ended}"
    print(f"error: the adapter ended its process ({how})", file=sys.stderr)  # noqa: T201
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fl-conformance",
        description="Hold an implementation of an aggregation rule against recorded scenarios with the "
        "exact model of each version. Exit code 0: it conforms; 1: it differs; 2: the input or the "
        "adapter is faulty.",
    )
    parser.add_argument("adapter", nargs="?", help="module:Class, or path/to/file.py:Class")
    parser.add_argument("--rule", default="all", help="rule to check (default: all)")
    parser.add_argument("--scenario", help="name of the only scenario to run")
    parser.add_argument(
        "--tolerance", type=float, help="relative tolerance in place of the recorded one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="list the rules and their scenarios")
    version = f"fl-conformance {__version__}, scenarios of format {FORMAT}"
    parser.add_argument("--version", action="version", version=version)
    return parser


def _run(options: argparse.Namespace) -> int:
    names = rule_names() if options.rule == "all" else [options.rule]
    if options.list:
        files = [load(name) for name in names]
        if options.json:
            listed = {file.rule: [one.name for one in file.scenarios] for file in files}
            _print(json.dumps(listed, indent=2))
        else:
            _print(report.listing(files))
        return 0
    if options.adapter is None:
        raise ConformanceError("no adapter is named: use module:Class, or --list for the rules")
    if options.scenario is not None and options.rule == "all":
        raise ConformanceError("--scenario needs --rule, the rule that has this scenario")
    if options.tolerance is not None and not 0 <= options.tolerance < 1:
        raise ConformanceError(f"--tolerance is {options.tolerance:g}, expected from 0 to below 1")
    tolerance = None if options.tolerance is None else Tolerance(options.tolerance, options.tolerance)
    load(names[0])  # an unknown rule is reported before foreign code is imported
    adapter = find_adapter(options.adapter)
    results = [check(adapter, name, options.scenario, tolerance) for name in names]
    if options.json:
        _print(json.dumps(report.document(results), indent=2, ensure_ascii=False))
    else:
        for result in results:
            _print(report.text(result) + "\n")
        _print(report.summary(results))
    ran = [one for one in results if any(r.outcome != "skipped" for r in one.results)]
    if not ran:
        print("error: the adapter skipped every scenario", file=sys.stderr)  # noqa: T201
        return 2
    return max(result.exit_code for result in ran)


def _print(lines: str) -> None:
    print(lines, flush=True)  # noqa: T201


def find_adapter(place: str) -> Callable[[], Adapter]:
    """`place`: `module:Class` or `file.py:Class`. Raises ConformanceError if there is no such class, or
    if it lacks a method."""
    module_name, colon, class_name = place.rpartition(":")
    if not colon or not module_name or not class_name:
        raise ConformanceError(f"{place}: expected module:Class, or path/to/file.py:Class")
    try:
        module = _module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever foreign code raises
        raise ConformanceError(f"{module_name} cannot be imported: {raised_text(error)}") from error
    found: Any = getattr(module, class_name, None)
    if found is None:
        raise ConformanceError(f"{module_name} has no class {class_name}")
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if missing or not callable(found):
        lacks = missing[0] if missing else "__init__"
        raise ConformanceError(f"{place} has no method {lacks}, expected {', '.join(_METHODS)}")
    return cast(Callable[[], Adapter], found)


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"no such file: {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(run_apart())
