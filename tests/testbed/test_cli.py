"""The command line on bad input and odd circumstances: an exit code and a sentence, no traceback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agents import events
from testbed import attach
from testbed.plan import Plan
from testbed.run import up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.view import View
from tests.running import TESTBED, TOPOLOGIES, Testbed, cli, write_topology

QUICKSTART = TOPOLOGIES / "quickstart.yaml"


def finished(runs: Path, run: str = "t-1", **entries: object) -> RunDirectory:
    """The directory of a run that is over."""
    directory = RunDirectory.create(runs, run)
    directory.write_manifest(**{"run": run, "outcome": "after", "created": 0.0, **entries})
    return directory


def test_plan_on_a_narrow_terminal_keeps_figures_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = cli(
        "plan", TOPOLOGIES / "links.yaml", "--runtime", "docker", "--oversubscribe"
    ).stdout.splitlines()
    (dsl,) = (line for line in lines if line.startswith("dsl-1"))
    assert "384kbit" in dsl
    assert any(line.startswith("Not shown, as the terminal is too narrow: quota") for line in lines)


def test_list_of_runs_on_a_narrow_terminal_keeps_words_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = "quickstart-20261122-074415-370d"
    facts = {"rule": "fedbuff", "task": "digits-logreg", "runtime": "process", "outcome": "interrupted"}
    finished(tmp_path, run, **facts)
    _, row, *remark = cli("runs", "--runs", tmp_path).stdout.splitlines()
    assert row.split() == [run, "–", "interrupted"]
    assert " ".join(remark).startswith("Not shown, as the terminal is too narrow: devices, runtime")


def test_single_device_is_written_in_the_singular(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, devices=[{"name": "alone", "cpu": 0.1}], rule={"name": "fedavg"})
    said = testbed("plan", topology, "--runtime", "virtual").out
    assert "virtual: 1 device in simulated time." in said
    said = testbed("plan", topology, "--runtime", "process").out
    assert "process: 1 device asks for 0.1 of " in said


def test_completion_is_installed_for_one_name() -> None:
    """This holds for `python -m testbed` too, which is not the name of a command."""
    command = [*TESTBED, "up", "--help"]
    assert "Usage: testbed up " in subprocess.run(command, capture_output=True, text=True).stdout


def test_progress_bars_on_a_narrow_terminal_leave_room_for_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    lines = cli("data", QUICKSTART).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("medium-1"))
    assert re.fullmatch(r"medium-1 +\d+ +\d+  \d+", row)
    assert len(row) <= 50


def test_characters_missing_in_the_locale_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    finished(tmp_path, "t", rule="fedbuff")
    command = [*TESTBED, "runs", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout  # for – where there is no figure


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(tmp_path: Path, closed: str) -> None:
    """Some supervisors start programs so. A child process that prints must not print into a file of the
    testbed that got the number of a stream."""
    finished(tmp_path, "t", rule="fedbuff")
    command = ["sh", "-c", f'"$@" {closed}', "sh", *TESTBED, "runs", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from testbed import __main__\n"
        "sys.argv[1:] = ['--version']\n"
        "try:\n"
        "    __main__.main()\n"
        "finally:\n"
        "    file = open('/dev/null')\n"
        f"    Path({str(tmp_path / 'number')!r}).write_text(str(file.fileno()))\n"
    )
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", program], check=True)
    assert int((tmp_path / "number").read_text()) > 2


def test_removed_working_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = 'cd "$0" && rmdir "$0" && "$@"'
    command = ["sh", "-c", line, str(gone), *TESTBED, "up", str(QUICKSTART), "--runtime", "virtual"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "The folder that you are in was removed" in done.stderr


@pytest.mark.parametrize("runtime", ["process", "virtual"])
def test_runs_folder_whose_name_is_not_utf8_is_refused(
    testbed: Testbed, tmp_path: Path, runtime: str
) -> None:
    """The broker's configuration could not be written, and an engine would look for another folder."""
    runs = tmp_path / os.fsdecode(b"f\xfcr")
    said = testbed("up", QUICKSTART, "--runtime", runtime, "--runs", runs)
    assert said.code == 2
    assert r"f\udcfcr" in said.err
    assert "--runs" in said.err
    assert not list(tmp_path.iterdir())


