"""`testbed profiles --add` and `--script`: a measured device becomes a profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.errors import BadInputError
from testbed.plan import model_check
from testbed.speed import device_benchmark
from testbed.topology import profiles
from tests.running import Testbed

ENTRY = "devices:\n  new:\n    cores: 2\n    source: measured\n"


def test_benchmark_work_matches_its_counted_operations() -> None:
    """The program that is copied to a device has no counter: its amounts are constants."""
    for kind, amount in device_benchmark.WORK.items():
        counted = model_check.count_work(device_benchmark.piece(kind))
        assert getattr(counted, kind) == pytest.approx(amount, rel=1e-3), kind
    counted = model_check.count_work(device_benchmark.step())
    assert pytest.approx(counted.model_dump(), rel=1e-3) == device_benchmark.STEP
    assert min(device_benchmark.STEP.values()) > 0


def test_measured_entry_is_a_profile() -> None:
    found = {
        "model": 'Board "A": rev 1',
        "cores": 4,
        "memory": 4 * 2**30,
        "gflops": 11.87,
        "speeds": {"convolution": 28.9, "depthwise": 0.448, "matrix": 60.0, "memory": 0.446},
        "step": 0.5,
        "predicted": 0.45,
        "slower": 1.5,
        "busy": 2.4,
        "torch": "2.13.0+cpu",
    }
    device = profiles.parse(device_benchmark.profile_text("my-pi", found)).device("my-pi")
    assert device.training is not None
    assert (device.gflops, device.cores, device.memory) == (11.9, 4, 4 * 2**30)
    assert (device.training.memory, device.training.error) == (0.446, 0.1)
    assert device.description == 'Board "A": rev 1'
    busy, slower = device_benchmark.remarks(found)
    assert "Other programs used 2.4 cores" in busy
    assert "1.50 times as long at the end" in slower
    quiet = {**found, "slower": 1.05, "busy": 0.1}
    assert device_benchmark.remarks(quiet) == []
    disturbed = {**quiet, "predicted": 3.05}
    assert ["off by 510%" in each for each in device_benchmark.remarks(disturbed)] == [True]
    device = profiles.parse(device_benchmark.profile_text("my-pi", disturbed)).device("my-pi")
    assert device.training is not None
    assert device.training.error == 5.1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ENTRY),
        ("links:\n  a: {up: 1mbit}\n", "links:\n  a: {up: 1mbit}\n" + ENTRY),
        (
            "# mine\ndevices:\n    # old\n    old: {cores: 1}\n",
            "# mine\ndevices:\n    new:\n      cores: 2\n      source: measured\n"
            "    # old\n    old: {cores: 1}\n",
        ),
    ],
)
def test_device_is_added_and_other_entries_kept(before: str, after: str) -> None:
    assert profiles.append_devices(before, ENTRY) == after


def test_invalid_entry_is_refused_and_nothing_written(tmp_path: Path) -> None:
    to = tmp_path / "profiles.yaml"
    for text, told in (
        ("devices: {old: {cores: 1}}\n", "the devices are written in braces"),
        ("devices:\n  new: {cores: 1}\n", "already has a device new"),
    ):
        to.write_text(text)
        with pytest.raises(BadInputError, match=told):
            profiles.add_own_profile(to, ENTRY, "new.yaml")
        assert to.read_text() == text


def test_measuring_program_runs_alone_and_its_result_is_added(testbed: Testbed, tmp_path: Path) -> None:
    """It runs in a separate folder, without this project on its path."""
    assert testbed("profiles", "--script", tmp_path / "measure.py").code == 0
    done = subprocess.run(
        [sys.executable, "-I", "measure.py", "here", "--seconds", "0.01"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "here.yaml").read_text()
    to = tmp_path / "profiles.yaml"
    said = testbed("profiles", "--add", tmp_path / "here.yaml", "--to", to)
    assert said.code == 0, said.err
    device = profiles.load(tmp_path).device("here")
    assert device.training is not None
    assert device.training.matrix
    assert device.gflops
    again = testbed("profiles", "--add", tmp_path / "here.yaml", "--to", to)
    assert (again.code, "already has a device here" in again.err) == (2, True)
    nowhere = testbed("profiles", "--add", "here", "--to", tmp_path / "no" / "such.yaml")
    assert nowhere.code == 2  # before anything is measured
    assert f"there is no folder {tmp_path / 'no'}" in nowhere.err
    wrong = testbed("profiles", "--add", "No/Such", "--to", to)
    assert (wrong.code, "no such file" in wrong.err) == (2, True)
