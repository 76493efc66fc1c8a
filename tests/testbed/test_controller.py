"""The controller with a real broker and stand-ins for the agents that do not do what they should."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agents import events
from testbed import fleet
from testbed.controller import Controller
from testbed.errors import RunFailedError
from testbed.runtimes.process import ProcessRuntime, Programs
from testbed.signals import interrupting
from tests.testbed.test_process_runtime import SLEEP, of, python, spec

FAIL = "import sys; sys.exit('it broke')"


@dataclass
class Lines:
    """A view that remembers what it was told."""

    lines: list[str] = field(default_factory=list)

    def progress(self, message: str) -> None:
        self.lines.append(message)

    def record(self, record: events.Record) -> None: ...
    def refresh(self, now: float) -> None: ...


@pytest.mark.parametrize(
    ("aggregator", "client", "said"),
    [
        (SLEEP, FAIL, r"(?s)d-\d.* ended before the run clock could start.*d-\d\.log:\n *it broke"),
        (SLEEP, "import os; os.kill(os.getpid(), 9)", "perhaps it needs more memory"),
        (FAIL, SLEEP, r"(?s)the aggregator ended with exit code 1.*aggregator\.log:\n *it broke"),
        ("", SLEEP, "aggregator ended before the run clock could start"),
    ],
    ids=["device fails", "device is killed", "aggregator fails", "aggregator leaves"],
)
def test_a_part_that_dies_before_the_start_is_told_at_once(
    aggregator: str, client: str, said: str, tmp_path: Path
) -> None:
    run = spec(tmp_path)
    programs = Programs(aggregator=python(aggregator), client=python(client))
    assert run.topology.start.timeout > 30
    begin = time.monotonic()
    with pytest.raises(RunFailedError, match=said):
        Controller(run, ProcessRuntime(run, programs), Lines()).run()
    assert time.monotonic() - begin < 30
    assert of(run) == []


@pytest.fixture
def terminated_soon() -> Iterator[None]:
    """SIGTERM to this process, as `testbed down` sends it, while a run starts."""
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    with interrupting():
        timer.start()
        yield
        timer.cancel()


@pytest.mark.usefixtures("terminated_soon")
def test_sigterm_while_devices_get_ready_leaves_nothing(tmp_path: Path) -> None:
    run = spec(tmp_path)
    programs = Programs(aggregator=python(SLEEP), client=python(SLEEP))
    with pytest.raises(KeyboardInterrupt):
        Controller(run, ProcessRuntime(run, programs), Lines()).run()
    assert of(run) == []


def test_a_directory_that_a_label_names_is_not_believed_blindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process marked with a run but no directory must not cost anybody the `work/` that is here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "work").mkdir()
    for directory in (None, tmp_path):
        fleet.take_down(fleet.LiveRun(f"no-{tmp_path.name}", "process", 1, directory))
    assert (tmp_path / "work").is_dir()
