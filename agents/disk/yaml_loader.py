"""Fast loader of untrusted YAML files, limited in memory and depth.

Scalars are read as in YAML 1.2: `1e-3` is a number, `no` and `on` are strings, `010` is not octal.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

try:  # libyaml is many times faster
    from yaml.cyaml import CParser as _Parser  # type: ignore[attr-defined]
except ImportError:
    from yaml.parser import Parser
    from yaml.reader import Reader
    from yaml.scanner import Scanner

    class _Parser(Reader, Scanner, Parser):  # type: ignore[no-redef]
        def __init__(self, text: str | bytes) -> None:
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)


MAX_VALUES = 200_000
"""Keys and values in a file. An alias counts as all values of its node."""

_LARGEST = 10**300
"""Largest whole number: larger ones are no floating-point numbers."""


class Loader(Composer, _Parser, SafeConstructor, Resolver):
    """Raises YAMLError, and RecursionError for a file that is nested too deeply. The composer is
    Python's, because libyaml's overflows its stack then."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (declared so by PyYAML)

    def __init__(self, text: str | bytes) -> None:
        _Parser.__init__(self, text)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)
        self._values = 0
        self._sizes: dict[int, int] = {}
        """Values in each node, by its id."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        before = self._values
        node: yaml.Node | None = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if (size := self._sizes.get(id(node))) is None:  # the node is not complete yet
                mark: Any = (node or event).start_mark
                raise yaml.MarkedYAMLError(problem="this value contains itself", problem_mark=mark)
            self._values += size
        else:
            self._values += 1
            self._sizes[id(node)] = self._values - before
        if self._values > MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"too many values, expected at most {MAX_VALUES:,} with their keys: give equal "
                "devices in one group, with count",
                problem_mark=event.start_mark,
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  (PyYAML's)
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise ValueError(f"expected a whole number of at most {_LARGEST:.0e}")
            return value
        except (
            ValueError,
            KeyError,
            AttributeError,
        ) as error:  # for example `!!bool x`, or a number with thousands of digits
            problem = str(error) if isinstance(error, ValueError) else f"this is no {node.tag}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
        list("-+.0123456789"),
    ),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
