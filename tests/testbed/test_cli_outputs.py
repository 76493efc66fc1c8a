"""Speed of the command line, its output with `--json`, and with `--quiet`."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from agents.rules import RULES
from agents.selection import SELECTIONS
from agents.tasks import TASKS
from testbed import console
from testbed.api.outputs import OUTPUTS, schema
from testbed.cli import app, main
from testbed.topology.link_traces import PUBLISHED_FORMATS
from tests.running import TESTBED, TOPOLOGIES, Testbed, check_output, write_topology

WITHOUT_JSON = {"dashboard", "shell", "watch", "schema", "new trace", "new devices"}
"""Commands that need a terminal or a browser, or print for programs anyway."""
HEAVY = {"bokeh", "datasets", "docker", "numpy", "pandas", "pydantic", "rich", "torch", "yaml"}


def run_of_main(*arguments: str, **environment: str) -> tuple[list[str], set[str]]:
    """Return the output of `testbed ARGUMENTS` in a separate process, and the modules it imported."""
    program = (
        "import atexit, sys\n"
        "loaded = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "atexit.register(lambda: print('\\nloaded', *loaded()))\n"
        f"sys.argv = ['testbed', *{arguments!r}]\n"
        "from testbed.cli.main import main\n"
        "main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr
    *lines, loaded = ended.stdout.splitlines()
    return lines, set(loaded.split())


def completed(words: str, **environment: str) -> tuple[list[str], set[str]]:
    """The completions of the last of `words`."""
    bash = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    lines, loaded = run_of_main(_TESTBED_COMPLETE="complete_bash", **bash, **environment)
    return [line for line in lines if line], loaded


def commands() -> dict[str, Any]:
    """All commands by name, those of groups as `images build`."""
    group: Any = get_command(main.app)
    found: dict[str, Any] = {}
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        subs: list[str] = getattr(command, "list_commands", lambda _: [])(None)
        found |= {f"{name} {sub}": command.get_command(None, sub) for sub in subs} or {name: command}
    return found


def test_help_is_light_and_lists_all_commands() -> None:
    lines, loaded = run_of_main("--help")
    assert not loaded & HEAVY
    text = "\n".join(lines)
    assert all(f"  {name.split()[0]} " in text for name in commands())
    assert text.index("Many runs:") < text.index("  compare ")


def test_completion_is_light() -> None:
    found, loaded = completed("testbed re")
    assert found == ["replay", "restart", "resume", "reconnect", "report"]
    assert not loaded & HEAVY
    found, loaded = completed("testbed rules fed")
    assert found == sorted(name for name in RULES if name.startswith("fed"))
    assert not loaded & HEAVY


def test_completion_offers_runs_and_their_devices(tmp_path: Path) -> None:
    devices = {"pi-1": {"group": "pi"}, "pi-2": {"group": "pi"}, "far": {"group": "far"}}
    for run in ("alpha-1", "alpha-2", "beta-1"):
        (tmp_path / run / "logs").mkdir(parents=True)
        (tmp_path / run / "manifest.json").write_text(
            json.dumps({"devices": devices, "segments": ["pico"]})
        )
    (tmp_path / "beta-1" / "logs" / "aggregator.log").touch()
    given = f"--runs {tmp_path}"
    assert completed(f"testbed logs {given} al")[0] == ["alpha-2", "alpha-1"]
    assert completed(f"testbed export {tmp_path}/be")[0] == [f"{tmp_path}/beta-1"]
    assert completed(f"testbed kill {given} b p")[0] == ["pi", "pi-1", "pi-2"]
    assert completed(f"testbed disconnect {given} b p")[0] == ["pi", "pi-1", "pi-2", "pico"]
    assert completed(f"testbed logs {given} beta-1 a")[0] == ["aggregator"]
    assert completed(f"testbed kill {given} alpha p")[0] == []  # of which one?


def test_completion_offers_existing_names() -> None:
    assert app.keys_of("rules", "RULES")("") == list(RULES)
    assert app.keys_of("selection", "SELECTIONS")("") == list(SELECTIONS)
    assert app.keys_of("tasks", "TASKS")("") == list(TASKS)
    assert "raspberry-pi-4" in app.profiles("rasp")
    assert "lte" in app.profiles("")
    assert app.trace_formats("") == list(PUBLISHED_FORMATS)


def test_every_command_has_json_and_a_schema() -> None:
    having = {
        name
        for name, command in commands().items()
        if any("--json" in one.opts for one in command.params)
    }
    assert having == set(commands()) - WITHOUT_JSON
    assert having == set(OUTPUTS)


@pytest.mark.parametrize(
    "arguments",
    [
        "ps",
        "runs --runs RUNS",
        "down RUN --runs RUNS",
        "logs RUN",
        "logs RUN pi-1 --story",
        "validate TOPOLOGY",
        "plan TOPOLOGY --runtime virtual",
        "plan TOPOLOGY --runtime process --oversubscribe",
        "data TOPOLOGY",
        "evaluate RUN",
        "export RUN --model",
        "compare RUN",
        "report RUN --to RUNS/report.html",
        "export RUN --to RUNS/tables",
        "pack RUN --to RUNS/run.zip",
        "rules",
        "rules area",
        "selections oort",
        "tasks",
        "profiles",
        "doctor",
        "new rule some-rule",
        "new examples RUNS/copied",
    ],
)
def test_json_output_matches_its_schema(
    testbed: Testbed, ended: Path, arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RUNS": ended.parent, "RUN": ended, "TOPOLOGY": ended.parent / "topology.yaml"}
    words = arguments.split()
    given = [
        str(places[first]) + rest if first in places else word
        for word in words
        for first, slash, last in [word.partition("/")]
        for rest in [slash + last]
    ]
    said = testbed(*given, "--json")  # which compares it with the schema
    assert said.code == 0, said
    assert json.loads(said.out) or words[0] in ("ps", "down")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in virtual time, whose end `up --json` has told."""
    folder = tmp_path_factory.mktemp("ended")
    devices = [{"name": "pi", "count": 2, "cpu": 0.1, "timing": "1s"}]
    task = {"name": "digits-logreg", "local": {"steps": 1}}
    topology = write_topology(
        folder,
        task=task,
        devices=devices,
        stop={"updates": 6},
        virtual={"step_time": "1ms"},  # else it would be measured, for some seconds
    )
    command = [*TESTBED, "up", str(topology), "--runtime", "virtual", "--json", "--runs", str(folder)]
    up = subprocess.run(command, capture_output=True, text=True, check=True)
    told = check_output(["up"], up.stdout)
    assert (told["outcome"], told["verdict"], told["rule"]) == ("updates", "simulated", "fedbuff")
    assert (told["updates"], told["perplexity"]) == (6, None)
    (Path(told["directory"]) / "logs" / "broker.log").write_text("a line\n")
    return Path(told["directory"])


