from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agents.config import AccessLink, DrawnDuration
from testbed import topology
from testbed.bundle import TOPOLOGIES
from testbed.errors import BadInputError
from testbed.plan import (
    HostResources,
    agent_configs,
    assignment,
    catalog,
    device_table,
    plan,
    plan_tables,
    rounds,
    this_host,
    to_host_time,
)
from testbed.plan.features import PARTS
from testbed.plan.part import PlanPart

GIB = 2**30
FOUR_CORES = HostResources(cores=(0, 2, 3, 5), memory=16 * GIB)


def fleet(devices: str, more: str = "") -> topology.Topology:
    return topology.parse(
        "name: fleet\n"
        "task: {name: digits-logreg, flops_per_step: 1e6, local: {steps: 20}}\n"
        "rule: {name: fedasync}\n"
        f"devices: [{devices}]\n"
        f"stop: {{updates: 10}}\n{more}"
    )


def test_first_core_is_reserved_for_broker_and_aggregator() -> None:
    assert plan(fleet("{name: pi, count: 10, cpu: 0.1}"), "docker", HostResources((0, 1), 16 * GIB))
    planned = plan(fleet("{name: pi, count: 2, cpu: 1.5}"), "docker", FOUR_CORES)
    assert (planned.infrastructure_cpus, planned.device_cpus) == ("0", "2-3,5")
    assert planned.device_capacity == 3
    assert [device.name for device in planned.devices] == ["pi-1", "pi-2"]


def test_last_cores_are_reserved_for_evaluations() -> None:
    planned = plan(fleet("{name: pi, cpu: 1}", "evaluate: {cores: 2}"), "docker", FOUR_CORES)
    assert (planned.infrastructure_cpus, planned.device_cpus) == ("0", "2")
    assert (planned.evaluation_cpus, planned.aggregator_cpus) == ("3,5", "0,3,5")
    assert planned.device_capacity == 1
    without = plan(fleet("{name: pi, cpu: 1}"), "docker", FOUR_CORES)
    assert (without.evaluation_cpus, without.aggregator_cpus) == ("", "0")
    simulated = plan(
        fleet("{name: pi, cpu: 1}", "evaluate: {cores: 2}"), "virtual", HostResources((0,), GIB)
    )
    assert simulated.evaluation_cpus == ""
    with pytest.raises(BadInputError, match=r"expected at most 1: .* keep one, and evaluations 2 \("):
        plan(fleet("{name: pi, cpu: 1.5}", "evaluate: {cores: 2}"), "docker", FOUR_CORES)


@pytest.mark.parametrize(
    ("cores", "wanted", "told"),
    [
        (4, 3, "this host has 4 cores: broker and aggregator need one, and the devices another. "
         "Write at most 2, or remove it"),
        (2, 1, "this host has 2 cores: broker and aggregator need one, and the devices another. "
         "Remove it, or use a larger host"),
        (1, 1, "this host has 1 core: "),
    ],
)  # fmt: skip
def test_evaluations_leave_one_core_for_the_rest(cores: int, wanted: int, told: str) -> None:
    topology = fleet("{name: pi, cpu: 0.5}", f"evaluate: {{cores: {wanted}}}")
    with pytest.raises(BadInputError) as refused:
        plan(topology, "docker", HostResources(tuple(range(cores)), 16 * GIB), oversubscribe=True)
    assert f"6:19: evaluate.cores: found {wanted}, but {told}" in str(refused.value)


def test_devices_get_half_of_a_single_core() -> None:
    planned = plan(fleet("{name: pi, cpu: 0.5}"), "docker", HostResources((3,), 16 * GIB))
    assert (planned.infrastructure_cpus, planned.device_cpus) == ("3", "3")
    assert planned.device_capacity == 0.5
    assert planned.compromises == ("Broker and aggregator share the only core with the devices",)


