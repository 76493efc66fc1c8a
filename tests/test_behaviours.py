"""What a rule may ask of its clients, in real processes and containers: the receive buffer, the send
buffer, interrupts, memory, assigned step sizes and gradients.

The task is a quadratic of one number, so that training costs next to nothing; where a device is to be
slow, `timing` makes it so.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from agents import events
from agents.config import BEGUN
from agents.wire import payloads
from testbed.host import docker_engine as docker_engine
from testbed.host import programs
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.process import runtime as process_runtime
from tests.running import (
    Finished,
    Testbed,
    interrupt,
    left_as_processes,
    run_to_its_end,
    started,
    until_printed,
)
from tests.waiting import eventually

Devices = list[dict[str, Any]]


def write(folder: Path, rule: dict[str, Any], devices: Devices, **more: Any) -> Path:
    """A topology of a quadratic whose device i has its least at 1 + 4i."""
    centers = [[1.0 + 4 * i] for i in range(len(devices))]
    task = {"name": "quadratic", "centers": centers, "local": {"steps": 1, "lr": 0.1}}
    task["local"] |= more.pop("local", {})
    fleet = [{"cpu": 1 / len(devices), **device} for device in devices]
    topology = {"name": "behaviour", "task": task, "rule": rule, "devices": fleet, **more}
    file = folder / "topology.yaml"
    file.write_text(yaml.safe_dump(topology))
    return file


def of(run: Finished, client: str) -> list[events.UpdateApplied]:
    return [u for u in run.updates if u.client == client]


def model(run: Finished) -> float:
    """The final model's only parameter."""
    vector, *_ = payloads.unpack((run.path / "models" / "final.safetensors").read_bytes())
    return float(vector[0])


@pytest.mark.timed
def test_broadcast_overwrites_the_receive_buffer(tmp_path: Path) -> None:
    devices: Devices = [
        {"name": "fast", "timing": "20ms"},
        {"name": "slow", "timing": "20ms", "speed": 0.1},
    ]
    rule = {"name": "defedavg_iid", "buffer_size": 1}
    topology = write(tmp_path, rule, devices, stop={"updates": 60})
    run = run_to_its_end(topology, "process")
    for name in ("fast", "slow"):
        sequences = [u.sequence for u in of(run, name)]
        assert sequences == list(range(1, len(sequences) + 1))  # all that was trained was sent
    slow = [u.base_version for u in of(run, "slow")]
    assert len(slow) > 2
    assert all(later > earlier + 1 for earlier, later in pairwise(slow))
    dispatched = {u.base_version: u.dispatched for u in of(run, "fast")}
    both = [u for u in of(run, "slow") if u.base_version in dispatched]
    assert both
    assert all(u.dispatched == dispatched[u.base_version] for u in both)


@pytest.mark.parametrize("send_buffer", ["hold", "overwrite"])
def test_update_waits_in_the_send_buffer_until_pulled(send_buffer: str, tmp_path: Path) -> None:
    rule = {"name": "defedavg_niid", "sample": 1, "send_buffer": send_buffer}
    devices = [{"name": name, "timing": "40ms"} for name in ("one", "other")]
    run = run_to_its_end(write(tmp_path, rule, devices, stop={"updates": 40}), "process")
    assert [u.applied_version for u in run.updates] == list(range(1, 41))
    gaps = [b.sequence - a.sequence for n in ("one", "other") for a, b in pairwise(of(run, n))]
    waited = max(u.sent - u.train_end for u in run.updates)
    if send_buffer == "overwrite":
        assert max(gaps) > 1
    else:
        assert max(gaps) == 1
        assert waited > 2 * 0.04  # it lay there while the other client was drawn again and again


@pytest.mark.parametrize(
    ("rule", "updates"),
    [
        ({"name": "favano", "period": "1s", "sample": 2}, 6),  # quick is starved no longer than that
        ({"name": "port", "min_updates": 1, "staleness_bound": 5}, 20),
    ],
    ids=["favano", "port"],
)
def test_interrupted_client_sends_the_steps_done(
    rule: dict[str, Any], updates: int, tmp_path: Path
) -> None:
    devices: Devices = [
        {"name": "quick", "timing": "30ms", "local": {"steps": 5}},
        {"name": "endless", "cpu": 0.3, "local": {"steps": 10**9}},
    ]
    run = run_to_its_end(
        write(tmp_path, rule, devices, local={"lr": 0.001}, stop={"updates": updates}), "process"
    )
    assert all(u.steps == 5 for u in of(run, "quick"))
    endless = of(run, "endless")
    assert len(endless) > 1
    assert all(0 < u.steps < 10**9 for u in endless)
    assert all(math.isfinite(u.loss) for u in endless)
    # Each time it begins anew, from a model that has its last work in it.
    assert all(b.base_version >= a.applied_version for a, b in pairwise(endless))