def test_a_schema_is_printed(testbed: Testbed) -> None:
    printed = json.loads(testbed("schema", "ps").out)
    assert printed["items"] == {"$ref": "#/$defs/LiveRun"}
    assert "controller" in printed["$defs"]["LiveRun"]["properties"]["components"]["description"]
    assert json.loads(testbed("schema", "images", "build").out)["title"] == "BuiltImages"
    said = testbed("schema", "watch")
    assert said.code == 2
    assert "images build" in said.err


@pytest.mark.parametrize("command", OUTPUTS)
def test_schema_names_no_value_as_python_does(command: str) -> None:
    assert not re.search(r"\b(None|NaN)\b", json.dumps(schema(command)))


def test_schema_has_inherited_fields_and_unknown_numbers() -> None:
    cost = schema("compare")["$defs"]["Cost"]
    assert set(cost["required"]) == {"mean", "low", "high", "count", "median", "above"}
    assert cost["properties"]["mean"]["description"] == "Mean; null if there is no value."
    assert {"type": "null"} in cost["properties"]["mean"]["anyOf"]
    assert cost["additionalProperties"] is False


def test_quiet_prints_only_the_result(testbed: Testbed) -> None:
    topology = TOPOLOGIES / "quickstart.yaml"
    loud, quiet = testbed("validate", topology), testbed("validate", "--quiet", topology)
    assert loud.out.splitlines()[0] == quiet.out.strip()
    assert "Next: " in loud.out
    assert "Next: " not in quiet.out


