"""Control groups of a run, in folders like the kernel's."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from testbed.errors import HostError
from testbed.host import kernel
from testbed.runtimes.docker import executor

RUN = "demo-20261122-1"


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hierarchies of v1 (cpu and cpuacct apart) and v2, with the two groups of a run each."""
    for root in ("cpu", "cpuacct", "unified"):
        for part in ("devices", "infrastructure"):
            (tmp_path / root / kernel.cgroup_parent(RUN, part, "cgroupfs").lstrip("/")).mkdir(
                parents=True
            )
        (tmp_path / root / "testbed-other-devices").mkdir()
    lines = [f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0", f"cgroup {tmp_path}/cpuacct cgroup rw 0 0"]
    lines += [f"cgroup2 {tmp_path}/unified cgroup2 rw 0 0", "proc /proc proc rw 0 0"]
    file = tmp_path / "mounts"
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(kernel.cgroup_folders, "__kwdefaults__", {"mounts": file})
    return tmp_path


def test_parent_group_is_named_for_cgroupfs_and_systemd() -> None:
    assert kernel.cgroup_parent(RUN, "devices", "cgroupfs") == "/testbed-demo-20261122-1-devices"
    assert kernel.cgroup_parent(RUN, "devices", "systemd") == "testbed_demo_20261122_1_devices.slice"


def test_groups_of_a_run_are_found_in_every_hierarchy(mounts: Path) -> None:
    slices = mounts / "unified" / kernel.cgroup_parent(RUN, "devices", "systemd")
    slices.mkdir()
    found = kernel.cgroup_folders(RUN, "devices")
    assert len(found) == 4
    assert slices in found
    assert len(kernel.cgroup_folders(RUN)) == 7
    assert kernel.cgroup_folders("demo") == []


def test_weights_are_multiples_of_a_single_process(mounts: Path) -> None:
    v1, v2 = mounts / "cpu" / f"testbed-{RUN}-devices", mounts / "unified" / f"testbed-{RUN}-devices"
    (v1 / "cpu.shares").write_text("1024\n")
    assert kernel.cgroup_weights(RUN, {"devices": 100}) == [(v1 / "cpu.shares", "102400")]
    (v2 / "cpu.weight").write_text("100\n")
    assert kernel.cgroup_weights(RUN, {"devices": 1000}) == [
        (v1 / "cpu.shares", "262144"),
        (v2 / "cpu.weight", "10000"),
    ]


def test_cpu_seconds_are_counted_once(mounts: Path) -> None:
    assert kernel.cgroup_cpu_seconds(RUN, "devices") is None
    group = f"testbed-{RUN}-devices"
    (mounts / "unified" / group / "cpu.stat").write_text("nr_periods 5\nusage_usec 2500000\n")
    assert kernel.cgroup_cpu_seconds(RUN, "devices") == 2.5
    (mounts / "cpuacct" / group / "cpuacct.usage").write_text("2500000001\n")
    assert kernel.cgroup_cpu_seconds(RUN, "devices") == pytest.approx(2.5)


def test_weights_that_the_kernel_changes_are_an_error(mounts: Path) -> None:
    """For example if a hierarchy rounds them, or another program overwrites them."""
    file = mounts / "unified" / f"testbed-{RUN}-devices" / "cpu.weight"
    file.write_text("100\n")
    assert executor.set_group_weights(Mock(), "image", RUN, {"devices": 50}) is None
    assert file.read_text() == "5000"
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(HostError, match=r"cpu\.weight has , requested 5000"):
        executor.set_group_weights(Mock(), "image", RUN, {"devices": 50})
