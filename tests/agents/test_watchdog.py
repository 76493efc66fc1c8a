"""Work that does not end is noticed, with its place in user code."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from agents import user_code, watchdog
from agents.watchdog import Watchdog
from tests.waiting import eventually

OWN = """
import threading

def update(is_over):
    while not is_over.is_set():
        is_over.wait(0.01)
"""


def test_endless_work_is_reported_with_its_place_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each piece of work, and not between two."""
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    (tmp_path / "hanging.py").write_text(OWN)
    user_code.use_folder(str(tmp_path))
    is_over, told, given_up = threading.Event(), list[str](), list[str]()

    def give_up(what: str) -> None:
        given_up.append(what)
        is_over.set()

    dog = Watchdog(told.append, give_up, lambda: 0.05, patience=0.02, own_code_only=True)
    try:
        dog.begin()
        user_code.load_attribute("hanging:update")(is_over)
        dog.end()
        eventually(lambda: given_up)
        assert len(told) == 1
        assert told[0].startswith("own code has not returned from hanging.py, line 6 (update), for ")
    finally:
        dog.close()
        user_code.use_folder(None)
        sys.modules.pop("hanging", None)
