"""Runs in virtual time, from the topology to the run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents import events
from analysis.load import Run, load
from testbed.errors import BadInputError, RunFailedError
from testbed.plan import costs
from testbed.plan.machines import Measurements
from testbed.run import live_runs, preparing, up
from testbed.run.optimum import compare_with_optimum
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.view import View
from tests.running import TOPOLOGIES, Testbed, interrupt, started

THEORY = TOPOLOGIES / "theory"


def _run(topology: Path, runs: Path, name: str = "run", data: Path | None = None) -> Run:
    options = Options(data_root=data)
    parsed, plan = preparing.plan_file(topology, options)
    directory = RunDirectory.create(runs, name)
    up.run(parsed, plan, directory, options, View())
    return load(directory.path)


def _topology(path: Path, **changes: Any) -> Path:
    """Two devices that learn the digits, 1 s and 3 s for an update, with what is to be different."""
    plain: dict[str, Any] = {
        "name": "t",
        "task": {"name": "digits-logreg", "local": {"steps": 4, "batch_size": 8, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 1},
        "devices": [{"name": "fast", "timing": "1s"}, {"name": "slow", "timing": "3s"}],
        "evaluate": {"every": "5s"},
        "stop": {"after": "12s"},
        "runtime": {"name": "virtual"},
    }
    file = path / "topology.yaml"
    file.write_text(yaml.safe_dump(plain | changes))
    return file


@pytest.mark.parametrize(
    ("name", "final", "within"),
    [
        ("alternating", 3.0196, 1e-4),
        ("async-identical", 1.419, 0.005),
        ("async-time-based", 2.0, 0.005),
        ("fedbuff-rates", 0.679, 0.01),
        ("fedbuff-inverse-sqrt", 0.43, 0.01),
        ("fedbuff-concurrency-one", 3.0, 0.2),  # random draws: the model never comes to rest
        ("defedavg-overwrite", 3.0, 0.2),
        ("defedavg-hold", 3.0, 0.2),
        ("area-every", 3.0, 1e-5),
        ("area-period", 3.0, 1e-5),
        ("area-random", 3.0, 1e-5),
        ("fedfix-is-fedavg", 3.0, 1e-5),
        ("fedbuff-is-fedavg", 3.0, 1e-5),
        ("fedbuff-immediate", 3.0, 1e-5),
        ("fedfa-param", 3.0, 1e-5),
    ],
)
def test_run_ends_where_theory_predicts(name: str, final: float, within: float, tmp_path: Path) -> None:
    ended = compare_with_optimum(_run(THEORY / f"{name}.yaml", tmp_path))
    assert ended is not None
    assert ended.final.tolist() == pytest.approx([final], abs=within)
    if name.startswith("area"):  # and not the mean by the rates
        assert ended.surrogate is not None
        assert ended.surrogate.tolist() == pytest.approx([final], abs=within)


def test_area_with_secure_sums_ends_at_its_optimum(tmp_path: Path) -> None:
    """Both are needed for a sum: at 500 s one crashes, while the first half of a sum waits."""
    topology = _topology(
        tmp_path,
        rule={"name": "area", "criterion": "every", "every": 2},
        privacy={"secure": {"colluding": 1, "needed": 2, "range": 8, "bits": 28}},
        task={"name": "quadratic", "centers": [[0], [6]], "local": {"steps": 1, "lr": 0.1}},
        scenario=[{"at": "500s", "crash": "slow", "restart_after": "5s"}],
        stop={"after": "1000s"},
    )
    run = _run(topology, tmp_path)
    assert run.rejected["reason"].str.startswith("its buffer is lost").sum() >= 2
    ended = compare_with_optimum(run)
    assert ended is not None
    assert ended.final.tolist() == pytest.approx([3.0], abs=1e-5)


@pytest.mark.parametrize(
    ("timing", "train_end"),
    [({}, 0.038), ({"timing": "100ms"}, 0.1), ({"timing": "35ms"}, 0.038)],
    ids=["computing", "timing", "less timing"],
)
def test_cost_of_secure_aggregation_on_a_device(
    timing: dict[str, str], train_end: float, tmp_path: Path
) -> None:
    """Half a core: 10 ms for a mask, then 20 ms for a step, 4 ms for the share that is sent and 4 ms for
    the one that comes meanwhile; both sums of shares are there 2 ms after the second update. What
    `timing` gives begins with the mask, when the model is there."""
    topology = _topology(
        tmp_path,
        rule={"name": "fedbuff", "buffer_size": 2},
        privacy={"secure": {"colluding": 1, "needed": 2}},
        task={"name": "digits-logreg", "local": {"steps": 1, "batch_size": 8}},
        devices=[{"name": "d", "count": 2, "cpu": 0.5} | timing],
        stop={"updates": 2},
        runtime={"name": "virtual"},
        virtual={
            "step_time": "10ms",
            "mask_time": "5ms",
            "share_time": "2ms",
            "answer_time": "1ms",
        },
    )
    first, second = _run(topology, tmp_path).updates.itertuples()
    for update in (first, second):
        assert (update.masking, update.train_start) == (0.01, 0.01)
        assert update.train_end == train_end
        assert update.applied == pytest.approx(train_end + 0.002)


def test_every_theory_topology_is_tested() -> None:
    marks = test_run_ends_where_theory_predicts.pytestmark  # type: ignore[attr-defined]
    tested = {case[0] for case in marks[0].args[1]}
    assert tested == {path.stem for path in THEORY.glob("*.yaml")}


def test_up_prints_the_optimum_and_the_distance_to_it(testbed: Testbed, tmp_path: Path) -> None:
    said = testbed("up", THEORY / "fedfix-is-fedavg.yaml", "--runs", tmp_path)
    assert said.code == 0, said.err
    assert "optimum           (3)" in said.out
    assert "from the optimum" in said.out


def test_same_topology_gives_the_same_bytes(tmp_path: Path) -> None:
    file = _topology(
        tmp_path,
        rule={"name": "fedbuff", "buffer_size": 2, "concurrency": 2},
        devices=[
            {
                "name": "d",
                "count": 5,
                "timing": {"distribution": "exponential", "mean": "1s"},
                "think": {"distribution": "uniform", "low": "0s", "high": "1s"},
                "link": {"up": "1mbit", "down": "2mbit", "rtt": "40ms"},
            }
        ],
    )
    first, second = (_run(file, tmp_path, name).path for name in ("one", "two"))
    texts = [(path / "events.jsonl").read_text() for path in (first, second)]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    for line in lines:
        assert line[0].pop("wall_clock") > 0
    assert lines[0] == lines[1]
    assert sum(line["event"] == "update" for line in lines[0]) > 10
    models = [(p / "models" / "final.safetensors").read_bytes() for p in (first, second)]
    assert models[0] == models[1]


def test_virtual_run_directory_has_the_usual_files(tmp_path: Path) -> None:
    run = _run(_topology(tmp_path), tmp_path)
    assert run.ended is not None
    assert (run.ended.reason, run.ended.at) == ("after", 12.0)
    assert run.updates["client"].value_counts().to_dict() == {"fast": 12, "slow": 4}
    slow = run.updates[run.updates["client"] == "slow"].iloc[0]
    assert slow[["dispatched", "train_start", "train_end", "applied"]].tolist() == [0, 0, 3, 3]
    assert slow["staleness"] == 3  # the fast one's three came first: device order within the instant
    assert run.evaluations["at"].tolist() == [0, 5, 10, 12]
    assert run.evaluations["accuracy"].iloc[-1] > 0.5
    assert sorted(path.name for path in (run.path / "models").iterdir()) == [
        "000000.safetensors",
        "final.safetensors",
    ]
    assert run.manifest["outcome"] == "after"
    assert not (run.path / "work").exists()


@pytest.mark.usefixtures("forked_programs")
def test_resolved_topology_reproduces_the_run(tmp_path: Path) -> None:
    """A measured step time is stored beside it."""
    devices = [{"name": "a", "cpu": 0.5}, {"name": "b", "cpu": 0.1}]
    first = _run(_topology(tmp_path, devices=devices, stop={"updates": 20}), tmp_path, "one")
    again = _run(first.path / "topology.yaml", tmp_path, "two")
    virtual = Measurements.read(first.path).virtual
    step = costs.step_time(virtual)
    assert step is not None
    assert step.sliced is not None
    assert virtual.packets is True
    assert first.updates.equals(again.updates)
    times = first.updates["train_end"] - first.updates["train_start"]
    training = times.groupby(first.updates["client"]).median()
    steps = int(first.updates["steps"].iloc[0])
    for device, share in (("a", 0.5), ("b", 0.1)):
        assert training[device] == pytest.approx((steps * step.at(share) + 0.003) / share, rel=1e-3)


def test_target_accuracy_ends_the_run_at_its_evaluation(tmp_path: Path) -> None:
    run = _run(_topology(tmp_path, stop={"target_accuracy": 0.5}, evaluate={"every": "1s"}), tmp_path)
    assert run.ended is not None
    assert run.ended.reason == "target_accuracy"
    assert run.evaluations["accuracy"].iloc[-1] >= 0.5
    assert run.ended.at == run.evaluations["at"].iloc[-1]


def test_interrupted_client_has_done_its_started_steps(tmp_path: Path) -> None:
    """FAVANO interrupts both at 1 s and each later second. A training of 4 steps in 1.6 s, interrupted
    after 1 s: the third step, begun at 0.8 s, is done to its end at 1.2 s."""
    file = _topology(
        tmp_path,
        rule={"name": "favano", "period": "1s", "sample": 2},
        devices=[{"name": "a", "timing": "1600ms"}, {"name": "b", "timing": "400ms"}],
        stop={"after": "1500ms"},
    )
    run = _run(file, tmp_path)
    done = {
        row["client"]: [row["steps"], row["train_end"], row["sent"]] for _, row in run.updates.iterrows()
    }
    assert done["a"] == pytest.approx([3, 1.2, 1.2])
    assert done["b"] == pytest.approx([4, 0.4, 1.0])  # it waited for the interrupt


def test_device_without_any_duration_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="time stands still"):
        _run(_topology(tmp_path, devices=[{"name": "a", "timing": "0s"}]), tmp_path)


def test_idle_population_costs_little(tmp_path: Path) -> None:
    devices = [{"name": "d", "count": 5000, "timing": "1s"}]
    task = {
        "name": "digits-logreg",
        "partition": {"scheme": "resampled", "samples": 20},
        "local": {"steps": 1},
    }
    rule = {"name": "fedbuff", "buffer_size": 2, "concurrency": 4}
    run = _run(_topology(tmp_path, devices=devices, task=task, rule=rule), tmp_path)
    assert len(run.updates) == 48  # four at once, for twelve seconds


def test_virtual_run_cannot_be_resumed(tmp_path: Path) -> None:
    file = _topology(tmp_path)
    parsed, plan = preparing.plan_file(file, Options())
    directory = RunDirectory.create(tmp_path, "run")
    with pytest.raises(BadInputError, match="same seed"):
        up.run(parsed, plan, directory, Options(resume=True), View())


def test_foreground_run_is_listed_and_ctrl_c_completes_its_records(tmp_path: Path) -> None:
    file = _topology(tmp_path, stop={"updates": 10_000_000}, evaluate={"every": "100s"})
    with started("up", file, "--runs", tmp_path / "runs") as running:
        assert running.stdout is not None
        while "accuracy" not in running.stdout.readline():
            pass
        (path,) = (tmp_path / "runs").iterdir()
        listed = {live.run: live for live in live_runs.find_all_runs(tmp_path / "runs")}
        assert listed[path.name] == LiveRun(path.name, "virtual", 0, path)
        interrupt(running)
        assert running.returncode == 130
    assert path.name not in {live.run for live in live_runs.find_all_runs(tmp_path / "runs")}
    records = list(events.read(path / "events.jsonl"))
    assert isinstance(records[-1], events.RunEnded)
    assert records[-1].reason == "interrupted"


@pytest.mark.parametrize(("durability", "kept"), [("update", False), ("recording", True)])
def test_inputs_are_recorded_if_requested(durability: str, kept: bool, tmp_path: Path) -> None:
    run = _run(_topology(tmp_path, durability=durability), tmp_path)
    assert (run.path / "inputs.bin").exists() == kept


def test_gradient_takes_the_time_of_one_step(tmp_path: Path) -> None:
    """20 ms of a core at a tenth of one."""
    run = _run(
        _topology(
            tmp_path,
            rule={"name": "asysg", "gradients": 1},
            devices=[{"name": "d", "count": 2, "cpu": 0.1}],
            runtime={"name": "virtual"},
            virtual={"step_time": "20ms"},
        ),
        tmp_path,
    )
    assert (run.updates["train_end"] - run.updates["train_start"]).tolist() == pytest.approx(
        [0.2] * len(run.updates)
    )
    assert len(run.updates) > 50


def test_virtual_run_imports_nothing_unneeded() -> None:
    code = (
        "import sys, testbed.api.launching, testbed.api.running, testbed.virtual.run; "
        "print({'docker', 'cryptography', 'paho', 'pandas'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