def test_interrupt_during_imports_prints_no_traceback() -> None:
    """Importing typer takes most of that time."""
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from testbed.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("interrupted", "code"), [(True, 130), (False, 1)])
def test_interrupt_turned_into_an_error_by_a_library_is_an_interrupt(
    interrupted: bool, code: int
) -> None:
    """Pydantic does so: some of its classes are created when a command imports them."""
    program = (
        "import os, signal, sys\n"
        "from testbed.cli import main\n"
        "@main.app.command('failing')\n"
        "def failing():\n"
        "    try:\n"
        f"        {interrupted} and os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n"
        "        raise RuntimeError('SchemaError')\n"
        "sys.argv[1:] = ['failing']\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, "SchemaError" in done.stderr) == (code, not interrupted)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up"], "topology"),
        (["up", "no-such.yaml"], "no-such.yaml"),
        (["up", QUICKSTART, "--resume", "t-1"], "--resume"),
        (["up", "--resume", "no-such-run"], "no-such-run"),
        (["up", QUICKSTART, "--runtime", "no-such-runtime"], "no-such-runtime"),
        (["up", QUICKSTART, "--data", "no-such-folder"], "no-such-folder"),
        (["up", "-d", QUICKSTART, "--data", "no-such-folder"], "no-such-folder"),
        (["up", "-d", "--strict", QUICKSTART], "--strict needs the end of the run"),
        (["down"], "--all"),
        (["down", "t-1", "--all"], "--all"),
        (["logs", "no-such-run"], "no-such-run"),
        (["logs", "t-1", "--tail", "0"], "--tail"),
        (["validate", "no-such.yaml"], "no-such.yaml"),
        (["plan", TOPOLOGIES], "topologies"),
        (["dashboard", "no-such-run"], "no-such-run"),
        (["dashboard", TOPOLOGIES], "topologies"),
        (["dashboard"], "--runs"),
        (["calibrate", "--fidelity", "--runtime", "virtual"], "--runtime virtual: expected auto"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_bad_input_exits_with_2_and_names_the_place(
    testbed: Testbed,
    arguments: list[str | Path],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = testbed(*arguments)
    assert said.code == 2, said
    assert named in said.err
    assert said.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["calibrate", "t-1", "--fidelity"], "--fidelity"),
        (["calibrate", "--runtime", "process"], "--runtime"),
        (["export", "t-1", "--version", "3"], "--version"),
        (["export", "t-1", "--to", "mlflow", "--model", "--version", "3"], "--version"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    testbed: Testbed, arguments: list[str], named: str, tmp_path: Path
) -> None:
    finished(tmp_path)
    said = testbed(*arguments, "--runs", tmp_path)
    assert said.code == 2
    assert named in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", QUICKSTART, "--runtime", "virtual", "--dashboard", "--port"],
        ["up", QUICKSTART, "--runtime", "virtual", "--metrics-port"],
        ["dashboard", "--port"],
    ],
)
def test_port_in_use_is_reported(testbed: Testbed, arguments: list[str | Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = testbed(*arguments, port, "--runs", tmp_path)
    assert said.code == 2
    assert f"{arguments[-1]} {port}: Address already in use" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("detached", [[], ["-d"]])
def test_file_as_runs_folder_is_refused(testbed: Testbed, detached: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    said = testbed("up", *detached, QUICKSTART, "--runtime", "process", "--runs", tmp_path / "runs")
    assert said.code == 2
    assert "--runs" in said.err
    assert testbed("runs", "--runs", tmp_path / "runs").code == 0


@pytest.mark.parametrize("outcome", ["after", "interrupted"])
def test_unresumable_runs_are_refused(testbed: Testbed, outcome: str, tmp_path: Path) -> None:
    finished(tmp_path, outcome=outcome)  # complete, or without a first model
    said = testbed("up", "--resume", "t-1", "--runs", tmp_path)
    assert said.code == 2
    assert "start a new run" in said.err


def test_run_that_ended_before_its_controller_died_is_complete(testbed: Testbed, tmp_path: Path) -> None:
    directory = finished(tmp_path, outcome=None)
    directory.events.write_text(events.to_line(events.RunEnded(2.0, "updates", 3, 9)))
    said = testbed("up", "--resume", "t-1", "--runs", tmp_path)
    assert said.code == 2
    assert "is complete (it ended by `updates`)" in said.err


def test_running_run_is_not_resumed(testbed: Testbed, tmp_path: Path) -> None:
    finished(tmp_path).claim()  # by this process
    said = testbed("up", "--resume", "t-1", "--runs", tmp_path)
    assert said.code == 2
    assert "testbed down t-1" in said.err


def test_runs_lists_the_outcome_of_each_run(testbed: Testbed, tmp_path: Path) -> None:
    finished(tmp_path, "a-done")
    finished(tmp_path, "b-crashed", outcome=None, controller={"pid": 2**22 + 1, "started": 0.0})
    finished(tmp_path, "c-lives").claim()
    finished(tmp_path, "d-torn").manifest.write_text("{")
    rows = json.loads(testbed("runs", "--json", "--runs", tmp_path).out)
    assert {row["run"]: row["outcome"] for row in rows} == {
        "a-done": "after",
        "b-crashed": "crashed",
        "c-lives": "running",
        "d-torn": "unreadable",
    }


def test_text_is_printed_without_markup_or_wrapping(testbed: Testbed, tmp_path: Path) -> None:
    folder = tmp_path / "[bold]"
    line = "[/] \\[red] " + 100 * "word " + "end"
    (finished(folder).logs / "broker.log").write_text(line + "\n")
    assert line in testbed("logs", "t-1", "--runs", folder).out
    topology = write_topology(folder)
    assert f"{topology}: valid" in testbed("validate", topology).out
    missing = testbed("validate", folder / "no-such.yaml")
    assert f"{folder}/no-such.yaml" in missing.err


def test_empty_device_log_is_explained(testbed: Testbed, tmp_path: Path) -> None:
    logs = finished(tmp_path, devices={"pi-1": {"group": "pi"}}).logs
    for name in ("dashboard", "pi-1", "tracker-mlflow"):
        (logs / f"{name}.log").touch()
    device = "(empty; devices log each round if the run is started with -v)"
    shown = testbed("logs", "t-1", "--runs", tmp_path).out.splitlines()
    assert shown[1::2] == ["(empty)", device, "(empty)"]


def test_a_wide_table_stays_one_line_per_row_in_a_pipe(tmp_path: Path) -> None:
    finished(tmp_path, "t-" + 50 * "x", rule="fedbuff", task=50 * "y", runtime="docker")
    command = [*TESTBED, "runs", "--runs", str(tmp_path)]
    unset = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    lines = subprocess.run(command, env=unset, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 2
    assert 50 * "y" in lines[1]
    assert not [line for line in lines if line.endswith(" ")]


def test_unreadable_file_is_named(testbed: Testbed, tmp_path: Path) -> None:
    (finished(tmp_path).logs / "broker.log").mkdir()  # stands for it: root may read everything
    said = testbed("logs", "t-1", "--runs", tmp_path)
    assert said.code == 1
    assert said.err.startswith(f"error: {tmp_path}")


@pytest.mark.parametrize(
    ("validity", "strict", "code", "last", "end"),
    [
        (None, True, 0, "Next: ", "run it again"),
        ({"valid": True}, True, 0, "Verdict: valid · Next: ", "run it again"),
        ({"valid": None, "unjudged": ["load"]}, True, 0, "Verdict: not judged · Next: ", "what helps"),
        ({"valid": False, "reasons": ["load"]}, False, 0, "Verdict: not valid · Next: ", "what helps"),
        ({"valid": False, "reasons": ["load"]}, True, 1, "Verdict: not valid · Next: ", "what helps"),
    ],
)
def test_up_ends_with_the_verdict(
    testbed: Testbed,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    validity: dict[str, object] | None,
    strict: bool,
    code: int,
    last: str,
    end: str,
) -> None:
    """A simulated run stands for an emulated one."""

    def run(
        topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
    ) -> events.RunEnded:
        ended = real(topology, plan, directory, options, view)
        directory.write_manifest(**({} if validity is None else {"validity": validity}))
        return ended

    real = up.run
    monkeypatch.setattr(up, "run", run)
    quadratic = {"name": "quadratic", "centers": [[0], [1]], "local": {"steps": 1}}
    devices = [{"name": "pi", "count": 2, "timing": "1s"}]
    topology = write_topology(tmp_path, task=quadratic, devices=devices, stop={"after": "2s"})
    options = ["--runtime", "virtual", "--runs", tmp_path / "runs", *(["--strict"] if strict else [])]
    said = testbed("up", topology, *options)
    assert said.code == code, said
    (line,) = said.out.splitlines()[-1:]
    assert line.startswith(last)
    assert line.endswith(end)


def test_unique_run_prefix_selects_the_run(testbed: Testbed, tmp_path: Path) -> None:
    for run in ("alpha-1", "alpha-12", "beta-1"):
        (finished(tmp_path, run).logs / "broker.log").write_text(f"of {run}\n")
    assert "of beta-1" in testbed("logs", "b", "--runs", tmp_path).out
    assert "of alpha-12" in testbed("logs", tmp_path / "alpha-12").out
    assert "of beta-1" in testbed("logs", tmp_path / "bet").out
    assert "of alpha-1\n" in testbed("logs", "alpha-1", "--runs", tmp_path).out  # it is one itself
    several = testbed("logs", "alpha", "--runs", tmp_path)
    assert several.code == 2
    assert several.err.split()[-2:] == ["alpha-1", "alpha-12"]
    assert testbed("logs", "", "--runs", tmp_path).code == 2
    finished(tmp_path, "alpha-3").claim()  # it runs
    assert attach("alpha", runs=tmp_path).id == "alpha-3"


def test_down_accepts_a_prefix_of_the_remaining_runs(testbed: Testbed, tmp_path: Path) -> None:
    """Runs that have nothing left do not make it ambiguous."""
    for run in ("alpha-1", "alpha-2"):
        directory = finished(tmp_path, run)
        if run == "alpha-1":
            directory.remove_work()
    assert testbed("down", "alpha", "--runs", tmp_path).out == "alpha-2: down\n"
    assert not directory.work.exists()
    assert "nothing is running" in testbed("down", "alpha-1", "--runs", tmp_path).out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("alhpa", "no run alhpa (did you mean alpha-2?)"),
        ("alpha-3", "no run alpha-3 (did you mean alpha-2?)"),
        ("zzz", "no run zzz: `testbed ps`"),
        ("", "Give one run id"),
    ],
)
def test_down_refuses_an_unknown_run(given: str, said: str, testbed: Testbed, tmp_path: Path) -> None:
    for run in ("alpha-1", "alpha-2"):
        finished(tmp_path, run)
    refused = testbed("down", given, "--runs", tmp_path)
    assert refused.code == 2
    assert said in refused.err
