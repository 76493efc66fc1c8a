"""The Typer application, the arguments and options that several commands share, and their completion."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from analysis import alike_devices
from testbed import bundle, console
from testbed.errors import BadInputError
from testbed.rundir import finding
from testbed.traits import RUNTIMES, emulated_runtime_names, runtime_names

# The Typer application to which all commands are added.
#
# Shell completion and `testbed --help` must be fast. So commands import their modules when they run,
# help is plain text, and completion imports neither pydantic nor rich.

F = TypeVar("F", bound=Callable[..., Any])


def _options_of_all(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print more; with `up`, clients log each round.")
    ] = False,
) -> None:
    """Options of every command."""


_common = typer.Typer(add_completion=False)
_common.command()(_options_of_all)
_COMMON = get_command(_common).params


class _Quick:
    """During shell completion, Typer's slow imports are avoided."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """During completion, values are not converted, because Typer would import pydantic."""
        if not ctx.resilient_parsing:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return parsed
        parser = self.make_parser(ctx)
        rest: list[str]
        values, rest, _ = parser.parse_args(args=args)
        for param in self.get_params(ctx):
            ctx.params[param.name], source = param.consume_value(ctx, values)
            ctx.set_parameter_source(param.name, source)
        ctx._opt_prefixes.update(parser._opt_prefixes)
        ctx.args = rest
        return rest

    def shell_complete(self: Any, ctx: Any, incomplete: str) -> list[Any]:
        """Typer would import rich to format help texts."""
        found: list[Any] = super().shell_complete(ctx, incomplete)  # type: ignore[misc]
        for item in found:
            item.help = None
        return found

    def get_short_help_str(self: Any, limit: int = 0) -> str:
        """First paragraph of the help in full."""
        return " ".join((self.help or "").partition("\n\n")[0].split()).removesuffix(".")


class _QuickCommand(_Quick, TyperCommand):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _COMMON

    def invoke(self, ctx: Any) -> Any:
        console.verbosity = ctx.params.pop("verbose") - ctx.params.pop("quiet")
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Typer puts braces around required arguments."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class _QuickGroup(_Quick, TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section of the help per panel. Typer's own panels need rich."""
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            title = panel if isinstance(panel, str) else "Commands"
            sections[title].append((name, command.get_short_help_str()))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class App(typer.Typer):
    """Shell completion and help import neither rich nor pydantic."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=_QuickGroup,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, cls=_QuickCommand, **settings)


# Shell completion: ids of runs, names of devices and segments, keys of tables, profiles.
#
# Everything is read from files, without slow imports, because the shell runs this at each press of Tab.

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


def keys_of(package: str, table: str) -> Callable[[str], list[str]]:
    """Completion by the keys of `table` in a package of `agents`."""

    def complete(incomplete: str) -> list[str]:
        return _starting_with(incomplete, _keys(bundle.AGENTS / package / "__init__.py", table))

    return complete


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
    published = _CATALOG.parent / "topology" / "link_traces.py"
    return _starting_with(incomplete, _keys(published, "PUBLISHED_FORMATS"))


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


Run = Annotated[
    str,
    typer.Argument(
        help="Run id, its beginning, or a run directory.", autocompletion=runs, metavar="RUN"
    ),
]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RuntimeName = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        help=f"{', '.join(RUNTIMES)} or auto; overrides the topology.",
        autocompletion=runtimes,
    ),
]
EmulatedRuntime = Annotated[
    str,
    typer.Option(
        "--runtime",
        help=f"auto, {runtime_names(lambda t: not t.simulated)}.",
        autocompletion=emulated_runtimes,
    ),
]
Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe",
        help="Run even if the devices ask for more CPU, memory or GPUs than there are: they may be "
        "slower than requested, or be killed.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 1 if a run is not valid (a run that is not judged passes)."
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="TESTBED_DATA",
        exists=True,
        file_okay=False,
        help="Folder with datasets as parquet files (default: download them from the hub).",
    ),
]
Page = Annotated[bool, typer.Option("--dashboard", help="Also show the run on a page in the browser.")]
PagePort = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Dashboard port (default: any free port).")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics on this port (0: any free)."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the programs in a pack: own code, packages, images."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also send figures to mlflow, wandb or tensorboard; repeatable."),
]