@pytest.mark.parametrize(
    ("taken", "done", "total", "said"),
    [
        (30.0, 3, 7, "about 40 s left"),
        (600.0, 5, 6, "about 2 min left"),
        (7200.0, 1, 3, "about 4.0 h left"),
        (1.0, 1, 60, ""),  # too early
        (100.0, 100, 101, ""),  # a second
        (100.0, 4, 4, ""),
        (5.0, 0, 4, ""),
    ],
)
def test_remaining_time_is_estimated(taken: float, done: int, total: int, said: str) -> None:
    assert console.time_left(taken, done, total) == said


def test_progress_is_reported_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of 110 MB that takes 100 s, with 10 MB present before."""
    now, told = 0.0, list[tuple[float, str]]()
    monkeypatch.setattr("testbed.console.time.monotonic", lambda: now)
    share = console.ProgressReporter(lambda line: told.append((now, line)), "Decoding a/b")
    size = console.ProgressReporter(lambda line: told.append((now, line)), "Fetching a/b", of_bytes=True)
    for second in range(101):
        now = float(second)
        share(second, 100)
        size(1e6 * (10 + second), 110e6, 10e6)
    assert [at for at, line in told if "Decoding" in line] == [2, 4, 8, 16, 32, 62, 92]
    assert told[:2] == [
        (2.0, "Decoding a/b: 2%, about 2 min left"),
        (2.0, "Fetching a/b: 12.0 of 110.0 MB at 1.0 MB/s, about 2 min left"),
    ]


def test_no_color_is_respected(testbed: Testbed, tmp_path: Path) -> None:
    """The same output has colours otherwise."""
    program = "from testbed import console; console.err().print('x', style='red')"
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    for more, shown in (({}, "\x1b[31mx\x1b[0m\n"), ({"NO_COLOR": "1"}, "x\n")):
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment | more
        )
        assert ended.stderr == shown


def test_narrow_terminal_keeps_figures_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=40)
    monkeypatch.setattr(console, "out", lambda: screen)
    monkeypatch.setattr(console, "verbosity", 0)
    row = {"run": "quickstart-2026", "rule": "fedbuff", "outcome": "time is up", "devices": "1,000"}
    console.show([row], spare=["devices", "rule"])
    headings = ["", "time s", "rounds", "MB up"]
    rows = [[name, "10.0 ± 22.8", "57 ± 136", "0.51 ± 1.21"] for name in ("area", "fedbuff", "fedavg")]
    console.show_numbers(headings, rows)
    assert isinstance(screen.file, io.StringIO)
    lines = [line.rstrip() for line in screen.file.getvalue().splitlines()]
    assert lines[:2] == ["run              rule     outcome", "quickstart-2026  fedbuff  time is up"]
    assert "too narrow: devices (--json has all)" in " ".join(lines[2:4])
    assert lines[-8:] == [
        "               area      fedbuff",
        "time s  10.0 ± 22.8  10.0 ± 22.8",
        "rounds     57 ± 136     57 ± 136",
        "MB up   0.51 ± 1.21  0.51 ± 1.21",
        "             fedavg",
        "time s  10.0 ± 22.8",
        "rounds     57 ± 136",
        "MB up   0.51 ± 1.21",
    ]