@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=pytest.mark.docker)])
def test_restarted_client_keeps_its_memory(
    runtime: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In AREA x + u is the mean of the y_i if each client continues from its own."""
    if runtime == "docker":
        request.getfixturevalue("built")
    devices = [
        {"name": "one", "cpu": 0.8, "timing": "40ms"},  # starts again under its limit
        {"name": "other", "cpu": 0.2, "timing": "40ms"},
    ]
    rule = {"name": "area", "every": 1}
    topology = write(tmp_path, rule, devices, local={"lr": 0.5}, stop={"after": "5min"})
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", runtime, "--runs", runs) as running:
        until_printed(running, "the run clock starts")
        eventually(lambda: len(of(Finished.only_one_in(runs), "one")) > 5)
        start_again = kill(runtime, runs, "one")
        eventually(lambda: states(runs) == ["offline"])
        start_again()
        eventually(lambda: states(runs) == ["offline", "joining", "ready"])
        before = len(of(Finished.only_one_in(runs), "one"))
        eventually(lambda: len(of(Finished.only_one_in(runs), "one")) > before + 30)
        _, output = interrupt(running)
        assert running.returncode == 130, output
    run = Finished.only_one_in(runs)
    mine = of(run, "one")
    assert [u.kind for u in mine] == ["model"] + ["residual"] * (len(mine) - 1)
    assert all(b.sequence > a.sequence for a, b in pairwise(mine))
    notes = [r.message for r in run.records if isinstance(r, events.Note)]
    [left] = [note for note in notes if "goodbye" in note]
    assert left.startswith("one left without a goodbye")
    assert model(run) == pytest.approx(3, abs=0.05)  # the mean of 1 and 5
    assert left_as_processes(run.path.name) == []


def test_training_lost_in_a_crash_is_repeated_with_the_next_duration(
    testbed: Testbed, tmp_path: Path
) -> None:
    """If the lost training's hour were repeated, the run would have one update at its end."""
    values = ["200ms", "1h", "200ms", "200ms", "200ms"]
    devices: Devices = [
        {"name": "one", "timing": {"distribution": "trace", "values": values}},
        {"name": "endless", "timing": "1h"},  # a run that all have left is over
    ]
    topology = write(tmp_path, {"name": "fedasync"}, devices, stop={"updates": 4, "after": "4min"})
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as running:
        until_printed(running, "the run clock starts")
        (run,) = runs.iterdir()
        begun = run / "state" / "clients" / "one" / BEGUN
        eventually(lambda: begun.exists() and begun.stat().st_size == 2)
        for action in ("kill", "restart"):
            assert testbed(action, run, "one").code == 0
        output, _ = running.communicate(timeout=270)
    assert running.returncode == 0, output
    assert [u.sequence for u in Finished.only_one_in(runs).updates] == [1, 2, 3, 4]


def states(runs: Path) -> list[str]:
    """Statuses of the clients, or their last wills, since the run clock started."""
    records = Finished.only_one_in(runs).records
    return [r.state for r in records if isinstance(r, events.ClientStatus)]


def kill(runtime: str, runs: Path, device: str) -> Callable[[], object]:
    """Kill the device as a crash would; what is returned starts it again, as it was."""
    (run,) = runs.iterdir()
    if runtime == "docker":
        container = f"testbed-{run.name}-{device}"
        in_docker("kill", container)
        return lambda: in_docker("start", container)
    (found,) = [
        info for info in process_runtime.find() if (info.run, info.component) == (run.name, device)
    ]
    environment = found.process.environ()
    found.process.kill()
    config = RunDirectory(run).config(device)
    with_own_parent = ["setsid", "--fork", *programs.command("agents.client.main", str(config))]
    return lambda: subprocess.run(with_own_parent, env=environment, check=True)


def in_docker(do: Literal["kill", "start"], container: str) -> None:
    with closing(docker_engine.connect()) as engine:
        getattr(engine.api, do)(container)


@pytest.mark.parametrize(
    ("rule", "local", "losses"),
    [
        # One client at 1 and 0 the start. α = 1/2, 1/3, 1/5, 1/7, 1/9, each applied to the model of
        # before the last aggregation: 1 − w is 1, 1, 1/2, 2/3, 2/5, 4/7, and the loss half its square.
        (
            {"name": "area", "every": 1, "step": "harmonic", "c": 1.0, "d": 2.0},
            {"lr": 0.9},
            [1 / 2, 1 / 2, 1 / 8, 2 / 9, 2 / 25, 8 / 49],
        ),
        # w ← w + γ(1 − w) with γ = 1/2: the local steps and their size do not matter.
        (
            {"name": "asysg", "gradients": 1, "server_lr": 0.5},
            {"lr": 0.9, "steps": 7},
            [1 / 2, 1 / 8, 1 / 32, 1 / 128],
        ),
    ],
    ids=["assigned step size", "gradient"],
)
def test_client_trains_as_the_rule_requests(
    rule: dict[str, Any], local: dict[str, Any], losses: list[float], tmp_path: Path
) -> None:
    """Told from the loss that it reports: that of the model it began with."""
    topology = write(tmp_path, rule, [{"name": "one"}], local=local, stop={"updates": len(losses)})
    run = run_to_its_end(topology, "process")
    assert [u.loss for u in run.updates] == pytest.approx(losses, rel=1e-5)
    assert {u.steps for u in run.updates} == {1}
