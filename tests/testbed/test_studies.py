"""`testbed sweep`, `agree`, `compare`, `report` and `export` as a user types them, mostly on runs in
virtual time; these are in this process but where a test is of the workers, which start slowly."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import comparison
from analysis.columns import COLUMNS
from testbed.plan import Plan
from testbed.plan.machines import Measurements
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import sweeping, worker
from testbed.topology import Topology
from tests.running import Testbed, children_running, interrupt, started, until_printed
from tests.waiting import eventually

BASE = """
name: base
task: {name: quadratic, centers: [[0], [1], [5]], local: {steps: 1, lr: 0.4}}
rule: {name: fedavg}
devices: [{name: pi, count: 3, timing: 1s}]
evaluate: {every: 1s}
stop: {after: 3s}
runtime: {name: virtual}
"""
ONE_JOB = ("--jobs", "1")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is in a folder of its own, with a topology."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def write_sweep(seeds: str, **more: str) -> None:
    extra = "".join(f"\n{key}: {value}" for key, value in more.items())
    Path("study.yaml").write_text(f"topology: base.yaml\ngrid: {{seed: {seeds}}}{extra}")


def runs_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and path.name != "sweep"}


def test_sweep_runs_missing_cells(testbed: Testbed) -> None:
    folder = Path("runs/study")
    write_sweep("[1, 2]")
    code, out, _ = testbed("sweep", "study.yaml")
    assert code == 0
    assert "2 of 2  fedavg, seed" in out
    # three rounds of w ← w + 0.4 × (2 − w): 0, 0.8, 1.28, 1.568; mean of ½(w − c)² over 0, 1 and 5
    assert re.search(r"fedavg +2 +2\.427$", out, re.MULTILINE)  # two seeds have no interval
    first = runs_in(folder)
    write_sweep("[1, 2, 3]")
    code, out, _ = testbed("sweep", "study.yaml")
    assert "2 of 3 runs done already" in out
    assert "1 of 1  fedavg, seed 3" in out
    assert "2.427 ± 0.000" in out
    assert len(first) == 2
    assert first < runs_in(folder)
    entries = json.loads((folder / "index.json").read_text())["cells"].values()
    assert {entry["run"] for entry in entries} == runs_in(folder)


def test_equal_variants_are_reported(testbed: Testbed) -> None:
    """The table has one row for both."""
    write_sweep(
        "[1, 2]", variants="{plain: {}, usual: {task.local.lr: 0.4}, slow: {task.local.lr: 0.1}}"
    )
    code, out, _ = testbed("sweep", "study.yaml", *ONE_JOB)
    assert code == 0
    assert out.count("usual is the same run as plain: it runs once, as plain") == 1
    assert "4 of 4  slow, seed 2" in out
    assert re.findall(r"^(plain|usual|slow) +(\d) +\d", out, re.MULTILINE) == [
        ("plain", "2"),
        ("slow", "2"),
    ]


def test_interrupted_run_is_repeated(testbed: Testbed) -> None:
    """As after a power failure: the index says that the run is running, and it is not."""
    write_sweep("[1]")
    testbed("sweep", "study.yaml")
    index = Path("runs/study/index.json")
    (before,) = runs_in(index.parent)
    index.write_text(index.read_text().replace('"outcome": "after"', '"outcome": null'))
    code, _, _ = testbed("sweep", "study.yaml")
    assert (code, len(runs_in(index.parent))) == (0, 1)
    assert before not in runs_in(index.parent)


def test_failed_cell_is_reported_and_the_others_continue(testbed: Testbed) -> None:
    Path("empty/ylecun/mnist").mkdir(parents=True)
    for split in ("train", "test"):
        Path(f"empty/ylecun/mnist/{split}-0.parquet").write_text("no parquet")
    Path("study.yaml").write_text(
        "topology: base.yaml\nvariants: {bad: {task: {name: mnist-logreg, local: {steps: 1}}}, good: {}}"
    )
    code, out, err = testbed("sweep", "study.yaml", "--data", "empty")
    assert code == 1
    assert "bad, seed 0: failed:" in out
    assert "good, seed 0: loss" in out
    assert "1 run failed" in err
    _, out, _ = testbed("sweep", "study.yaml", "--data", "empty")
    assert "1 of 2 runs done already" in out


def test_ctrl_c_keeps_only_finished_runs(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "study.yaml").write_text(
        "topology: base.yaml\nvariants: {short: {}, long: {stop: {updates: 100000000}}}"
    )
    runs = tmp_path / "runs"
    with started("sweep", tmp_path / "study.yaml", "--jobs", "2", "--runs", runs) as running:
        until_printed(running, "short, seed 0")
        folder = runs / "study"
        eventually(lambda: [run for run in folder.glob("*/events.jsonl") if _is_long(run.parent)])
        workers = children_running(running.pid, "testbed.sweeps.worker")
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=900)
    assert running.returncode == 130, output
    assert "Interrupted: the same command makes the remaining runs" in output
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    assert len(runs_in(folder)) == 1
    (entry,) = json.loads((folder / "index.json").read_text())["cells"].values()
    assert entry["cell"] == "short, seed 0"


def _is_long(path: Path) -> bool:
    topology = path / "topology.yaml"
    return topology.exists() and "100000000" in topology.read_text()


EMULATED = BASE.replace("timing: 1s", "cpu: 0.1").replace("name: virtual", "name: process")


def verdicts(monkeypatch: pytest.MonkeyPatch, found: Iterable[bool | BaseException | None]) -> None:
    """Have the sweep simulate its emulated runs, and judge one after the other as in `found`; an
    exception is raised at the end of its run."""
    remaining = iter(found)

    def execute(
        topology: Topology, plan: Plan, directory: RunDirectory, options: Options, report: Any
    ) -> worker.CellOutcome:
        if plan.traits.simulated:
            return worker.execute(topology, plan, directory, options, report)
        runtime = topology.runtime.model_copy(update={"name": "virtual"})
        virtual = topology.virtual.with_defaults([("step_time", 0.1)])
        timed = topology.model_copy(update={"runtime": runtime, "virtual": virtual})
        plan = preparing.plan_topology(timed, Options())
        result = worker.execute(timed, plan, directory, options, report)
        valid = next(remaining)
        if isinstance(valid, BaseException):
            raise valid
        reasons = ["it was busy"] if valid is False else []
        unjudged = ["its load"] if valid is None else []
        validity = {"valid": valid, "reasons": reasons, "unjudged": unjudged}
        directory.write_manifest(validity=validity)
        return replace(result, validity=validity)

    monkeypatch.setattr(sweeping, "execute", execute)
    Path("base.yaml").write_text(EMULATED)


def last_line(out: str) -> str:
    return out.splitlines()[-1]


def test_sweep_ends_with_the_verdicts(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, [True, False, None, True])
    write_sweep("[1, 2, 3, 4]", repeat_invalid="0")
    code, out, _ = testbed("sweep", "study.yaml")
    assert code == 0
    assert last_line(out).startswith("Verdicts: 2 valid, 1 not valid, 1 not judged · Next: ")
    assert "not valid: it was busy" in out
    assert "not judged: its load" in out
    code, again, _ = testbed("sweep", "study.yaml", "--strict")
    assert code == 1
    assert last_line(again) == last_line(out)
    code, rows, _ = testbed("sweep", "study.yaml", "--strict", "--json")
    assert code == 1
    assert json.loads(rows)["rows"][0]["not_judged"] == 1


def test_simulated_runs_have_no_verdict(testbed: Testbed) -> None:
    write_sweep("[1]")
    code, out, _ = testbed("sweep", "study.yaml", "--strict")
    assert code == 0
    assert last_line(out).startswith("Next: ")


def test_run_that_is_not_valid_is_repeated(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, [False, True, True])
    write_sweep("[1, 2]")
    folder = Path("runs/study")
    code, out, _ = testbed("sweep", "study.yaml", "--strict")
    assert code == 0
    assert "seed 1 is repeated, because its run is not valid: try 2 of at most 2" in out
    assert "3 of 3  fedavg, seed 1: loss" in out
    assert out.index("fedavg, seed 2 begins") < out.index("is repeated")  # after all the others
    heading, row = (line.split() for line in out.splitlines()[-3:-1])
    assert (heading[-1], row[-1]) == ("repeats", "1")
    assert last_line(out).startswith("Verdicts: 2 valid · ")
    entries = json.loads((folder / "index.json").read_text())["cells"].values()
    assert {entry["run"] for entry in entries} | {"earlier"} == runs_in(folder)
    (earlier,) = runs_in(folder / "earlier")
    assert RunDirectory(folder / "earlier" / earlier).read_manifest()["validity"]["valid"] is False
    _, table, _ = testbed("compare", "study", "--json")
    (compared,) = json.loads(table)["rows"]
    assert (compared["runs"], compared["valid"], compared["repeats"]) == (2, 2, 1)
    assert "begins" not in testbed("sweep", "study.yaml").out


def test_repetitions_are_bounded(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, [False] * 4)
    write_sweep("[1]", repeat_invalid="2")
    code, out, _ = testbed("sweep", "study.yaml")
    assert code == 0
    assert "try 3 of at most 3" in out
    assert last_line(out).startswith("Verdicts: 1 not valid · ")
    assert len(runs_in(Path("runs/study/earlier"))) == 2
    assert "begins" not in testbed("sweep", "study.yaml").out  # nor later
    write_sweep("[1]", repeat_invalid="3")
    assert "try 4 of at most 4" in testbed("sweep", "study.yaml").out


def test_unjudged_run_is_not_repeated(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, [False, None])
    write_sweep("[1]", repeat_invalid="2")
    code, out, _ = testbed("sweep", "study.yaml", "--strict")
    assert code == 0
    assert last_line(out).startswith("Verdicts: 1 not judged · ")


def test_failed_repetition_does_not_count(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts(monkeypatch, [False])
    write_sweep("[1]")
    with monkeypatch.context() as once:
        once.setattr(sweeping.Index, "must_repeat", lambda *_: False)
        testbed("sweep", "study.yaml")
    (first,) = runs_in(Path("runs/study"))
    failed = worker.CellOutcome.failure("no broker")
    monkeypatch.setattr(sweeping, "execute", lambda *_: failed)
    code, out, _ = testbed("sweep", "study.yaml")
    assert code == 0
    assert "failed: no broker" in out
    assert last_line(out).startswith("Verdicts: 1 not valid · ")
    assert runs_in(Path("runs/study")) == {first, "earlier"}
    assert "begins" not in testbed("sweep", "study.yaml").out


@pytest.mark.parametrize("killed", [False, True])
def test_interrupted_repetition_is_repeated(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """It is interrupted by Ctrl-C, or by the end of the process, which then cannot clean up."""
    verdicts(monkeypatch, [False, KeyboardInterrupt(), True])
    write_sweep("[1]")
    folder = Path("runs/study")
    with monkeypatch.context() as once:
        if killed:
            once.setattr(sweeping.Index, "drop", lambda *_: None)
        assert testbed("sweep", "study.yaml").code == 130
    assert len(runs_in(folder)) == 1 + killed
    code, out, _ = testbed("sweep", "study.yaml")
    assert code == 0
    assert "1 of 1 run done already" in out
    assert "try 2 of at most 2" in out
    assert last_line(out).startswith("Verdicts: 1 valid · ")
    (entry,) = json.loads((folder / "index.json").read_text())["cells"].values()
    assert runs_in(folder) == {entry["run"], "earlier"}
    assert (entry["tries"], "instead_of" in entry) == (2, False)
    assert len(runs_in(folder / "earlier")) == 1


@pytest.mark.parametrize(
    ("privacy", "jobs"), [("", "1"), ("privacy: {secure: {colluding: 1, needed: 3}}\n", "2")]
)
def test_measured_values_are_shared_by_all_cells(testbed: Testbed, privacy: str, jobs: str) -> None:
    Path("base.yaml").write_text(
        "name: base\ntask: {name: digits-logreg, local: {steps: 2}}\n"
        "rule: {name: fedbuff, buffer_size: 4}\ndevices: [{name: pi, count: 4, cpu: 0.2}]\n"
        f"{privacy}stop: {{updates: 4}}\nruntime: {{name: virtual}}\n"
    )
    write_sweep("[1, 2]")
    code, _, _ = testbed("sweep", "study.yaml", "--jobs", jobs)
    files = Path("runs/study").glob("*/measured.yaml")
    first, second = (Measurements.read(path.parent).virtual for path in files)
    assert code == 0
    assert first == second
    assert None not in (first.step_time, first.sliced_step_time)
    assert first.update_time == 0.003
    assert (first.mask_time is None) == (not privacy)


def test_second_sweep_in_a_folder_is_refused(testbed: Testbed) -> None:
    write_sweep("[1]")
    with sweeping._sweep_lock(Path("runs/study")):
        code, _, err = testbed("sweep", "study.yaml")
    assert code == 2
    assert "another sweep runs in runs/study" in err


def test_sweep_is_compared_reported_and_exported(testbed: Testbed) -> None:
    write_sweep("[1, 2]")
    testbed("sweep", "study.yaml", *ONE_JOB)
    code, out, _ = testbed("compare", "study", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["target"] is None
    kept = Path("runs/study/sweep/sweep.yaml")
    kept.write_text(kept.read_text() + "target: 35%\n")
    assert json.loads(testbed("compare", "study", "--json").out)["target"] == 0.35
    assert json.loads(testbed("compare", "study", "--json", "--target", "20%").out)["target"] == 0.2
    before = kept.read_text()
    kept.write_text(before.replace("35%", "much"))
    assert testbed("compare", "study").code == 2
    kept.write_text(before.replace("target: 35%\n", ""))
    (row,) = told["rows"]
    assert row["loss"]["mean"] == pytest.approx(2.4266, abs=1e-3)
    assert row["time"]["mean"] is None
    files = ("--figure", "story.png", "--table", "study.tex", "--table", "study.csv")
    code, out, _ = testbed("compare", "runs/study", *files)
    assert code == 0
    assert "study.tex: written" in out
    code, _, err = testbed("compare", "study", "--baseline", "fedprox")
    assert (code, "baseline: found 'fedprox', expected one of fedavg" in err) == (2, True)
    assert r"\begin{tabular}{lrr}" in Path("study.tex").read_text()
    assert Path("study.csv").read_text().startswith("name,")
    assert Path("story.png").read_bytes().startswith(b"\x89PNG")
    run = min(runs_in(Path("runs/study")))
    code, out, _ = testbed("report", f"runs/study/{run}", "--to", "page.html")
    assert code == 0
    assert run in Path("page.html").read_text()
    code, out, _ = testbed("export", f"runs/study/{run}", "--format", "csv", "--to", "tables")
    assert code == 0
    assert Path("tables/updates.csv").read_text().count("\n") == 10  # three rounds of three, a heading
    written = {path.stem for path in Path("tables").iterdir()}
    assert written == COLUMNS.keys() - {"runs"}
    assert out == f'tables: {len(written)} tables\nNext: pandas.read_csv("tables/updates.csv")\n'


ACCURATE = """
name: base
task: {name: digits-logreg, local: {steps: 5, lr: 0.1}}
rule: {name: fedavg}
devices: [{name: fast, cpu: 0.3, timing: 200ms}, {name: slow, cpu: 0.1, timing: 600ms}]
evaluate: {every: 250ms}
stop: {after: 3s}
runtime: {name: docker}
virtual: {step_time: 1ms}
"""
VARIANTS = '{rounds: {}, endless: {"devices[1].timing": 30s}}'
"""Variants, of which the second ends no round."""


@pytest.mark.timed
def test_agree_compares_emulation_with_virtual_time(testbed: Testbed) -> None:
    Path("base.yaml").write_text(ACCURATE)
    Path("study.yaml").write_text(
        f"topology: base.yaml\nvariants: {VARIANTS}\ntarget: 30%\nrepeat_invalid: 0"
    )
    code, out, err = testbed("agree", "study.yaml", *ONE_JOB, "--runtime", "process")
    assert code == 0, out + err
    _, emulated = out.split("study.yaml: 2 runs (process)")
    told = re.findall(r"^(?: +\d of 2  )?(\w+), seed 0( begins|: accuracy)", emulated, re.MULTILINE)
    one_by_one = [(name, what) for name in ("rounds", "endless") for what in (" begins", ": accuracy")]
    assert told == one_by_one
    assert "Mean time to a test accuracy of 30%" in out
    assert re.search(r"rounds +\d\.\d +\d\.\d +1 +1\n", out)
    assert re.search(r"endless +– +– +2 +2\n", out)
    assert "Kendall's tau-b: 1.00 (no interval: it needs several seeds" in out
    assert "No two configurations swap." in out
    verdicts, _, _ = last_line(out).partition(" · ")
    assert verdicts.startswith("Verdicts: ")
    assert sum(map(int, re.findall(r"\d+", verdicts))) == 2
    assert len(runs_in(Path("runs/study"))) == 4
    code, out, _ = testbed("agree", "study.yaml", *ONE_JOB, "--runtime", "process", "--json")
    assert code == 0  # and nothing runs again
    found = json.loads(out)
    (by_time,) = found["rankings"].values()
    assert (found["target"], found["runtime"]) == (0.3, "process")
    assert (by_time["tau"], by_time["low"]) == (1.0, None)
    first, last = by_time["configurations"]
    assert min(first["predicted"], first["measured"]) > 0
    assert (last["name"], last["predicted"], last["predicted_rank"]) == ("endless", None, 2)
    assert sum(found["verdicts"].values()) == 2
    assert len(runs_in(Path("runs/study"))) == 4


def test_interrupted_agree_continues_with_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(ACCURATE.replace("after: 3s", "updates: 100000000"))
    (tmp_path / "study.yaml").write_text(f"topology: base.yaml\nvariants: {VARIANTS}")
    with started("agree", tmp_path / "study.yaml", "--runs", tmp_path / "runs") as running:
        eventually(lambda: [*tmp_path.glob("runs/*/*/events.jsonl")])
        _, output = interrupt(running)
    assert running.returncode == 130, output
    assert "Interrupted: the same command makes the remaining runs" in output


def test_agree_uses_all_seeds(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is the highest accuracy reached by all, and a run that is not valid is reported."""
    verdicts(monkeypatch, [True, True, True, False])
    Path("base.yaml").write_text(ACCURATE)
    Path("study.yaml").write_text(
        'topology: base.yaml\nvariants: {slow: {"devices[1].timing": 1s}, fast: {}}\n'
        "grid: {seed: [1, 2]}\nrepeat_invalid: 0"
    )
    code, out, err = testbed("agree", "study.yaml", *ONE_JOB, "--runtime", "process")
    assert code == 0, out + err
    assert re.search(r"Mean time to a test accuracy of \d\d%:\n", out)
    assert re.search(r"fast .* 1 +1\nslow .* 2 +2\n", out)
    assert "Kendall's tau-b: 1.00 (95% interval 1.00 to 1.00, bootstrap over seeds)" in out
    assert last_line(out).startswith("Verdicts: 3 valid, 1 not valid · Next: testbed report runs/study")
    _, out, _ = testbed("compare", "study")
    assert re.search(r"accuracy of \d\d%, the highest that all runs reached \(compare --target", out)
    _, out, _ = testbed("compare", "study", "--target", "20%")
    assert "Needed to reach a test accuracy of 20%; times are interpolated" in out
    assert "±" not in out  # two seeds have no interval


