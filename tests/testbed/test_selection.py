"""`selection` in a topology: its conflicts, the plan's notes, runs in virtual time, own selections."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import BadInputError, RunFailedError
from testbed.run import preparing
from testbed.run.options import Options
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.testbed.test_replay import EVENTFUL
from tests.testbed.test_virtual_run import _run, _topology

DRAWING: dict[str, dict[str, Any]] = {
    "fedbuff": {"buffer_size": 2, "concurrency": 2},
    "port": {"min_updates": 2, "concurrency": 2},
    "fedavg": {"sample": 2},
    "defedavg_niid": {"sample": 3},
    "favano": {"period": "2s", "sample": 2},
}
"""The rules that draw clients, with parameters with which they draw."""
OWN = """
from dataclasses import dataclass
from agents.selection.interface import ClientSelection

@dataclass(frozen=True)
class Mine(ClientSelection):
    after: int = 0
    busy: bool = False
    def choose(self, draw, view, rng):
        if view.draw <= self.after:
            return draw.uniform(rng)
        if self.busy:
            return [client for client in view.clients if client not in draw.idle][:1]
        return [draw.idle[0]] * 2

@dataclass(frozen=True)
class Lazy(ClientSelection):
    pass
"""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rule": {"name": "fedasync"}, "selection": {"name": "oort"}},
            "selection: the rule fedasync draws no clients here, so that a selection has no effect",
        ),
        (
            {"rule": {"name": "fedavg"}, "selection": {"name": "tifl", "tiers": 2}},
            "draws no clients here, so that a selection has no effect: set rule.sample",
        ),
        ({"selection": {"name": "tifl", "tiers": 3}}, "selection.tiers: found 3, but there are only 2"),
        ({"selection": {"name": "tifl", "tiers": 0}}, "selection.tiers: found 0, expected at least 1"),
        ({"selection": {"name": "ort"}}, "selection.name: found 'ort', expected .* did you mean oort"),
        ({"selection": {"name": "oort", "alfa": 1}}, "selection.alfa: unknown key; did you mean alpha"),
        ({"selection": {"name": "charged", "minimum": "120%"}}, "selection.minimum: found '120%'"),
        (
            {"selection": "oort"},
            "selection: found 'oort', expected keys and values such as selection: ",
        ),
        (
            {
                "selection": {"name": "oort"},
                "privacy": {"differential": {"clip": 1.0, "noise": 1.0}},
            },
            "selection.name: oort needs the losses of clients, which privacy.differential hides",
        ),
        ({"selection": {"name": "mine:Mine"}}, "mine:Mine is a class of your own: add code"),
    ],
)
def test_conflicting_selection_is_refused_with_its_place(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    rule = {"name": "fedbuff", "buffer_size": 1, "concurrency": 1}
    with pytest.raises(BadInputError, match=told):
        preparing.plan_file(_topology(tmp_path, **{"rule": rule} | changes), Options())


def test_plan_says_which_rules_need_uniform_draws(tmp_path: Path) -> None:
    def notes(rule: str, selection: str) -> list[str]:
        changes = {"rule": {"name": rule, **DRAWING[rule]}, "selection": {"name": selection}}
        _, plan = preparing.plan_file(_topology(tmp_path, **changes), Options())
        return [note for note in plan.notes if "needs uniform draws" in note]

    for rule in ("fedbuff", "fedavg", "defedavg_niid", "favano"):
        (note,) = notes(rule, "fastest")
        assert f"The theory of {rule}" in note
        assert "selection: fastest" in note
    assert notes("fedavg", "uniform") == []
    assert notes("port", "fastest") == []


@pytest.mark.parametrize("rule", DRAWING)
def test_uniform_selection_draws_as_the_rule_without_a_selection(rule: str, tmp_path: Path) -> None:
    found: list[tuple[list[str], bytes]] = []
    for changes in ({}, {"selection": {"name": "uniform"}}):
        topology = _topology(tmp_path, rule={"name": rule, **DRAWING[rule]}, **EVENTFUL, **changes)
        run = _run(topology, tmp_path, name=f"run-{len(found)}")
        lines = (run.path / "events.jsonl").read_text().splitlines()[1:]
        plain = [line for line in lines if json.loads(line)["event"] != "draw"]
        assert (len(plain) < len(lines)) == bool(changes)
        found.append((plain, (run.path / "models" / "final.safetensors").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("selection", ["oort", "tifl", "fastest", "round_robin", "charged"])
@pytest.mark.parametrize("rule", ["fedbuff", "fedavg"])
def test_run_with_a_selection_is_replayed_bit_by_bit(selection: str, rule: str, tmp_path: Path) -> None:
    """The run has a crash and a departure."""
    params = {"tiers": 2, "interval": 2} if selection == "tifl" else {}
    topology = _topology(
        tmp_path,
        rule={"name": rule, **DRAWING[rule]},
        selection={"name": selection, **params},
        **EVENTFUL,
    )
    run = _run(topology, tmp_path)
    assert replay(RunDirectory(run.path)).updates == len(run.updates) > 10
    drawn = run.draws["chosen"].str.split().explode()
    assert {*drawn} == {"fast-1", "fast-2", "fast-3", "slow"}
    assert (run.draws["eligible"] >= 1).all()


def _own(path: Path, **selection: Any) -> Path:
    (path / "mine.py").write_text(OWN)
    rule = {"name": "fedbuff", "buffer_size": 1, "concurrency": 1}
    return _topology(path, code="mine.py", rule=rule, selection=selection)


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        ({"name": "mine:Mine"}, r"17:3: selection: choose of the selection Mine returned .* twice"),
        ({"name": "mine:Mine", "busy": True, "after": 1}, "returned 'client-1', which is not an idle"),
        ({"name": "mine:Lazy"}, "mine:Lazy has no method choose, which every selection needs"),
        ({"name": "mine:Mine", "before": 1}, "selection.before: unknown key"),
    ],
    ids=["twice", "busy", "without choose", "unknown key"],
)
def test_own_selection_is_tried_before_the_start(
    selection: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=told):
        preparing.plan_file(_own(tmp_path, **selection), Options())


def test_wrong_choice_of_an_own_selection_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="choose of the selection mine:Mine returned slow twice"):
        _run(_own(tmp_path, name="mine:Mine", after=7), tmp_path)


def _battery(name: str, **more: Any) -> dict[str, Any]:
    """A device of 2 W idle and 5 W while it trains, with 100 J."""
    energy = {"idle": "2W", "core": "3W", "battery": {"capacity": "100J"}}
    return {"name": name, "timing": "1s", "cpu": 1.0, "energy": energy, **more}


def test_low_battery_is_not_chosen_until_the_recheck(tmp_path: Path) -> None:
    """After a training of 1 s, of which nearly all is waiting, `a` reports 98 %, which is too low. It
    is eligible again 15 s later."""
    run = _run(
        _topology(
            tmp_path,
            rule={"name": "fedbuff", "buffer_size": 1, "concurrency": 1},
            selection={"name": "charged", "minimum": 0.985, "recheck": "15s"},
            devices=[_battery("a"), {"name": "b", "timing": "1s"}],
            stop={"after": "40s"},
            virtual={"step_time": "1ms"},
        ),
        tmp_path,
    )
    chosen = run.draws.loc[run.draws["chosen"] == "a", "at"].tolist()
    assert chosen[0] == 0.0
    assert 1 < len(chosen) <= 3
    assert all(after - before >= 16 for before, after in itertools.pairwise(chosen))
    first = run.rounds.iloc[0]
    assert (first["client"], first["level"]) == ("a", pytest.approx(0.98, abs=0.001))
    assert len(run.updates[run.updates["client"] == "b"]) > 30


@pytest.mark.parametrize("stop", [{"after": "30s"}, {"updates": 100}], ids=["after", "updates"])
def test_run_in_which_nobody_can_become_eligible_does_not_hang(
    stop: dict[str, Any], tmp_path: Path
) -> None:
    """The battery is empty after 50 s."""
    topology = _topology(
        tmp_path,
        rule={"name": "fedavg", "sample": 1},
        selection={"name": "charged", "minimum": 0.99, "recheck": None},
        devices=[_battery("a")],
        stop=stop,
        virtual={"step_time": "1ms"},
    )
    run = _run(topology, tmp_path)
    assert run.ended is not None
    assert run.ended.reason == ("after" if "after" in stop else "no clients left")
    assert len(run.updates) == 1
    (note,) = [text for text in run.notes["message"] if "chose none" in text]
    assert note.startswith("the selection charged chose none of 1 idle client: the draw is repeated")
