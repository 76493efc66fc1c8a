"""Runs whose broker, aggregator or connections fail: they continue, and report it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from agents import events
from agents.mqtt.topics import AGGREGATOR, CONTROLLER
from testbed.broker import BROKER
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process import runtime
from tests import chaos
from tests.chaos import Fault, Outcome
from tests.running import Finished, cli, interrupt, started, until_printed, write_small_topology
from tests.testbed import record_factories
from tests.waiting import eventually

KILLED = "ended with exit code -9 at"
CUT_OFF = "the aggregator had no connection to the broker from"


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in rounds, in which everyone waits for everyone: a connection breaks, the broker is killed,
    the aggregator is killed."""
    faults = [Fault(0.7, "break", AGGREGATOR), Fault(2.5, "kill", BROKER), Fault(5, "kill", AGGREGATOR)]
    folder = tmp_path_factory.mktemp("recovered")
    return chaos.run(folder, chaos.RULES["fedavg"], faults, after=13.0, calm=2.0)


def test_no_update_is_lost_and_nothing_is_left(recovered: Outcome) -> None:
    assert recovered.finished > 0
    assert recovered.lost == []
    assert sum(isinstance(record, events.RunStarted) for record in recovered.run.records) == 1
    assert not [info for info in runtime.find() if info.run == recovered.run.path.name]
    assert replay(RunDirectory(recovered.run.path)).updates == len(recovered.run.updates) > 0


@pytest.mark.timed
def test_all_clients_continue_and_the_verdict_names_the_breakdowns(recovered: Outcome) -> None:
    assert recovered.wrong == [], recovered.output
    assert isinstance(recovered.run.records[-1], events.RunEnded)
    assert recovered.run.records[-1].reason == "after"
    assert recovered.run.manifest["validity"]["valid"] is False
    reasons = "\n".join(recovered.reasons)
    assert CUT_OFF in reasons
    assert f"the broker {KILLED}" in reasons
    notes = [r.message for r in recovered.run.records if isinstance(r, events.Note)]
    for part in (BROKER, AGGREGATOR):
        assert any(note.startswith(f"the {part} {KILLED}") for note in notes), notes
    away = [r for r in recovered.run.records if isinstance(r, events.Disrupted)][-1]
    assert away.since == pytest.approx(5.0, abs=0.5), "the run clock continues"
    assert away.at > away.since


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_run_whose_client_somebody_else_ends_is_not_valid(how: signal.Signals, tmp_path: Path) -> None:
    """Whether the client says goodbye (exit code 0) or not. The other client continues."""
    topology = write_small_topology(tmp_path, rule={"name": "fedasync"}, stop={"after": "1h"})
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        (client,) = (one for one in runtime.find() if (one.run, one.component) == (run.name, "fast"))
        client.process.send_signal(how)
        client.process.wait(120)
        ended = len(Finished.only_one_in(runs).updates)
        later = eventually(lambda: Finished.only_one_in(runs).updates[ended + 20 :])
        assert later[0].client == "slow"
        _, output = interrupt(up)
    finished = Finished.only_one_in(runs)
    code = "0" if how == signal.SIGTERM else "-9"
    reasons = finished.manifest["validity"]["reasons"]
    (reason,) = (why for why in reasons if "the client of fast" in why)
    assert re.fullmatch(
        rf"the client of fast ended at \d+\.\d s with exit code {code}, without an order", reason
    ), output


def test_run_whose_aggregator_somebody_else_ends_has_failed_and_can_be_resumed(tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path, stop={"updates": 100})
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        eventually(lambda: Finished.only_one_in(runs).updates)  # before, nothing is there to resume
        (own,) = (one for one in runtime.find() if (one.run, one.component) == (run.name, AGGREGATOR))
        own.process.terminate()
        output, said = up.communicate(timeout=240)
    assert up.returncode == 1, output
    assert "the aggregator was ended by a signal at" in output + (said or "")
    resumed = cli("up", "--resume", run.name, "--runs", runs)
    assert resumed.returncode == 0, resumed.stderr
    ends = [one for one in Finished.only_one_in(runs).records if isinstance(one, events.RunEnded)]
    assert ends[-1].reason == "updates"


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run whose aggregator, broker and controller are stopped by a signal, one after the other."""
    at = {AGGREGATOR: 1, BROKER: 7, CONTROLLER: 16}  # it sees first that the broker is back
    faults = [Fault(begin, "freeze", part) for part, begin in at.items()]
    folder = tmp_path_factory.mktemp("frozen")
    return chaos.run(folder, chaos.RULES["fedbuff"], faults, after=27.0, calm=4.0)


@pytest.mark.timed
def test_suspended_processes_are_recorded_and_judged(frozen: Outcome) -> None:
    assert frozen.wrong == [], frozen.output
    reasons = "\n".join(frozen.reasons)
    assert re.search(r"the aggregator stood still from [01]\.\d to [67]\.\d s", reasons), reasons
    assert re.search(r"the broker stood still from [78]\.\d to 1[234]\.\d s", reasons), reasons
    assert re.search(r"the controller stood still from 1[567]\.\d to 2[12]\.\d s", reasons), reasons


def test_update_without_a_record_counts_as_lost() -> None:
    """Of a's updates 1 is applied, 2 and 3 are covered by an unfinished round, 4 is skipped, and 5 is
    rejected."""
    finished = {("a", number): 1 for number in (1, 2, 3, 4, 5, 7)} | {("b", 6): 1}
    told: list[events.Record] = [
        record_factories.update("a", 1.0, dispatch=1),
        events.RoundUnfinished(2.0, "a", 1, 1.0, 2.0, 3),
        events.UpdateRejected(3.0, "a", "late", 5),
        record_factories.update("a", 4.0, dispatch=8),
        events.RoundUnfinished(5.0, "a", 1, 1.0, 2.0, 9),
    ]
    assert chaos.unaccounted(finished, told) == [("a", 4), ("a", 7), ("b", 6)]


# Of seeds that kill no client: on a busy host it may not be back before so short a run is over.
MORE: dict[int, list[Fault]] = {3: [], 10: [Fault(4.5, "flood", "d")]}
"""Faults added to the drawn ones, by seed, after all of which a flood has some seconds."""


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[Outcome]]]:
    """These runs, side by side: nearly all the time their devices wait."""

    def run(seed: int, folder: Path) -> Outcome:
        rule = chaos.RULES[list(chaos.RULES)[seed % len(chaos.RULES)]]
        faults, scenario, _ = chaos.drawn(seed, "process", until=4.0)
        faults += MORE[seed]
        return chaos.run(folder, rule, faults, scenario=scenario, twice=True, after=10.0, calm=2.0)

    with ThreadPoolExecutor(len(MORE)) as pool:
        yield {seed: pool.submit(run, seed, tmp_path_factory.mktemp("faulted")) for seed in MORE}


@pytest.mark.timed
@pytest.mark.parametrize("seed", MORE)
def test_runs_continue_under_random_faults(faulted: dict[int, Future[Outcome]], seed: int) -> None:
    found = faulted[seed].result()
    assert found.wrong == [], found.output
    acted = [record for record in found.run.records if isinstance(record, events.Acted)]
    by_aggregator = [one.device for one in acted if one.source == AGGREGATOR]
    assert by_aggregator == [fault.part for fault in MORE[seed]]
