"""`testbed up` and `testbed watch` on a terminal of their own, as a user has them."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import psutil
import pytest

from agents import events
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.watching import rows
from tests.running import Testbed, cli, left_as_processes, write_small_topology
from tests.testbed.record_factories import STARTED, update
from tests.waiting import eventually

TESTBED = f"{shlex.quote(sys.executable)} -m testbed"
_MOVES = re.compile(r"\x1b\[\d+;\d+H")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[@-~]")


class Terminal:
    """Run as a shell's child on a terminal; return the terminal's modes before and after."""

    def __init__(self, shell: pexpect.spawn[str]) -> None:
        self._shell = shell
        self._output = io.StringIO()
        shell.logfile_read = self._output

    def press(self, keys: str) -> None:
        self._shell.send(keys)

    def resize(self, lines: int, columns: int) -> None:
        self._shell.setwinsize(lines, columns)

    def until(self, shown: str, timeout: float = 180) -> None:
        """Read until a line shows the regular expression, colours aside; what came before is gone."""
        deadline, seen = time.monotonic() + timeout, ""
        while not re.search(shown, _ESCAPES.sub("", _MOVES.sub("\n", seen))):
            assert time.monotonic() < deadline, f"{shown!r} was never shown: {seen[-1000:]!r}"
            try:
                seen += self._shell.read_nonblocking(4096, timeout=0.2)
            except pexpect.TIMEOUT:
                continue

    def signal(self, number: int) -> None:
        (program,) = psutil.Process(self._shell.pid).children()
        program.send_signal(number)

    def until_restored(self) -> None:
        self._shell.expect_exact("\x1b[?1049l", timeout=180)

    def end(self) -> tuple[int, str]:
        """Exit code of the program and all that was shown; the terminal must be as it was before."""
        self._shell.expect(pexpect.EOF, timeout=180)
        output = self._output.getvalue()
        found = re.fullmatch(r"(?s)modes (\S+)\r\n(.*)code (\d+)\r\nmodes (\S+)\r\n", output)
        assert found is not None, output[-1000:]
        assert found[1] == found[4]
        for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert output.count(on) == output.count(off)
            assert output.rfind(on) <= output.rfind(off)
        return int(found[3]), found[2]


@contextmanager
def terminal(command: str) -> Iterator[Terminal]:
    """`testbed COMMAND` on 80 columns and 24 lines."""
    script = f'echo "modes $(stty -g)"; {TESTBED} {command}; echo "code $?"; echo "modes $(stty -g)"'
    # A child that is killed must not take the shell along, as a shell of a user's would not be.
    # Ctrl-C empties the terminal's buffer, perhaps in the middle of a character.
    shell = pexpect.spawn(
        "bash",
        ["-c", f"trap : INT; {script}"],
        dimensions=(24, 80),
        encoding="utf-8",
        codec_errors="replace",
        timeout=180,
    )
    try:
        yield Terminal(shell)
    finally:
        shell.close(force=True)


def test_watch_follows_a_running_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    topology = write_small_topology(tmp_path, stop={"after": "1h"})
    with terminal(f"up {topology} --runtime process --runs {runs}") as up:
        up.until(r"fast +train")
        up.press("q")
        up.until("Press Ctrl-C to end the run")
        (path,) = runs.iterdir()
        with terminal(f"watch {path}") as watch:
            watch.until(r"fast +train .* 0\.30 0\.\d\d ")
            watch.resize(40, 140)
            watch.until(r"fast +train .{60,} 0\.30 ")
            watch.press("\x1b[B")
            watch.until(r"> fast +train")
            watch.press("x")
            watch.until("kill fast\\?")
            watch.press("y")
            watch.until(r"> fast +offline")
            watch.press("q")
            assert watch.end()[0] == 0
        applied = updates_of_slow(path)
        eventually(lambda: updates_of_slow(path) > applied)
        up.until(r"s  offline: fast\b")  # lines come once a second, and not after the end
        up.press("\x03")
        code, output = up.end()
    assert code == 130
    assert "Run directory" in output
    assert "Traceback" not in output
    assert left_as_processes(path.name) == []


def updates_of_slow(path: Path) -> int:
    return (path / "events.jsonl").read_text().count('"client":"slow"')


@pytest.fixture
def ended(tmp_path: Path) -> RunDirectory:
    """A run of two devices that is over."""
    directory = RunDirectory(tmp_path)
    devices = {name: {"group": "pi", "cpu": 0.25, "importance": 0.5} for name in ("pi-1", "pi-2")}
    directory.write_manifest(
        rule="fedbuff", devices=devices, runtime="process", dilation=1.0, host={"name": "elsewhere"},
        outcome="after", validity={"valid": False, "reasons": ["the server was busy"]},
    )  # fmt: skip
    directory.topology.write_text("stop: {after: 60s, updates: null}\n")
    records: list[events.Record] = [
        STARTED,
        update("pi-1", 2.0),
        update("pi-2", 3.0),
        events.RunEnded(60.0, "after", 2, 2),
    ]
    directory.events.write_text("".join(events.to_line(record) for record in records))
    return directory


ENDINGS: dict[str, tuple[Callable[[Terminal, RunDirectory], object], int]] = {
    "q": (lambda shown, _: shown.press("q"), 0),
    "Ctrl-C": (lambda shown, _: shown.press("\x03"), 130),
    "SIGTERM": (lambda shown, _: shown.signal(signal.SIGTERM), 130),
    "an error": (lambda _, run: _damage(run), 2),
}


def _damage(run: RunDirectory) -> None:
    with run.events.open("a") as file:
        file.write("no record\n")


@pytest.mark.parametrize("ending", ENDINGS)
def test_terminal_is_restored(ending: str, ended: RunDirectory) -> None:
    end, expected = ENDINGS[ending]
    with terminal(f"watch {ended.path}") as shown:
        shown.until("ended: time is up")
        end(shown, ended)
        code, output = shown.end()
    assert code == expected
    assert "Traceback" not in output
    assert ("error: " in output) == (ending == "an error")


def test_suspended_watch_restores_and_retakes_the_terminal(ended: RunDirectory) -> None:
    with terminal(f"watch {ended.path}") as shown:
        shown.until("ended: time is up")
        shown.signal(signal.SIGTSTP)
        shown.until_restored()
        shown.signal(signal.SIGCONT)
        shown.until("ended: time is up")
        shown.press("q")
        code, output = shown.end()
    assert code == 0
    assert output.count("\x1b[?1049l") == 2


def test_finished_run_is_printed_in_lines_without_a_terminal(ended: RunDirectory) -> None:
    done = cli("watch", ended.path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "     0.0 s  absent at the start: pi-3",
        "    60.0 s  ended: time is up",
    ]


@pytest.fixture
def here(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Testbed:
    """`testbed`, and this process stays as urgent as it is."""
    monkeypatch.setattr("os.nice", lambda _: 0)
    return testbed


@pytest.mark.parametrize(
    ("outcome", "error", "last"),
    [
        (None, None, "crashed"),
        ("failed", "the broker ended\x1b[2J\nits log", "ended: failed: the broker ended\\x1b[2J"),
    ],
)
def test_lines_report_an_end_without_a_record(
    here: Testbed, ended: RunDirectory, outcome: str | None, error: str | None, last: str
) -> None:
    ended.write_manifest(outcome=outcome, error=error)
    ended.events.write_text(events.to_line(STARTED) + events.to_line(update("pi-1", 2.0)))
    done = here("watch", ended.path)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"     2.0 s  {last}"


def test_folder_without_a_run_cannot_be_watched(here: Testbed, tmp_path: Path) -> None:
    done = here("watch", "nothing", "--runs", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "no run nothing" in done.err
    (tmp_path / "manifest.json").write_text("{}")
    done = here("watch", tmp_path)
    assert done.code == 2
    assert "ended before any device was planned" in done.err


def test_overview_is_read_from_the_run_directory(ended: RunDirectory) -> None:
    told = rows.read_overview(ended)
    assert told is not None
    assert (told.rule, told.stop.after, told.stop.updates) == ("fedbuff", 60.0, None)
    assert [(d.name, d.group, d.cpu, d.importance) for d in told.devices] == [
        ("pi-1", "pi", 0.25, 0.5),
        ("pi-2", "pi", 0.25, 0.5),
    ]
    manifest = json.loads(ended.manifest.read_text())
    del manifest["rule"]
    ended.manifest.write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match="cannot be read as a run"):
        rows.read_overview(ended)