@pytest.mark.parametrize(
    ("cores", "infrastructure", "devices", "dilation"),
    [
        ((0,), "0", "0", 1.68),
        ((1,), "1", "1", 1.68),
        ((0, 1), "0", "1", 1),
        ((0, 2, 5), "0", "2,5", 1),  # two others are offline, or not ours
        ((0, 2, 4, 6), "0", "2,4,6", 1),  # without the second thread of each core
        (tuple(range(16)), "0", "1-15", 1),
        (tuple(range(8, 24)), "8", "9-23", 1),  # a container's cpuset
    ],
)
def test_quickstart_fits_any_number_of_cores(
    cores: tuple[int, ...], infrastructure: str, devices: str, dilation: float
) -> None:
    quickstart = topology.load(TOPOLOGIES / "quickstart.yaml")
    for runtime in ("docker", "process"):
        planned = plan(quickstart, runtime, HostResources(cores, 16 * GIB))
        assert (planned.infrastructure_cpus, planned.device_cpus) == (infrastructure, devices)
        assert planned.dilation == dilation
        assert len(planned.compromises) == (2 if len(cores) == 1 else 0)


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("{name: pi, count: 4, cpu: 0.8}", "4:1: devices: ask for 3.2 cores (4 x 0.8 pi)"),
        ("{name: pi, cpu: 4}", "4:27: devices[0].cpu: found 4"),
        (
            "{name: pi, count: 2, cpu: 1}]\nscenario: [{at: 2s, set: pi, cpu: 2}",
            "5:35: scenario[0].cpu: the devices would request 4 cores, but can have only 3",
        ),
        ("{name: pi, cpu: 1, memory: 16GiB}", "4:1: devices: ask for 16.0 GiB of memory (1 x 16GiB pi)"),
    ],
)
def test_request_beyond_the_host_is_refused_unless_oversubscribed(devices: str, told: str) -> None:
    wanted = fleet(devices)
    with pytest.raises(BadInputError) as refused:
        plan(wanted, "docker", FOUR_CORES)
    assert told in str(refused.value)
    assert "--oversubscribe" in str(refused.value)
    assert plan(wanted, "docker", FOUR_CORES, oversubscribe=True).devices


@pytest.mark.parametrize("runtime", ["docker", "process"])
def test_real_runtimes_support_links_and_outages(runtime: str) -> None:
    wanted = fleet(
        "{name: pi, cpu: 1, link: {up: 5Mbps}, availability: {on: 5s, off: 1s}}",
        "scenario: [{at: 1s, disconnect: pi, for: 1s}, {at: 3s, set: pi, link: {rtt: 1s, loss: 0%}}]",
    )
    assert plan(wanted, runtime, FOUR_CORES).devices[0].link == AccessLink(up=5_000_000)
    wanted = fleet("{name: pi, cpu: 1, timing: 1s, speed: 2}")
    (device,) = plan(wanted, runtime, this_host(), oversubscribe=True).devices
    assert (device.timing, device.speed) == (DrawnDuration("constant", {"value": 1.0}), 2.0)
    assert device.profile == "1 cpu, 512 MiB, timing 1s"


def test_packet_loss_is_refused_with_relays(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,up,loss\n0,1000,0\n1,1000,0.1\n")
    trace = f"{{csv: {tmp_path}/t.csv}}"
    wanted = fleet(
        f"{{name: pi, cpu: 1, link: {{loss: 2%}}}},\n{{name: bus, cpu: 1, link: {{trace: {trace}}}}}",
        "scenario: [{at: 1s, set: pi, link: {loss: 1%}}]",
    )
    with pytest.raises(BadInputError) as refused:
        plan(wanted, "process", FOUR_CORES, catalog.read(wanted))
    lines = str(refused.value).splitlines()
    for place in (
        "4:37: devices[0].link.loss:",
        "5:36: devices[1].link.trace.csv:",
        "7:37: scenario[0].link.loss:",
    ):
        (line,) = (line for line in lines if place in line)
        mend = "leave out its column loss" if "trace" in place else "write loss: 0%"
        assert f"loses no packets: {mend}, or use the docker or swarm runtime" in line
    assert plan(wanted, "docker", FOUR_CORES, catalog.read(wanted)).devices


def test_cpu_share_below_a_containers_minimum_is_refused() -> None:
    """The engine takes no quota below 1 ms; `auto` stretches as the strong ones need."""
    later = "scenario: [{at: 1s, set: pi, cpu: 0.0009}]"
    with pytest.raises(BadInputError) as refused:
        plan(fleet("{name: pi, cpu: 0.001}", later), "docker", FOUR_CORES)
    (line,) = (line for line in str(refused.value).splitlines() if "scenario[0].cpu" in line)
    assert "6:35: scenario[0].cpu: found 0.0009: a container has at least 0.001 of a core" in line

    wanted = fleet("{name: pi, cpu: 0.02}, {name: big, count: 30, cpu: 3}", "dilation: auto")
    with pytest.raises(BadInputError) as refused:
        plan(wanted, "docker", FOUR_CORES)
    assert "devices[0].cpu: found 0.02" in str(refused.value)
    assert plan(wanted, "process", FOUR_CORES).too_little(0.0005) is None
    assert plan(fleet("{name: pi, cpu: 0.001}"), "docker", FOUR_CORES).devices[0].quota == 1000


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("{name: pi, timing: 1s}", "4:11: devices[0]: has no cpu, which the docker runtime needs"),
        ("{name: pi, cpu: 1, gflops: 1, speed: 2}", "4:41: devices[0].speed"),
        ("{name: pi, cpu: 1}", "6:10: server.link: the docker runtime does not emulate this yet"),
    ],
)
def test_virtual_time_only_keys_are_refused_elsewhere(devices: str, told: str) -> None:
    wanted = fleet(devices, "server: {link: {up: 1mbit}}")
    assert plan(wanted, "virtual", FOUR_CORES).devices
    with pytest.raises(BadInputError) as refused:
        plan(wanted, "docker", FOUR_CORES, oversubscribe=True)
    assert told in str(refused.value)
    assert "use the virtual runtime" in str(refused.value)


