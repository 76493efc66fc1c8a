"""Limits of devices' containers in a whole run: read back from the kernel, changed from outside, met."""

from __future__ import annotations

from typing import Any

import docker
import pytest

from agents import events
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL
from tests.running import Finished, interrupt, left_in_docker, started, until_printed, write_topology
from tests.waiting import eventually

pytestmark = pytest.mark.docker

MIB = 2**20
GREEDY = """
import subprocess
import sys
from dataclasses import dataclass

import torch
from agents.tasks.logreg import DigitsLogreg

kept = []

@dataclass(frozen=True)
class Greedy(DigitsLogreg):
    \"\"\"Its third step starts a process that takes 400 MiB, its sixth one takes 300 MiB.\"\"\"

    def loss(self, outputs, y):
        if outputs.requires_grad:  # it trains
            kept.append(None)
            if len(kept) == 3:
                subprocess.run([sys.executable, "-c", "b'x' * (400 * 2**20)"])
            if len(kept) == 6:
                kept.append(torch.ones(75 * 2**20))
        return super().loss(outputs, y)
"""


@pytest.fixture(scope="module")
def limited(
    engine: docker.DockerClient, built: object, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """Run in which `small` has too little memory, `parent` too little for the process that its client
    starts, and `other` is given more from outside."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "code").mkdir()
    (folder / "code" / "greedy.py").write_text(GREEDY)
    enough = {"cpu": 0.1, "timing": "300ms", "memory": "1GiB"}
    topology = write_topology(
        folder,
        code="code",
        task={"name": "greedy:Greedy", "local": {"steps": 2, "batch_size": 32, "lr": 0.1}},
        rule={"name": "fedasync"},
        devices=[
            {"name": "small", "cpu": 0.3, "timing": "300ms", "memory": "400MiB"},
            {"name": "parent", "cpu": 0.2, "timing": "300ms", "memory": "500MiB"},
            *({"name": name, **enough} for name in ("kept", "set", "other")),
        ],
        scenario=[{"at": "2s", "set": "set", "cpu": 0.2}],
        evaluate={"every": "5s"},
        stop={"after": "10min"},
    )
    runs = folder / "runs"
    with started("up", topology, "--runtime", "docker", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        labels = [f"{RUN_LABEL}={run.name}", f"{COMPONENT_LABEL}=other"]
        (other,) = engine.containers.list(filters={"label": labels})
        eventually(lambda: last_limits(Finished.only_one_in(runs), "other"))
        other.update(mem_limit=1500 * MIB, memswap_limit=1600 * MIB)
        eventually(lambda: has_happened(Finished.only_one_in(runs)))
        _, output = interrupt(up)
    assert up.returncode == 130, output
    return Finished.only_one_in(runs)


def has_happened(run: Finished) -> bool:
    """Whether both changes are read back, and `kept` has outlived `small`."""
    changed, wrong = last_limits(run, "set"), last_limits(run, "other")
    if not changed or 5 * changed["quota"] != changed["period"] or wrong["memory"] != 1500 * MIB:
        return False
    went_on = all(len(run.of_group(name)) > 6 for name in ("kept", "parent"))
    return went_on and all(killed(run, name) for name in ("small", "parent"))


def killed(run: Finished, device: str) -> list[str]:
    """Notes on a device of which the kernel kills a process."""
    notes = [record.message for record in run.records if isinstance(record, events.Note)]
    return [note for note in notes if note.startswith(device)]


def last_limits(run: Finished, device: str) -> dict[str, Any]:
    """Limits of the device that were read back last; empty for none."""
    limits = [line["limits"] for line in run.telemetry if "limits" in line and line["device"] == device]
    return dict(limits[-1]) if limits else {}


def test_limits_are_read_back_and_outside_changes_make_the_run_not_valid(limited: Finished) -> None:
    kept, changed, wrong = (last_limits(limited, name) for name in ("kept", "set", "other"))
    assert (kept["quota"], kept["period"], kept["memory"]) == (5_000, 50_000, 1024 * MIB)
    assert kept.get("swap", 0) == 0
    assert changed["quota"] / changed["period"] == pytest.approx(0.2)
    assert wrong["memory"] == 1500 * MIB
    (reason,) = (r for r in limited.manifest["validity"]["reasons"] if "other limits" in r)
    assert reason.startswith(
        "the kernel has other limits for other: its memory limit is 1572864000 bytes"
    )
    assert "(and" not in reason


def test_device_killed_for_lack_of_memory_is_reported_as_such(limited: Finished) -> None:
    """Others continue: one that has enough memory, and one of which only a child of the client was
    killed."""
    told = "out of memory: its client was killed, because it needed more than the device's 400 MiB"
    assert any(told in note for note in killed(limited, "small"))
    (of_child,) = killed(limited, "parent")
    assert "out of memory: a process that its client had started was killed, because they" in of_child
    assert len(limited.of_group("parent")) > 6
    notes = [record.message for record in limited.records if isinstance(record, events.Note)]
    assert not [note for note in notes if note.startswith("kept")]
    assert len(limited.of_group("small")) < 6 < len(limited.of_group("kept"))


def test_nothing_is_left_of_a_run_with_changed_limits(
    limited: Finished, engine: docker.DockerClient
) -> None:
    assert left_in_docker(engine, limited.path.name) == []
