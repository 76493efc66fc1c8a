from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest

from agents.rules import RULES
from agents.rules.interface import Rule, Server, State
from agents.tasks import TASKS
from testbed.api import catalog
from testbed.api.catalog import Parameter
from testbed.errors import BadInputError
from tests.running import Testbed


@dataclass(frozen=True)
class Toy(Rule):
    """Does nothing, at length: this paragraph goes on until it is
    longer than eighty characters in one line of a terminal.

        w ← w
    """

    paper: ClassVar[str] = "nobody's"
    equation: ClassVar[str] = "w ← w"

    size: int
    """How many, over
    two lines."""
    period: Annotated[float, "s"] = 0.2
    mode: Literal["slow", "fast"] | None = None
    times: tuple[Annotated[float, "s"], ...] | None = None
    """Any quotes."""
    on: bool = True

    def begin(self, server: Server) -> State:
        raise NotImplementedError


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    monkeypatch.setitem(RULES, "toy", Toy)
    return catalog.find("toy", catalog.rules(), "rule")


@pytest.fixture
def printed(testbed: Testbed) -> Callable[..., str]:
    """Return the output of `testbed ARGUMENTS`."""

    def printed(*arguments: str) -> str:
        said = testbed(*arguments)
        assert not said.code
        return said.out

    return printed


def test_parameters_are_read_from_the_source(toy: catalog.CatalogEntry) -> None:
    assert toy.parameters == (
        Parameter("size", "whole number", True, None, "How many, over two lines."),
        Parameter("period", "duration", False, "200ms", ""),
        Parameter("mode", "slow or fast, or null", False, None, ""),
        Parameter("times", "list of durations, or null", False, None, "Any quotes."),
        Parameter("on", "true or false", False, True, ""),
    )


def test_single_rule_is_explained_in_full(toy: catalog.CatalogEntry) -> None:
    assert catalog.full(toy).splitlines() == [
        "toy",
        "    equation: w ← w",
        "    paper: nobody's",
        "",
        "Does nothing, at length: this paragraph goes on until it is longer than eighty",
        "characters in one line of a terminal.",
        "",
        "    w ← w",
        "",
        "Parameters",
        "    size: whole number; required",
        "        How many, over two lines.",
        "    period: duration; default 200ms",
        "    mode: slow or fast, or null; default null",
        "    times: list of durations, or null; default null",
        "        Any quotes.",
        "    on: true or false; default true",
    ]


def test_parameter_and_default_are_not_wrapped_apart(toy: catalog.CatalogEntry) -> None:
    assert catalog.brief(toy).splitlines()[-1] == (
        "    size, period: 200ms, mode: null, times: null, on: true"
    )


@pytest.mark.parametrize("what", ["rules", "tasks"])
def test_lists_and_explanations_fit_into_eighty_columns(printed: Callable[..., str], what: str) -> None:
    names = list(RULES if what == "rules" else TASKS)
    listed = printed(what)
    for text in (listed, *(printed(what, name) for name in names)):
        assert max(map(len, text.splitlines())) <= 80
    assert [line for line in listed.splitlines() if line in names] == sorted(names)


def test_json_listing_has_the_same_content(printed: Callable[..., str]) -> None:
    (first, *_) = json.loads(printed("tasks", "--json"))
    assert (first["name"], first["dataset"]) == ("cifar10-cnn", "uoft-cs/cifar10")
    rule = json.loads(printed("rules", "fedbuff", "--json"))
    told = {entry.name: entry.facts["fednova"] for entry in catalog.rules()}
    found = told["fedavg"], told["fedasync"], told["fedfa"]
    assert found == ("yes", "no", "depends on the parameters")
    assert rule["equation"] == "w ← w + (η_g/K) Σ s(τ_i) Δ_i"
    assert rule["parameters"][0] == {
        "name": "buffer_size",
        "type": "whole number",
        "required": False,
        "default": 10,
        "description": "K, number of updates per aggregation.",
    }


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(BadInputError, match="no rule is called 'fedbuf'") as bad:
        catalog.find("fedbuf", catalog.rules(), "rule")
    assert bad.value.exit_code == 2
    with pytest.raises(BadInputError, match="no task is called 'xyz': there are cifar10-cnn, "):
        catalog.find("xyz", catalog.tasks(), "task")
