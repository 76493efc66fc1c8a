"""Work that does not end is noticed, with its place in user code, even if it holds the lock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agents import disturbances
from agents.disturbances import HangingFile, Watchdog, read_hanging
from tests.waiting import eventually

OWN = """
import re
import time

def loop():
    while True:
        pass

def wait():
    time.sleep(1e6)

def count():
    sum(range(10**15))

def match():
    re.match("(a+)+$", "a" * 200 + "b")
"""
HANGING = """
import sys
import threading
from pathlib import Path

from agents import disturbances as watchdog
from agents import user_code
from agents.disturbances import HangingFile, Watchdog

folder, function, thread = sys.argv[1:]
watchdog._LOOK_SECONDS = 0.05
user_code.use_folder(folder)
file = HangingFile(Path(folder))
dog = Watchdog(
    file.write, over=file.clear, patience=lambda: 0.5, own_code_only=True, locked=file.descriptor
).start()

def work():
    dog.begin()
    user_code.load_attribute(f"hanging:{function}")()

if thread == "other":
    threading.Thread(target=work).start()
else:
    work()
"""
"""A program whose main thread, or other thread, hangs in own code."""


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize(
    ("function", "place"),
    [
        ("loop", r"line \d \(loop\)"),
        ("wait", r"line 10 \(wait\)"),
        ("count", r"line 13 \(count\)"),
        ("match", r"line 16 \(match\)"),
    ],
)
def test_hanging_own_code_is_reported_with_its_place(
    function: str, place: str, thread: str, tmp_path: Path
) -> None:
    """`count` and `match` hold the interpreter lock."""
    (tmp_path / "hanging.py").write_text(OWN)
    command = [sys.executable, "-c", HANGING, str(tmp_path), function, thread]
    with subprocess.Popen(command) as process:
        try:
            found = eventually(lambda: read_hanging(tmp_path, [str(tmp_path)]))
            assert re.fullmatch(f"own code has not returned from hanging.py, {place}", found)
        finally:
            process.kill()


def test_endless_work_is_reported_once_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each piece of work, and not between two."""
    monkeypatch.setattr(disturbances, "_LOOK_SECONDS", 0.01)
    told, given_up, cleared = list[str](), list[str](), threading.Event()
    dog = Watchdog(
        *(told.append, given_up.append, lambda: 0.05),
        over=cleared.set,
        patience=lambda: 0.02,
    ).start()
    try:
        dog.begin()
        eventually(lambda: given_up)
        assert len(told) == 1
        assert told[0].startswith("it has not returned from waiting.py, line ")
        cleared.clear()
        dog.end()
        assert cleared.wait(60)
        assert len(told) == 1
    finally:
        dog.close()


def test_work_that_ends_is_hanging_no_more(tmp_path: Path) -> None:
    file = HangingFile(tmp_path)
    file.write("own code has not returned\n")
    assert read_hanging(tmp_path, []) == "own code has not returned\\n"
    file.clear()
    assert read_hanging(tmp_path, []) is None


def test_traceback_of_a_process_that_was_stopped_is_no_report(tmp_path: Path) -> None:
    """When it continues, it writes one for the time for which it was stopped."""
    frame = f'Timeout (0:00:05)!\nThread 0x1:\n  File "{tmp_path}/own.py", line 3 in update\n'
    file = HangingFile(tmp_path)
    file.write(frame)
    assert read_hanging(tmp_path, [str(tmp_path)]) is None
    file.write(2 * frame)
    assert read_hanging(tmp_path, [str(tmp_path)]) == (
        "own code has not returned from own.py, line 3 (update)"
    )
    file.write("own code has not returned")
    os.write(file.descriptor, frame.encode())  # its thread was late
    assert read_hanging(tmp_path, [str(tmp_path)]) == "own code has not returned"