def test_image_key_needs_containers(tmp_path: Path) -> None:
    """Refused where there are none, told where nothing runs, a file that is not there at once."""
    wanted = fleet("{name: pi, cpu: 1, image: 'my-agent:1'}")
    assert plan(wanted, "docker", FOUR_CORES).devices
    with pytest.raises(BadInputError) as refused:
        plan(wanted, "process", FOUR_CORES)
    assert "devices[0].image: the process runtime starts no containers" in str(refused.value)
    assert "use the docker or swarm runtime" in str(refused.value)
    virtual = plan(wanted, "virtual", FOUR_CORES)
    (note,) = virtual.notes
    assert note.startswith("In virtual time image changes nothing")
    file = tmp_path / "t.yaml"
    relative = fleet("{name: pi, cpu: 1, image: a/Dockerfile}").to_yaml().replace(f"{Path.cwd()}/", "")
    file.write_text(relative)
    with pytest.raises(
        BadInputError, match=f"devices.0..image: the file {tmp_path}/a/Dockerfile does not exist"
    ):
        catalog.read(topology.load(file))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Dockerfile").touch()
    found = topology.load(file)
    catalog.read(found)
    assert found.devices[0].image == f"{tmp_path}/a/Dockerfile"
    assert topology.parse(found.to_yaml()) == found


def test_virtual_time_fits_any_fleet() -> None:
    wanted = fleet("{name: pi, count: 20000, cpu: 8, memory: 64GiB}", "runtime: {name: virtual}")
    planned = plan(wanted, "virtual", HostResources((0,), GIB))
    assert len(planned.devices) == 20_000
    assert plan(fleet("{name: pi, cpu: 9}", "dilation: auto"), "virtual", FOUR_CORES).dilation == 1
    with pytest.raises(BadInputError, match="expected docker, swarm, process or virtual"):
        plan(wanted, "kubernetes", FOUR_CORES)
    assert planned.devices[-1].name == "pi-20000"


def test_virtual_device_is_described_by_its_settings() -> None:
    wanted = fleet(
        "{name: a, gflops: 10, speed: 0.5, link: {rtt: 60ms}}, "
        "{name: b, timing: {distribution: exponential, rate: 5}}"
    )
    planned = plan(wanted, "virtual", FOUR_CORES)
    a, b = planned.devices
    assert (a.profile, b.profile) == ("10 gflops", "timing exponential")
    assert (a.speed, b.speed) == (0.5, 1.0)
    assert b.timing == DrawnDuration("exponential", {"mean": None, "rate": 5.0})
    silent = {"up": None, "down": None, "think": None, "local": "20 steps x 32"}
    assert device_table(planned) == [
        {"device": "a", "gflops": 10.0, "timing": None, "speed": 0.5, "rtt": "60ms", **silent},
        {"device": "b", "gflops": None, "timing": "exponential", "speed": None, "rtt": None, **silent},
    ]


