"""Limits of memory that follow from profiles, and the notes on profiles in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.errors import BadInputError
from testbed.plan import Catalog, HostResources, Plan, plan
from testbed.run import preparing
from testbed.run.options import Options
from testbed.topology import Topology, load, parse, profiles
from testbed.topology.units import format_size
from tests.running import Testbed

GIB = 2**30
KNOWN = profiles.parse(
    "devices:\n"
    "  pi-5: {cores: 4, memory: 8GiB}\n"
    "  pi-3: {cores: 4, memory: 1GiB}\n"
    "  pi-1: {cores: 1, memory: 256MiB}\n"
    "  tiny: {cores: 1, memory: 128MiB}\n"
    "  silent: {cores: 2}\n"
)


def _topology(*devices: str) -> Topology:
    listed = "".join(f"  - {device}\n" for device in devices)
    return parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        f"stop: {{after: 1s}}\ndevices:\n{listed}"
    )


def _planned(topology: Topology, runtime: str, free: int = 32 * GIB) -> tuple[Plan, list[str]]:
    host = HostResources(cores=(0, 1, 2, 3), memory=free)
    made = plan(topology, runtime, host, Catalog(profiles=KNOWN), oversubscribe=True)
    return made, list(made.notes)


def _limits(topology: Topology, free: int | None) -> list[str]:
    made, _ = _planned(topology, "virtual" if free is None else "docker", free or 0)
    limits = {device.group: format_size(device.memory) for device in made.devices}
    return list(limits.values())


@pytest.mark.parametrize(
    ("free", "limits"),
    [
        (None, ["8GiB", "1GiB", "2GiB", "512MiB", "512MiB"]),  # in virtual time
        # In GiB; 0.5 are for broker and aggregator, and 3 are given to c, d and e.
        (20.5, ["8GiB", "1GiB", "2GiB", "512MiB", "512MiB"]),
        (12.5, ["4GiB", "1GiB", "2GiB", "512MiB", "512MiB"]),
        (6.0, ["853MiB", "853MiB", "2GiB", "512MiB", "512MiB"]),  # 2.5 for three, in whole MiB
        (1.0, ["512MiB", "512MiB", "2GiB", "512MiB", "512MiB"]),  # no less: the plan refuses it
    ],
)
def test_devices_without_a_limit_have_the_profiles_or_share_host_memory(
    free: float | None, limits: list[str]
) -> None:
    topology = _topology(
        "{name: a, count: 2, cpu: 0.1, profile: pi-5}",
        "{name: b, cpu: 0.1, profile: pi-3}",
        "{name: c, cpu: 0.1, profile: pi-5, memory: 2GiB}",
        "{name: d, cpu: 0.1, profile: silent, memory: 512MiB}",
        "{name: e, cpu: 0.1, memory: 512MiB}",
    )
    assert _limits(topology, None if free is None else int(free * GIB)) == limits


def test_limit_other_than_the_profiles_is_explained() -> None:
    topology = _topology(
        "{name: a, count: 2, cpu: 0.1, profile: pi-5}",
        "{name: b, cpu: 0.1, profile: silent}",
        "{name: c, cpu: 0.1, profile: unheard-of}",
        "{name: d, cpu: 0.1, profile: pi-3}",
    )
    made, notes = _planned(topology, "docker", int(10.5 * GIB))
    assert [device.memory for device in made.devices[:2]] == [4 * GIB, 4 * GIB]
    told = {note.partition(":")[0]: note for note in reversed(notes)}
    assert "4GiB of memory, not pi-5's 8GiB: this host has 10.5 GiB free" in told["a"]
    assert "512MiB of memory, the default: the profile silent has none" in told["b"]
    assert "512MiB of memory, the default: the profile unheard-of is unknown" in told["c"]
    assert "of memory" not in told["d"]


@pytest.mark.parametrize(
    ("free", "memory", "model", "most"),
    [
        (16 * GIB, "1GiB", 0, 14 * GIB),  # what two devices leave
        (16 * GIB, "7GiB", 0, 8 * GIB),  # half of it
        (3 * GIB, "512MiB", GIB // 4, 2.75 * GIB),  # held for it: 512 MiB and 7 + 2 models
    ],
)
def test_aggregator_gets_the_remaining_memory(free: int, memory: str, model: int, most: float) -> None:
    topology = _topology(f"{{name: a, count: 2, memory: {memory}, cpu: 0.1}}")
    found = plan(
        topology, "docker", HostResources((0, 1), free), Catalog(model=model), oversubscribe=True
    )
    assert found.aggregator_memory == most


def test_profile_cores_are_shown_as_cpu_and_threads() -> None:
    topology = _topology(
        "{name: a, cpu: 0.3, profile: pi-3}",
        "{name: b, cpu: 1.5, profile: pi-5}",
        "{name: c, cpu: 0.3, profile: pi-1, memory: 1GiB}",
    )
    _, notes = _planned(topology, "docker")
    assert notes[:2] == [
        "a: 0.3 cpu in 1 thread for the 4 cores of pi-3.",
        "b: 1.5 cpu in 2 threads for the 4 cores of pi-5.",
    ]
    assert "not emulated one by one" in notes[2]
    assert "GPU" in notes[3]
    assert len(notes) == 4


def test_low_memory_is_reported_with_figures() -> None:
    topology = _topology("{name: a, cpu: 0.1, profile: pi-1}", "{name: b, cpu: 0.1, memory: 383MiB}")
    _, notes = _planned(topology, "docker")
    assert [note.split(".")[0] for note in notes[:2]] == [
        "a: 256MiB of memory is tight",
        "b: 383MiB of memory is tight",
    ]
    assert "280 MiB" in notes[0]
    assert not any("tight" in note for note in _planned(topology, "process")[1])


def test_profile_with_too_little_memory_is_refused_if_enforced() -> None:
    topology = _topology("{name: a, cpu: 0.1, profile: tiny}")
    with pytest.raises(BadInputError) as refused:
        _planned(topology, "docker")
    assert "6:34: devices[0].profile: tiny has 128MiB of memory, too little for" in str(refused.value)
    assert "at least memory: 256MiB" in str(refused.value)
    for runtime in ("process", "virtual"):
        assert _planned(topology, runtime)[0].devices
    mended = _topology("{name: a, cpu: 0.1, profile: tiny, memory: 256MiB}")
    assert _planned(mended, "docker")[0].devices[0].memory == 256 * 2**20


def test_virtual_time_lists_ignored_profile_fields() -> None:
    made, notes = _planned(_topology("{name: a, cpu: 0.1, profile: pi-5}"), "virtual")
    assert made.devices[0].memory == 8 * GIB
    assert notes[0] == "In virtual time the cores and the memory of a profile change nothing."
    assert _planned(_topology("{name: a, cpu: 0.1}"), "virtual")[1] == []


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A topology beside a profile that has more memory than any host."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "profiles.yaml").write_text("devices:\n  giant: {cores: 64, memory: 1000000GiB}\n")
    path = tmp_path / "t.yaml"
    path.write_text(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "stop: {after: 1s}\ndevices: [{name: a, cpu: 0.1, profile: giant}]\n"
    )
    return path


def test_plan_shows_the_memory_notes(file: Path, testbed: Testbed) -> None:
    said = testbed("plan", file, "--runtime", "docker")
    assert "MiB of memory, not giant's 1000000GiB: this host has" in said.out
    assert "a: 0.1 cpu in 1 thread for the 64 cores of giant." in said.out
    programs = testbed("plan", file, "--runtime", "docker", "--json")
    assert json.loads(programs.out)[0]["memory"].endswith("MiB")
    assert "not giant's 1000000GiB" in programs.err
    local = testbed("plan", file, "--runtime", "process")
    assert "this runtime does not limit memory" in local.out
    assert "MiB" not in local.out


def test_run_records_requested_memory_not_free_memory(file: Path, tmp_path: Path) -> None:
    """A run that is resumed, and a sweep's cell, is the same when less memory is free."""
    topology, made = preparing.plan_file(file, Options("process"))
    assert topology.devices[0].memory is None
    assert made.devices[0].memory < 2**50
    again = tmp_path / "again.yaml"
    again.write_text(topology.to_yaml())
    assert load(again).devices == topology.devices


def test_profiles_list_what_is_emulated(testbed: Testbed) -> None:
    for arguments in (["profiles"], ["profiles", "raspberry-pi-4"]):
        assert "Not emulated: single cores" in testbed(*arguments).out
    assert "emulated" not in testbed("profiles", "lte").out


def test_plan_notes_evaluations_after_the_run() -> None:
    topology = _topology("{name: d, cpu: 0.1}")
    late = topology.evaluate.model_copy(update={"when": "after"})
    late_topology = topology.model_copy(update={"evaluate": late})
    assert not [note for note in _planned(topology, "docker")[1] if "evaluate" in note]
    assert [note for note in _planned(late_topology, "docker")[1] if "evaluate.when: after" in note]
    assert not _planned(late_topology, "virtual")[1]
