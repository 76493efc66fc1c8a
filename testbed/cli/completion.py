"""Shell completion: ids of runs, names of devices, segments, rules, selections, tasks, profiles.

Everything is read from files, without slow imports, because the shell runs this at each press of Tab.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from analysis import alike_devices
from testbed import bundle
from testbed.errors import BadInputError
from testbed.rundir import finding
from testbed.traits import RUNTIMES, emulated_runtime_names

DEFAULT_RUNS = Path("runs")
_CATALOG = Path(__file__).parents[1] / "catalog"


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Run ids, or paths of run directories, in reverse alphabetical order, so that the newest run of a
    topology comes first."""
    if "/" in incomplete:
        folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
        known: Iterable[str] = map(str, finding.runs_in(folder).values())
    else:
        known = finding.runs_in(_runs(ctx))
    return sorted(_starting_with(incomplete, known), reverse=True)


def devices(ctx: typer.Context, incomplete: str) -> list[str]:
    return _starting_with(incomplete, _groups_and_devices(ctx))


def devices_and_segments(ctx: typer.Context, incomplete: str) -> list[str]:
    segments: list[str] = _manifest(ctx).get("segments", [])
    return _starting_with(incomplete, dict.fromkeys([*_groups_and_devices(ctx), *segments]))


def components(ctx: typer.Context, incomplete: str) -> list[str]:
    """Components that have logs: aggregator, broker, devices, device groups."""
    run = _run(ctx)
    logs = [] if run is None else sorted(path.stem for path in run.glob("logs/*.log"))
    return _starting_with(incomplete, dict.fromkeys([*logs, *_groups_and_devices(ctx)]))


def _groups_and_devices(ctx: typer.Context) -> list[str]:
    found = alike_devices.expand(_manifest(ctx).get("devices", {}))
    groups = [facts.get("group", name) for name, facts in found.items()]
    return list(dict.fromkeys([*groups, *found]))


def selections(incomplete: str) -> list[str]:
    file = bundle.AGENTS / "selection" / "__init__.py"
    return _starting_with(incomplete, _keys(file, "SELECTIONS"))


def rules(incomplete: str) -> list[str]:
    return _starting_with(incomplete, _keys(bundle.AGENTS / "rules" / "__init__.py", "RULES"))


def tasks(incomplete: str) -> list[str]:
    return _starting_with(incomplete, _keys(bundle.AGENTS / "tasks" / "__init__.py", "TASKS"))


def profiles(incomplete: str) -> list[str]:
    """Device profiles and link classes of the testbed, the user and the working directory, and
    populations."""
    import yaml

    files = [_CATALOG / "devices.yaml", _CATALOG / "links.yaml"]
    own = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    files += [Path(own, "testbed", "profiles.yaml"), Path("profiles.yaml")]
    names: dict[str, None] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in files:
        with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
            for entries in yaml.load(file.read_bytes(), loader).values():  # noqa: S506  (a safe one)
                names |= dict.fromkeys(entries)
    names |= dict.fromkeys(sorted(path.stem for path in _CATALOG.glob("populations/*.csv")))
    return _starting_with(incomplete, names)


def trace_formats(incomplete: str) -> list[str]:
    published = _CATALOG.parent / "topology" / "published_traces.py"
    return _starting_with(incomplete, _keys(published, "FORMATS"))


def runtimes(incomplete: str) -> list[str]:
    return _starting_with(incomplete, [*RUNTIMES, "auto"])


def emulated_runtimes(incomplete: str) -> list[str]:
    return _starting_with(incomplete, [*emulated_runtime_names(), "auto"])


def _starting_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _runs(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("runs") or DEFAULT_RUNS)


def _run(ctx: typer.Context) -> Path | None:
    with suppress(BadInputError):
        return finding.find_directory(ctx.params.get("run") or "", _runs(ctx))
    return None


def _manifest(ctx: typer.Context) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if (run := _run(ctx)) is not None:
            entries: dict[str, Any] = json.loads((run / finding.MANIFEST).read_bytes())
            return entries
    return {}


def _keys(module: Path, table: str) -> list[str]:
    """Keys are read from the module's source, because importing it would take a second."""
    import ast

    for statement in ast.parse(module.read_bytes()).body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)) if name == table:
                return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    raise AssertionError(f"{module} has no {table}")
