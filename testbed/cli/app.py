"""What all commands are added to: quick to make, and each command has `--quiet` and `--verbose`.

A shell completes at every press of a key, and `testbed --help` is often asked. So what commands import,
they import when they are called; only the command that is asked for is made of its function; and help is
plain text, as typer's own imports rich with a reader of Markdown.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from testbed import console

F = TypeVar("F", bound=Callable[..., Any])
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print more; with `up`, clients log each round.")
]


class _Quick:
    """What a shell asks is answered without pydantic and rich, which typer would take for it."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """For a shell, words stay as they are, and no values are made of them."""
        if not ctx.resilient_parsing:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return parsed
        parser = self.make_parser(ctx)
        rest: list[str]
        given, rest, _ = parser.parse_args(args=args)
        for param in self.get_params(ctx):
            ctx.params[param.name], source = param.consume_value(ctx, given)
            ctx.set_parameter_source(param.name, source)
        ctx._opt_prefixes.update(parser._opt_prefixes)
        ctx.args = rest
        return rest

    def get_short_help_str(self: Any, limit: int = 0) -> str:
        """All of the first paragraph, for the reference: never cut off."""
        return _first(self.help or "")

    def shell_complete(self: Any, ctx: Any, incomplete: str) -> list[Any]:
        """Names without their help: to print that, rich is needed."""
        found: list[Any] = super().shell_complete(ctx, incomplete)  # type: ignore[misc]
        for item in found:
            item.help = None
        return found


class _Command(_Quick, TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As is usual: what is required has no brackets."""
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class _Group(_Quick, TyperGroup):
    """Makes each command when it is asked for."""

    waiting: ClassVar[dict[str, CommandInfo]]

    def list_commands(self, ctx: Any) -> list[str]:
        made = super().list_commands(ctx)
        return [*self.waiting, *(name for name in made if name not in self.waiting)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.waiting and cmd_name not in self.commands:
            info = copy.copy(self.waiting[cmd_name])
            assert info.callback is not None  # noqa: S101  (a decorated function)
            info.callback = _with_verbosity(info.callback)
            self.add_command(
                get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None),
                cmd_name,
            )
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.waiting:  # others may be meant
            for name in self.waiting:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each panel, of all commands with the first sentence of their help."""
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in self.list_commands(ctx):
            known: Any = self.waiting.get(name) or self.commands[name]
            if not known.hidden:
                text = known.help or inspect.getdoc(known.callback) or ""
                panel = known.rich_help_panel
                sections[panel if isinstance(panel, str) else "Commands"].append((name, _first(text)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _first(text: str) -> str:
    """The first paragraph of `text`, in one line."""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


class App(typer.Typer):
    def __init__(self, **settings: Any) -> None:
        waiting: dict[str, CommandInfo] = {}
        group = type("Group", (_Group,), {"waiting": waiting})
        super().__init__(
            cls=group,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **settings,
        )
        self._waiting = waiting

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        add = super().command(name, cls=_Command, **settings)

        def decorated(function: F) -> F:
            add(function)
            info = self.registered_commands.pop()
            self._waiting[info.name or function.__name__.replace("_", "-")] = info
            return function

        return decorated


def _with_verbosity(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(*, quiet: bool, verbose: bool, **given: Any) -> Any:
        console.verbosity = verbose - quiet
        return function(**given)

    more: Any = {"quiet": Quiet, "verbose": Verbose}
    parameters = [*inspect.signature(function, eval_str=True).parameters.values()]
    for name, hint in more.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=False, annotation=hint))
    made: Any = command
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = function.__annotations__ | more
    return command
