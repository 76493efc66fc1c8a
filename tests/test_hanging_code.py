"""Own code that hangs, wherever it is called: it is named, the run ends, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from testbed.run import supervision
from testbed.runtimes.process import runtime as process
from testbed.runtimes.process.runtime import Programs
from tests.running import Finished, Testbed, left_as_processes, write_small_topology
from tests.waiting import eventually

OWN = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agents.rules.interface import Rule, Send, State
from agents.selection.interface import ClientSelection
from agents.tasks.interface import Task

calls = []

def hang(place):
    if place != "PLACE" or "runs" not in Path(__file__).parts:  # it is tried before the run
        return
    calls.append(place)
    if len(calls) < (60 if place == "training" else 3):
        return
    Path(__file__).with_name("hangs").touch()
    if "HOW" == "loop":
        while True:
            pass
    sum(range(10**15))  # holds the interpreter lock

@dataclass(frozen=True)
class Own(Task):
    dataset: ClassVar[str] = "digits"

    def model(self):
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss(self, outputs, y):
        import torch

        if torch.is_grad_enabled():
            hang("training")
        return super().loss(outputs, y)

    def correct(self, outputs, y):
        hang("evaluation")
        return super().correct(outputs, y)

@dataclass(frozen=True)
class Plain(Rule):
    def begin(self, server):
        return PlainState(server)

class PlainState(State):
    def __init__(self, server):
        self.server = server

    def update(self, update):
        hang("rule")
        self.server.w += update.vector
        return [self.server.aggregated([update.contribution(1.0)]), Send(update.client)]

@dataclass(frozen=True)
class First(ClientSelection):
    def choose(self, draw, view, rng):
        hang("selection")
        return draw.idle[: draw.count]
"""


QUICK = """
from agents import disturbances as watchdog
from agents.{agent} import main

watchdog.PATIENCE_SECONDS = main.PATIENCE_SECONDS = main._EVALUATION_SECONDS = 0.3
watchdog._LOOK_SECONDS, main.LATE_SECONDS = 0.1, 0.0
main.main()
"""
"""An agent whose watchdog is quick."""


def write(folder: Path, place: str, how: str, after: str, devices: int = 1, **changes: Any) -> Path:
    """Write a topology whose own code hangs at `place`."""
    (folder / "hanging.py").write_text(OWN.replace("PLACE", place).replace("HOW", how))
    fedbuff = {"name": "fedbuff", "buffer_size": 1, "concurrency": 1}
    chosen = {"rule": fedbuff, "selection": {"name": "hanging:First"}}
    return write_small_topology(
        folder,
        code="hanging.py",
        task={"name": "hanging:Own", "local": {"steps": 2, "batch_size": 8, "lr": 0.1}},
        devices=[{"name": "d", "cpu": 0.3, "count": devices}],
        evaluate={"every": "1s"},
        stop={"after": after},
        **changes,
        **(chosen if place == "selection" else {"rule": {"name": "hanging:Plain"}}),
    )


@pytest.mark.parametrize("how", ["loop", "lock"])
@pytest.mark.parametrize("place", ["rule", "selection", "evaluation", "training"])
def test_hanging_own_code_is_named(
    place: str, how: str, testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the run if the aggregator does not answer. Otherwise the user ends the run here."""
    where = "d-1" if place == "training" else "aggregator"
    what = rf"{where}: own code has not returned from hanging.py, line \d+ \(hang\)"
    answers = place == "training" or (place, how) == ("evaluation", "loop")

    def interrupt() -> None:
        def is_recorded() -> bool:
            return any(
                re.search(what, file.read_text()) for file in tmp_path.glob("runs/*/events.jsonl")
            )

        eventually(is_recorded)
        os.kill(os.getpid(), signal.SIGINT)

    aggregator, client = (
        (sys.executable, "-c", QUICK.format(agent=agent)) for agent in ("aggregator", "client")
    )
    monkeypatch.setattr(process, "Programs", lambda: Programs(aggregator=aggregator, client=client))
    monkeypatch.setattr(supervision, "LATE_SECONDS", 0.0)
    topology = write(tmp_path, place, how, after="1h" if answers else "3s")
    if answers:
        threading.Thread(target=interrupt, daemon=True).start()
    said = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert said.code == (130 if answers else 1), said.out + said.err
    run = Finished.only_one_in(tmp_path / "runs")
    reasons = run.manifest["validity"]["reasons"]
    assert any(re.search(what, reason) for reason in reasons), reasons
    assert left_as_processes(run.path.name) == []


@pytest.mark.parametrize("place", ["evaluation", "training"])
def test_more_interrupts_end_a_run_in_virtual_time_in_which_a_thread_hangs(
    place: str, tmp_path: Path
) -> None:
    topology = write(tmp_path, place, "loop", after="1h", devices=3, virtual={"step_time": "1ms"})
    options = ("up", topology, "--runtime", "virtual", "--runs", tmp_path / "runs")
    program = "from testbed.__main__ import main; main()"  # not forked: its own exit counts
    with subprocess.Popen([sys.executable, "-c", program, *map(str, options)]) as up:
        try:
            eventually(lambda: [*tmp_path.glob("runs/*/code/hangs")])
            for _ in range(120):  # two that come at once may count as one
                up.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    up.wait(1)
                    break
            assert up.wait(0) == 130
        finally:
            up.kill()