@pytest.mark.parametrize(
    ("cpu", "dilation", "quota", "period", "threads"),
    [
        (0.5, 1, 5_000, 10_000, 1),
        (0.1, 1, 5_000, 50_000, 1),  # a slice of 5 ms at the least
        (0.1, 4, 10_000, 400_000, 1),  # longer where time is stretched
        (0.01, 1, 5_000, 500_000, 1),
        (2.5, 1, 25_000, 10_000, 3),
    ],
)
def test_quota_and_period_of_a_share(
    cpu: float, dilation: int, quota: int, period: int, threads: int
) -> None:
    topology = fleet(f"{{name: pi, cpu: {cpu}}}", f"dilation: {dilation}")
    (device,) = plan(topology, "docker", FOUR_CORES).devices
    assert (device.quota, device.period, device.threads) == (quota, period, threads)


def test_plan_has_a_row_per_device() -> None:
    planned = plan(fleet("{name: pi, cpu: 0.04, link: {up: 5mbit}, think: 200ms}"), "docker", FOUR_CORES)
    assert device_table(planned) == [
        {
            "device": "pi",
            "cpu": 0.04,
            "quota": "5/125 ms",
            "memory": "512MiB",
            "up": "5mbit",
            "down": None,
            "think": "200ms",
            "local": "20 steps x 32",
        }
    ]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("4", 4.0), ("auto", 1.5), ("1", None)],
)
def test_time_is_dilated_until_the_devices_fit(asked: str, found: float | None) -> None:
    wanted = fleet("{name: pi, count: 9, cpu: 0.5, link: {up: 1mbit, rtt: 80ms}}", f"dilation: {asked}")
    if found is None:
        with pytest.raises(BadInputError, match="dilation: auto"):
            plan(wanted, "docker", FOUR_CORES)
        return
    planned = plan(wanted, "docker", FOUR_CORES)
    assert planned.dilation == found
    assert sum(device.host_cpu for device in planned.devices) <= planned.device_capacity
    device = planned.devices[0]
    assert (device.cpu, device.host_cpu) == (0.5, 0.5 / found)
    assert device.host_link is not None
    assert device.host_link.up == round(1e6 / found)
    assert device.host_link.rtt == pytest.approx(0.08 * found)


def test_dilated_trace_keeps_a_rate_above_zero_in_outages() -> None:
    assert to_host_time({"up": 1_000, "down": None, "rtt": 0.5}, 500) == {
        "up": 8,
        "down": None,
        "rtt": 250.0,
    }


def test_what_a_feature_adds_to_a_plan_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A feature of devices whose memory is doubled, with a file, and which the process runtime lacks."""
    (tmp_path / "heat.txt").write_text("80")
    where = ("devices", 0, "name")
    part = PlanPart(
        files=lambda _: [
            (("devices", 0, "name"), "heat", lambda folder: (folder / "heat.txt").read_text())
        ],
        refusals=lambda found, runtime, _: (
            [found.source.problem(where, "is too hot")] if runtime == "process" else []
        ),
        device=lambda device, _, known: replace(
            device, memory=2 * device.memory, origin=known.content("heat", str)
        ),
        place=lambda made, *_: (replace(made, is_routed=True), ()),
        notes=lambda _, made: [f"hot: {made.devices[0].origin}"],
        group_columns=lambda _plan, _rounds, groups: {name: {"heat": "hot"} for name in groups},
        brings_back=lambda _: True,
    )
    for module in (assignment, catalog, plan_tables, rounds, agent_configs):
        monkeypatch.setattr(module, "PARTS", (*PARTS, part))
    wanted = fleet("{name: pi, cpu: 0.1, memory: 1GiB}")
    assert agent_configs.devices_return(wanted, plan(wanted, "docker", FOUR_CORES))
    file = tmp_path / "topology.yaml"
    file.write_text(wanted.to_yaml())
    read = topology.load(file)
    planned = plan(read, "docker", FOUR_CORES, catalog.read(read))
    assert (planned.devices[0].memory, planned.devices[0].origin) == (2 * GIB, "80")
    assert planned.is_routed
    assert "hot: 80" in planned.notes
    found = rounds.estimate_rounds(read, planned, 650, None)
    assert [row["heat"] for row in rounds.group_rows(planned, found)] == ["hot"]
    with pytest.raises(BadInputError, match=r"devices\[0\].name: is too hot"):
        plan(read, "process", FOUR_CORES, catalog.read(read))
    (tmp_path / "heat.txt").unlink()
    with pytest.raises(BadInputError, match=r"devices\[0\].name: .*heat.txt: No such file"):
        catalog.read(read)