@pytest.mark.parametrize(
    ("variants", "runtime", "told"),
    [
        (VARIANTS, "virtual", "--runtime virtual: expected auto, docker, swarm or process"),
        (VARIANTS, "vagrant", "no runtime is called 'vagrant'"),
        ("{one: {}}", "process", "study.yaml has only the configuration one,"),
        ("{a: {}, b: {devices: []}}", "process", "study.yaml:2:"),
        (
            "{a: {}, b: {task: {name: quadratic, centers: [[0], [1]], local: {steps: 1}}}}",
            "process",
            "study.yaml has several tasks",
        ),
        (
            "{a: {task: {name: quadratic, centers: [[0], [1]], local: {steps: 1}}},"
            " b: {task: {name: quadratic, centers: [[0], [2]], local: {steps: 1}}}}",
            "process",
            "no run has a test accuracy",
        ),
    ],
)
def test_sweeps_that_cannot_be_ranked_are_refused(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, variants: str, runtime: str, told: str
) -> None:
    verdicts(monkeypatch, [True] * 4)
    Path("base.yaml").write_text(ACCURATE)
    Path("study.yaml").write_text(f"topology: base.yaml\nvariants: {variants}\ngrid: {{seed: [1]}}")
    code, out, err = testbed("agree", "study.yaml", *ONE_JOB, "--runtime", runtime)
    assert code == 2
    assert told in err
    assert "Traceback" not in out + err
    assert "begins" not in out


