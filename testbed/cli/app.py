"""The Typer application to which all commands are added.

Shell completion and `testbed --help` must be fast. So commands import their modules when they run, help
is plain text, and completion imports neither pydantic nor rich.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from testbed import console

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
