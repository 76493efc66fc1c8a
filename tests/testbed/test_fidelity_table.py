"""Fidelity figures as shown to people and to programs."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from testbed.fidelity import table as fidelity_table
from testbed.fidelity.figures import Carried, DeviceFidelity, Fidelity, Figure


def device(
    name: str,
    group: str = "pis",
    *,
    measured: float = 20.0,
    demand: Figure = Figure(0.25),  # noqa: B008
    wanted: float = 0.25,
    **figures: Figure,
) -> DeviceFidelity:
    every = dict.fromkeys(("cpu", "up", "down", "rtt", "jitter", "loss"), Figure()) | figures
    return DeviceFidelity(
        name,
        group,
        every,
        measured=measured,
        demand=demand,
        wanted=wanted,
        present=30.0,
        observed=30.0,
        used=0.125,
        probes=1,
    )


def test_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not whole would have every command refuse the run."""

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        Fidelity(()).save(tmp_path / "fidelity.json")
    assert list(tmp_path.iterdir()) == []


def test_fidelity_json_format(tmp_path: Path) -> None:
    found = Fidelity((device("pi-1", cpu=Figure(0.25, 0.24), up=Figure(5e6, None)),))
    found.save(tmp_path / "fidelity.json")
    nothing = {"asked": None, "got": None, "error": None}
    assert json.loads((tmp_path / "fidelity.json").read_text()) == {
        "format": 1,
        "devices": {
            "pi-1": {
                "group": "pis",
                "cpu": {
                    "asked": 0.25,
                    "got": 0.24,
                    "error": -4.0,
                    "measured": 20.0,
                    "used": 0.125,
                    "demand": None,
                    "wanted": 0.25,
                },
                "up": {"asked": 5e6, "got": None, "error": None},
                **dict.fromkeys(("down", "rtt", "jitter", "loss"), nothing),
                "probes": 1,
            }
        },
    }


def shown(fidelity: Fidelity) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(fidelity_table.render(fidelity))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_tables_show_requested_and_measured_values() -> None:
    lines = shown(
        Fidelity((
            device("fast", cpu=Figure(0.25, 0.249), rtt=Figure(0.06, 0.0606)),
            device("slow", cpu=Figure(0.1, None), measured=0.0, up=Figure(5e6, 4.8e6)),
            device("waits", cpu=Figure(0.1), measured=0.0, demand=Figure(0.1, 0.8), wanted=7.0),
            device("starved", cpu=Figure(0.1), measured=0.0, demand=Figure(0.1, 0.05), wanted=7.0),
            device("a-device-of-a-very-long-name", cpu=Figure(1.5, 1.5), up=Figure(250e6, None)),
        ))
    )  # fmt: skip
    assert lines == [
        "",
        "device             cpu          got   error  measured   used",
        "fast              0.25        0.249   -0.4%      20 s  0.125",
        "slow               0.1  hardly used       –       0 s  0.125",
        "waits              0.1       enough       –       7 s  0.125",
        "starved            0.1         0.05  -50.0%       7 s  0.125",
        "a-devic…ong-name   1.5          1.5   +0.0%      20 s  0.125",
        "",
        "device            up Mbit/s  got  error",
        "fast                      –    –      –",
        "slow                      5  4.8  -4.0%",
        "waits                     –    –      –",
        "starved                   –    –      –",
        "a-devic…ong-name        250    –      –",
        "",
        "device            rtt ms   got  error",
        "fast                  60  60.6  +1.0%",
        "slow                   –     –      –",
        "waits                  –     –      –",
        "starved                –     –      –",
        "a-devic…ong-name       –     –      –",
        "",
        "CPU: at worst 50.0% less than requested (starved); links: 4.0% less (slow, up)",
    ]


def test_many_devices_are_shown_by_group_with_the_worst() -> None:
    pis = [device(f"pi-{k}", cpu=Figure(0.25, 0.25 - k / 1000)) for k in range(20)]
    worst_link = device("nano-1", "nanos", cpu=Figure(0.1, 0.1), up=Figure(1e6, 1.1e6))
    lines = shown(Fidelity((*pis, worst_link, device("nano-2", "nanos", cpu=Figure(0.1, None)))))
    assert lines == [
        "",
        "device     cpu    got  error  measured   used",
        "pis ×20   0.25  0.231  -7.6%      20 s  0.125",
        "nanos ×2   0.1    0.1  +0.0%      20 s  0.125",
        "",
        "device    up Mbit/s  got   error",
        "pis ×20           –    –       –",
        "nanos ×2          1  1.1  +10.0%",
        "",
        "CPU: at worst 7.6% less than requested (pi-19); links: 10.0% more (nano-1, up)",
    ]


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (device("pi", cpu=Figure(0.25)), "CPU: no device was busy long enough to be judged"),
        (
            device("pi", measured=2.0, cpu=Figure(0.25, 0.1), up=Figure(1e6)),
            "CPU: no device was busy long enough to be judged; links: not measured",
        ),
        (
            device("pi", cpu=Figure(0.25, 0.5), rtt=Figure(0.01, 0.011), loss=Figure(0.1, 0.2)),
            "CPU: at worst 100.0% more than requested (pi); links: no error beyond chance",
        ),
    ],
)
def test_summary_line_names_what_was_not_measured(one: DeviceFidelity, line: str) -> None:
    assert fidelity_table.summary(Fidelity((one,))) == line


def test_share_of_a_few_packets_is_not_shown() -> None:
    shares = {"slow": Carried(12.4, 0.979), "brief": Carried(0.04, 1.047), "idle": Carried(0.0, None)}
    devices = (replace(device(name), carried={"up": one}) for name, one in shares.items())
    text = io.StringIO()
    Console(file=text, width=100).print(fidelity_table.render(Fidelity(tuple(devices))))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert [line for line in lines if len(line) == 3 and line[0] in shares] == [
        ["slow", "97.9%", "12.4"],
        ["brief", "–", "0.0"],
        ["idle", "–", "–"],
    ]


def test_devices_on_several_nodes_are_grouped_by_node() -> None:
    """With many devices a row is a group of one node."""
    cpu = Figure(0.25, 0.24)
    two = [replace(device(f"pi-{k}", cpu=cpu), node=f"vm-{k % 2}") for k in range(2)]
    text = io.StringIO()
    Console(file=text, width=100).print(fidelity_table.render(Fidelity(tuple(two))))
    lines = text.getvalue().splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("device", "pi-"))] == [
        "node",
        "vm-0",
        "vm-1",
    ]
    many = [replace(device(f"pi-{k}", cpu=cpu), node=f"vm-{k % 2}") for k in range(30)]
    rows = fidelity_table.rows(Fidelity(tuple(many)))
    assert [(row.device, row.node) for row in rows] == [("pis ×15", "vm-0"), ("pis ×15", "vm-1")]
    assert Fidelity(tuple(two)).as_dict()["devices"]["pi-1"]["node"] == "vm-1"
