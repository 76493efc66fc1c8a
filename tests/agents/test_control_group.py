"""Control groups as kernels and engines lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from agents.device import control_group
from agents.device.control_group import ControlGroup, weights_of
from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits

V2 = {
    "cpu.max": "25000 100000\n",
    "cpu.weight": "10\n",
    "cpu.stat": "usage_usec 2500000\nnr_periods 9\nnr_throttled 4\nthrottled_usec 1500000\n",
    "cpuset.cpus": "1\n",
    "memory.max": "536870912\n",
    "memory.swap.max": "0\n",
    "memory.events": "low 0\noom 0\noom_kill 0\n",
}
V1 = {
    "cpu/cpu.cfs_quota_us": "25000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "cpu/cpu.shares": "250\n",
    "cpu/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n",
    "cpuacct/cpuacct.usage": "2500000000\n",
    "cpuset/cpuset.cpus": "1\n",
    "memory/memory.limit_in_bytes": "536870912\n",
    "memory/memory.memsw.limit_in_bytes": "536870912\n",
    "memory/memory.oom_control": "under_oom 0\noom_kill 0\n",
}
AS_V2 = CgroupLimits(quota=25_000, period=100_000, weight=10, cpus="1", memory=2**29, swap=0)
AS_V1 = CgroupLimits(quota=25_000, period=100_000, shares=250, cpus="1", memory=2**29, swap=0)


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def proc(folder: Path, group: str, mounts: str) -> Path:
    """A `/proc` whose process `self` is in `group`, with `mounts`, where @ stands for `folder`."""
    write(folder / "proc" / "self", {"cgroup": group, "mountinfo": mounts.replace("@", str(folder))})
    return folder / "proc"


LAYOUTS = {
    "v2, namespace of its own": ("0::/\n", "31 30 0:27 / @/c rw - cgroup2 cgroup rw\n", "c"),
    "v2, the host's namespace": (
        "0::/run.slice/docker-1.scope\n",
        "31 30 0:27 / @/c rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        "c/run.slice/docker-1.scope",
    ),
    "v2, its group mounted": ("0::/d/1\n", "31 30 0:27 /d/1 @/c rw - cgroup2 cgroup rw\n", "c"),
    "v2, outside of its namespace": ("0::/../x\n", "31 30 0:27 / @/c rw - cgroup2 cgroup rw\n", "c"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_v2_limits_are_found_in_every_layout(layout: str, tmp_path: Path) -> None:
    group, mounts, where = LAYOUTS[layout]
    write(tmp_path / "c", {"cpu.stat": "usage_usec 99000000\n"})  # the root's
    write(tmp_path / where, V2)
    found = ControlGroup.of_process(proc=proc(tmp_path, group, mounts))
    assert found.limits() == AS_V2
    assert found.cpu_seconds() == 2.5
    assert found.throttling() == (9, 4, 1.5)
    assert found.cores() == 0.25


@pytest.mark.parametrize("hybrid", [False, True])
def test_v1_limits_are_found_in_every_hierarchy(tmp_path: Path, *, hybrid: bool) -> None:
    """cpu and cpuacct in one hierarchy, as systemd mounts them; v2 beside them has no controllers."""
    files = {name.replace("cpuacct/", "cpu/"): text for name, text in V1.items()}
    write(tmp_path / "docker" / "1", files)
    names = {"cpu,cpuacct": "cpu", "cpuset": "cpuset", "memory": "memory"}
    group = "".join(f"4:{name}:/docker/1\n" for name in names) + "1:name=systemd:/docker/1\n"
    mounts = "".join(
        f"5 4 0:9 / @/docker/1/{folder} rw - cgroup cgroup rw,{name}\n" for name, folder in names.items()
    ).replace(" / ", " /docker/1 ")
    if hybrid:
        write(tmp_path / "unified" / "docker" / "1", {"cgroup.procs": ""})
        group += "0::/docker/1\n"
        mounts += "5 4 0:9 / @/unified rw - cgroup2 cgroup2 rw\n"
    found = ControlGroup.of_process(proc=proc(tmp_path, group, mounts))
    assert found.limits() == AS_V1
    assert found.cpu_seconds() == 2.5
    assert found.throttling() == (9, 4, 1.5)
    assert found.cores() == 0.25


def group_of(folder: Path, files: Mapping[str, str]) -> ControlGroup:
    write(folder, files)
    v1 = {name: folder / name for name in ("cpu", "cpuacct", "cpuset", "memory")}
    return ControlGroup(v1 if "cpu/cpu.shares" in files else {"": folder})


def test_missing_limits_are_none(tmp_path: Path) -> None:
    v2 = V2 | {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.swap.max": "max\n"}
    found = group_of(tmp_path / "v2", v2)
    assert found.limits() == CgroupLimits(
        quota=NO_LIMIT, period=100_000, weight=10, cpus="1", memory=NO_LIMIT, swap=NO_LIMIT
    )
    assert found.cores() is None
    unlimited = "9223372036854771712\n"
    v1 = V1 | {"memory/memory.limit_in_bytes": unlimited, "cpu/cpu.cfs_quota_us": "-1\n"}
    found = group_of(tmp_path / "v1", v1 | {"memory/memory.memsw.limit_in_bytes": unlimited})
    assert found.limits() == CgroupLimits(
        quota=NO_LIMIT, period=100_000, shares=250, cpus="1", memory=NO_LIMIT, swap=NO_LIMIT
    )
    assert found.cores() is None


@pytest.mark.parametrize(
    ("files", "swap"), [(V2, "memory.swap.max"), (V1, "memory/memory.memsw.limit_in_bytes")]
)
@pytest.mark.parametrize(("total", "expected"), [(0, 0), (2097148, None)])
def test_kernel_without_swap_accounting_has_no_swap_limit(
    files: dict[str, str],
    swap: str,
    total: int,
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:  24633516 kB\nSwapTotal:  {total} kB\nSwapFree:  0 kB\n")
    monkeypatch.setattr(control_group, "_MEMINFO", meminfo)
    limits = group_of(tmp_path, {name: text for name, text in files.items() if name != swap}).limits()
    assert limits is not None
    assert (limits.memory, limits.swap) == (2**29, expected)


@pytest.mark.parametrize("version", [V2, V1])
def test_out_of_memory_kill_is_distinguished_from_others(
    version: dict[str, str], tmp_path: Path
) -> None:
    assert group_of(tmp_path, version).memory_kills() == (0, 2**29)
    killed = {name: text.replace("oom_kill 0", "oom_kill 1") for name, text in version.items()}
    assert group_of(tmp_path, killed).memory_kills() == (1, 2**29)


def test_invisible_process_has_no_limits(tmp_path: Path) -> None:
    found = ControlGroup.of_process(7, proc(tmp_path, "0::/\n", ""))
    assert (found.limits(), found.cores(), found.cpu_seconds()) == (None, None, None)


@pytest.mark.parametrize(
    ("shares", "weights"), [(2, (1, 1)), (1024, (39, 100)), (262_144, (10_000, 10_000))]
)
def test_weights_of_both_shares_conversions_are_read(shares: int, weights: tuple[int, int]) -> None:
    assert weights_of(shares) == weights


def test_group_of_this_process_is_found() -> None:
    assert ControlGroup.of_process().folders