def test_runs_without_a_quality_cannot_be_ranked(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "TARGETS", (1.0,))
    verdicts(monkeypatch, [True] * 2)
    Path("base.yaml").write_text(ACCURATE)
    Path("study.yaml").write_text(f"topology: base.yaml\nvariants: {VARIANTS}")
    code, _, err = testbed("agree", "study.yaml", *ONE_JOB, "--runtime", "process")
    assert code == 2
    assert "no run reached an accuracy of 100%: add a `target` below it" in err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("topology.yaml", "name: [unclosed"),
        ("topology.yaml", "- name"),
        ("fidelity.json", "{}"),
        ("fidelity.json", '{"devices": {"pi": {"cpu": {}}}}'),
        ("manifest.json", '{"format": 1, "outcome": "after", "devices": ["pi"]}'),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report", "export"])
def test_damaged_run_is_reported_with_its_file(
    testbed: Testbed, command: str, file: str, text: str
) -> None:
    run = Path("runs/broken")
    run.mkdir(parents=True)
    (run / "manifest.json").write_text('{"format": 1, "outcome": "after"}')
    (run / file).write_text(text)
    code, out, err = testbed(command, "runs/broken")
    assert code == 2
    assert f"runs/broken/{file}: " in err.replace("\n", "")
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sweep", "no-such.yaml"], "no-such.yaml"),
        (["sweep", "base.yaml"], "this is a topology, not a sweep"),
        (["sweep", "study.yaml", "--figure", "story.gif"], ".png, .pdf or .svg"),
        (["sweep", "study.yaml", "--figure", "no-such/story.png"], "there is no folder no-such"),
        (["sweep", "study.yaml", "--jobs", "0"], "--jobs"),
        (["sweep", "study.yaml", "--runs", "base.yaml"], "--runs"),
        (["compare"], "RUN"),
        (["compare", "no-such-run"], "no-such-run"),
        (["compare", "broken", "--target", "much"], "--target much"),
        (["compare", "runs/broken"], "cannot be read as a run"),
        (["compare", "broken", "--table", "out.xls"], ".csv, .md or .tex"),
        (["compare", "broken", "--chart", "accuracy"], "--chart needs --figure"),
        (["compare", "broken", "--figure", "a.pdf", "--chart", "none"], "--chart none: expected one of"),
        (["report", "no-such-run"], "no-such-run"),
        (["export", "no-such-run"], "no-such-run"),
        (["export", "runs/broken", "--format", "xml"], "--format"),
    ],
)
def test_bad_input_exits_with_2_and_names_the_place(
    testbed: Testbed, arguments: list[str], told: str
) -> None:
    write_sweep("[1]")
    Path("runs/broken").mkdir(parents=True)
    Path("runs/broken/manifest.json").write_text('{"format": 1}')
    Path("runs/broken/events.jsonl").write_text("no record\n")
    code, out, err = testbed(*arguments)
    assert code == 2
    assert told in err
    assert "Traceback" not in out + err
