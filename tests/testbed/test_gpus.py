"""Devices with a GPU, or a part of one: what a topology says, what the host has, and what they got.

NVML is the driver's, and most hosts have none: a stand-in has its functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agents.wire.messages import GpuFigures, GpuSample, encode
from testbed import fidelity
from testbed.api import machine as doctor
from testbed.errors import BadInputError
from testbed.fidelity import LegClock, requested, table
from testbed.fidelity.features import feature_figures
from testbed.fidelity.part import Evidence
from testbed.fidelity.validity import verdict
from testbed.gpu.metered import total_gpu_use
from testbed.host import gpus
from testbed.host.gpus import GpuMeter, Gpus, HostGpu, Lack, Use
from testbed.plan import HostResources, Plan, device_table, plan
from testbed.plan.agent_configs import RunSpec
from testbed.run import provenance
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, parse

GIB = 2**30
AMPERE = HostGpu("GPU-a", "A40", 48 * GIB, (8, 6))
SMALL = HostGpu("GPU-b", "A2", 16 * GIB, (8, 6))
PASCAL = HostGpu("GPU-p", "P100", 16 * GIB, (6, 0))
FLEET = """
name: fleet
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff, buffer_size: 1}
stop: {after: 60s}
"""


def fleet(*devices: str, more: str = "") -> Topology:
    lines = "\n".join(f"  - {{cpu: 0.1, {device}}}" for device in devices)
    return parse(f"{FLEET}devices:\n{lines}\n{more}")


def planned(
    topology: Topology,
    *found: HostGpu,
    runtime: str = "docker",
    oversubscribe: bool = False,
    **lacks: Any,
) -> Plan:
    host = HostResources((0, 1, 2, 3), 64 * GIB, gpus=Gpus(found, **lacks), lack_of_cuda=None)
    return plan(topology, runtime, host, oversubscribe=oversubscribe)


def places(made: Plan) -> dict[str, str | None]:
    return {one.name: None if one.gpu is None else one.gpu.uuid for one in made.devices}


def test_device_requests_a_gpu_or_a_fraction() -> None:
    topology = fleet(
        "name: whole, gpu: true",
        "name: part, gpu: {share: 25%, memory: 2GiB}",
        "name: none, gpu: false",
    )
    whole, part, none = (group.gpu for group in topology.devices)
    assert whole is not None
    assert part is not None
    assert none is None
    assert (whole.share, whole.memory, whole.is_limited) == (1.0, None, False)
    assert (part.share, part.memory, part.is_limited) == (0.25, 2 * GIB, True)
    assert [group.memory for group in topology.devices] == [2 * GIB, 2 * GIB, GIB // 2]
    assert parse(topology.to_yaml()) == topology
    assert "gpu" not in topology.to_yaml().partition("name: none")[2]


@pytest.mark.parametrize(
    ("gpu", "column", "message"),
    [
        ("7", 30, "found 7, expected true, or a part of a GPU such as {share: 25%, memory: 2GiB}"),
        ("{share: 120%}", 38, "found '120%', expected a share from 0 to 1"),
        ("{share: 0}", 38, "found 0, expected a share above 0 and at most 1"),
        ("{memory: 100MiB}", 39, "found '100MiB', expected a size of at least 512MiB"),
        ("{sahre: 0.5}", 31, "unknown key; did you mean share?"),
    ],
)
def test_invalid_gpu_settings_are_reported_with_their_place(gpu: str, column: int, message: str) -> None:
    with pytest.raises(BadInputError) as error:
        fleet(f"name: a, gpu: {gpu}")
    assert f":7:{column}: devices[0].gpu" in str(error.value)
    assert message in str(error.value)
    with pytest.raises(BadInputError, match=r"found 'mps', .* choose another name"):
        fleet("name: mps")


def test_devices_are_placed_first_fit_by_decreasing_share() -> None:
    topology = fleet("name: a, count: 3, gpu: {share: 40%}", "name: b, gpu: true", "name: c")
    made = planned(topology, AMPERE, SMALL, replace(SMALL, uuid="GPU-c"))
    assert places(made) == {
        "b": "GPU-a",
        "a-1": "GPU-b",
        "a-2": "GPU-b",
        "a-3": "GPU-c",
        "c": None,
    }
    rows = {row["device"]: row["gpu"] for row in device_table(made)}
    assert (rows["a-1"], rows["b"], rows["c"]) == ("0.4", "1", None)
    assert "gpu" not in device_table(planned(fleet("name: c")))[0]


@pytest.mark.parametrize(
    ("devices", "found", "total"),
    [
        (["name: a, count: 3, gpu: {share: 50%}"], [AMPERE], "1.5 GPUs (3 x 0.5 a)"),
        # 1.8 are less than 2, and do not fit all the same.
        (["name: a, count: 3, gpu: {share: 60%}"], [AMPERE, SMALL], "1.8 GPUs (3 x 0.6 a)"),
        (
            ["name: a, count: 2, gpu: {share: 10%, memory: 10GiB}"],
            [SMALL],
            "0.2 GPUs (2 x 0.1 and 10GiB a)",
        ),
        (["name: a, count: 49, gpu: {share: 1%}"], [AMPERE], "0.49 GPUs (49 x 0.01 a)"),
    ],
)
def test_request_beyond_the_gpus_is_refused_with_the_sum(
    devices: list[str], found: list[HostGpu], total: str
) -> None:
    topology = fleet(*devices)
    slow = tuple(group.model_copy(update={"cpu": 0.01}) for group in topology.devices)
    topology = topology.model_copy(update={"devices": slow})
    host = HostResources((0, 1, 2, 3), 200 * GIB, gpus=Gpus(tuple(found)))
    with pytest.raises(BadInputError) as error:
        plan(topology, "docker", host)
    assert f":6:1: devices: ask for {total}" in str(error.value)
    assert "--oversubscribe" in str(error.value)
    assert all(one.gpu for one in plan(topology, "docker", host, oversubscribe=True).devices)


def test_fractions_need_a_gpu_with_mps_limits() -> None:
    topology = fleet("name: a, gpu: {share: 50%}", "name: b, gpu: true")
    assert places(planned(topology, PASCAL, AMPERE)) == {"a": "GPU-a", "b": "GPU-p"}
    with pytest.raises(BadInputError, match=r"devices\[0\].gpu: MPS can limit clients on GPUs from"):
        planned(topology, PASCAL, PASCAL)
    with pytest.raises(BadInputError, match=r"found 20GiB, expected at most 16.0 GiB"):
        planned(fleet("name: a, gpu: {memory: 20GiB}"), SMALL)


def test_missing_host_support_is_reported_with_the_fix() -> None:
    topology = fleet("name: a, gpu: true", "name: b, gpu: {share: 20%}")
    lack = Lack("this host has no NVIDIA driver", "sudo apt-get install nvidia-driver")
    with pytest.raises(BadInputError) as error:
        planned(topology, lack=lack)
    assert ":7:25: devices[0].gpu: this host has no NVIDIA driver. To fix it: sudo apt" in str(
        error.value
    )
    assert "devices[1].gpu: this host has no" in str(error.value)
    assert error.value.exit_code == 2
    with pytest.raises(BadInputError) as error:
        planned(topology, AMPERE, SMALL, lack_of_mps=Lack("no MPS", "sudo apt-get install mps"))
    assert "devices[1].gpu: no MPS. To fix it: sudo apt-get install mps" in str(error.value)
    assert "devices[0].gpu" not in str(error.value)
    assert planned(fleet("name: a"), lack=lack)  # who asks for none needs none


@pytest.mark.parametrize(
    ("runtime", "more", "lack", "message"),
    [
        ("process", "", None, "devices[0].gpu: the process runtime gives devices no GPU of their own"),
        ("docker", "runtime: {device: cuda}", None, "runtime.device: in the docker runtime each device"),
        ("virtual", "runtime: {device: cuda}", "PyTorch finds no GPU", "PyTorch finds no GPU. Or write"),
    ],
)
def test_runtime_without_gpu_support_refuses(
    runtime: str, more: str, lack: str | None, message: str
) -> None:
    host = HostResources((0, 1, 2, 3), 64 * GIB, gpus=Gpus((AMPERE,)), lack_of_cuda=lack)
    with pytest.raises(BadInputError) as error:
        plan(fleet("name: a, gpu: true", more=more), runtime, host)
    assert message in str(error.value)


def test_time_is_not_dilated_with_a_gpu_which_virtual_time_ignores_with_a_note() -> None:
    with pytest.raises(BadInputError, match="dilation: is 2, but a GPU does not become slower in"):
        planned(fleet("name: a, gpu: true", more="dilation: 2"), AMPERE)
    assert planned(fleet("name: a, gpu: true", more="dilation: auto"), AMPERE).dilation == 1
    assert planned(fleet("name: a", more="dilation: 2"), AMPERE).dilation == 2
    (note,) = planned(fleet("name: a, gpu: true"), runtime="virtual").notes
    assert note.startswith("In virtual time gpu changes nothing")


def test_float16_is_for_gpus() -> None:
    half = "local: {precision: float16}"
    assert planned(fleet(f"name: a, gpu: true, {half}", "name: b"), AMPERE).devices
    cuda = "runtime: {device: cuda}"  # all train on the host's GPU
    assert planned(fleet("name: a", more=cuda), runtime="process").devices
    assert planned(fleet(f"name: a, {half}", more=cuda), runtime="virtual").devices
    for runtime, fix in (("docker", "give it gpu"), ("virtual", "write runtime: {device: cuda}")):
        with pytest.raises(BadInputError) as error:
            planned(fleet(f"name: a, {half}"), AMPERE, runtime=runtime)
        assert ":7:44: devices[0].local.precision: a trains on the CPU" in str(error.value)
        assert fix in str(error.value)


# What NVML says of the host.


class Nvml:
    """Stands for the module pynvml on a host with the GPUs `cards`."""

    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_NOT_FOUND = 12, 9, 6

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(
        self, *cards: HostGpu, fails: int | None = None, cuda: int = 13000, mig: str = ""
    ) -> None:
        self.cards, self.fails, self.cuda, self.mig = cards, fails, cuda, mig
        self.open = 0
        self.busy: Sequence[tuple[int, int, int]] | int = ()
        """Process id, time and per cent of each sample; or the error."""
        self.seen: list[int] = []
        self.plain: Mapping[int, int | None] = {}
        self.mps: Mapping[int, int | None] = {}

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails is not None:
            raise self.NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> HostGpu:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> HostGpu:  # noqa: N802
        return next(card for card in self.cards if card.uuid == uuid)

    def nvmlDeviceGetUUID(self, card: HostGpu) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: HostGpu) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: HostGpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=card.memory)

    def nvmlDeviceGetCudaComputeCapability(self, card: HostGpu) -> list[int]:  # noqa: N802
        return list(card.capability)

    def nvmlDeviceGetMigMode(self, card: HostGpu) -> list[int]:  # noqa: N802
        if card.name == "P100":
            raise self.NVMLError(3)
        return [int(card.uuid == self.mig), 0]

    def nvmlDeviceGetComputeRunningProcesses(self, card: HostGpu) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in self.plain.items()]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, card: HostGpu) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in self.mps.items()]

    def nvmlDeviceGetProcessUtilization(self, card: HostGpu, since: int) -> list[Any]:  # noqa: N802
        self.seen.append(since)
        if isinstance(self.busy, int):
            raise self.NVMLError(self.busy)
        return [SimpleNamespace(pid=p, timeStamp=t, smUtil=s) for p, t, s in self.busy]


WITH_TOOLKIT: dict[str, Any] = {"Runtimes": {"nvidia": {}, "runc": {}}}


@pytest.mark.parametrize(
    ("nvml", "engine", "what", "fix"),
    [
        (Nvml(fails=12), WITH_TOOLKIT, "this host has no NVIDIA driver", "nvidia-driver"),
        (Nvml(fails=9), WITH_TOOLKIT, "not loaded", "modprobe nvidia"),
        (Nvml(fails=15), WITH_TOOLKIT, "does not answer", "nvidia-smi"),
        (Nvml(), WITH_TOOLKIT, "finds no GPU", "GPU"),
        (Nvml(AMPERE, mig="GPU-a"), WITH_TOOLKIT, "finds no GPU", "-mig 0"),
        (Nvml(AMPERE, cuda=12080), WITH_TOOLKIT, "supports CUDA 12.8, but the image's", "newer driver"),
        (Nvml(AMPERE), {"Runtimes": {"runc": {}}}, "no NVIDIA Container Toolkit", "nvidia-ctk runtime"),
        (Nvml(AMPERE), {}, "no NVIDIA Container Toolkit", "nvidia-ctk runtime"),
    ],
)
def test_obstacles_to_gpus_in_containers_are_named(
    nvml: Nvml, engine: dict[str, Any], what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    found = gpus.survey(engine, nvml)
    assert found.lack is not None
    assert what in found.lack.what
    assert fix in found.lack.fix
    assert nvml.open == 0
    finding = doctor.gpu(found)
    assert (finding.status, finding.fix) == ("warn", found.lack.fix)
    assert "only devices with gpu need it" in finding.detail


@pytest.mark.parametrize(
    "engine",
    [WITH_TOOLKIT, {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}],
)
def test_gpus_available_to_containers(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nvml = Nvml(AMPERE, SMALL, PASCAL, mig="GPU-b")
    found = gpus.survey(engine, nvml)
    assert (found.found, found.lack) == ((AMPERE, PASCAL), None)
    assert found.lack_of_mps is not None
    assert "nvidia-compute-utils-580" in found.lack_of_mps.fix
    assert doctor.gpu(found).status == "warn"
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        (tmp_path / name).touch(mode=0o755)
    found = gpus.survey(engine, nvml)
    assert found.lack_of_mps is None
    assert doctor.gpu(found).detail == "A40, P100; MPS cannot limit a device's share of P100"


# What processes use.


def test_gpu_meter_reads_processes_and_mean_utilisation() -> None:
    nvml = Nvml(AMPERE)
    nvml.plain, nvml.mps = {7: 100, 8: None}, {9: 300}
    nvml.busy = [(7, 1_000, 40), (7, 2_000, 60), (5, 2_000, 99)]
    meter = GpuMeter(["GPU-a"], nvml)
    assert meter.read() == {
        7: Use(100, mps=False, sm=0.5),
        8: Use(None, mps=False, sm=0.0),
        9: Use(300, mps=True, sm=None),
    }
    nvml.busy = Nvml.NVML_ERROR_NOT_FOUND  # nothing ran since
    assert meter.read()[7] == Use(100, mps=False, sm=0.0)
    nvml.busy = 3  # this GPU does not tell
    assert meter.read()[7] == Use(100, mps=False, sm=None)
    assert nvml.seen == [0, 2_000, 2_000]
    meter.close()
    assert nvml.open == 0
    with pytest.raises(OSError, match="NVML"):
        GpuMeter(["GPU-a"], Nvml(fails=12))


def test_gpu_use_of_a_devices_processes_is_summed() -> None:
    assert total_gpu_use([]) == GpuFigures(0, 0.0)
    mixed = [Use(100, mps=False, sm=0.25), Use(None, mps=False, sm=0.5)]
    assert total_gpu_use(mixed) == GpuFigures(100, 0.75)
    assert total_gpu_use([Use(300, mps=True, sm=None)]) == GpuFigures(300, None, mps=True)
    assert total_gpu_use([Use(None, mps=False, sm=None)]) == GpuFigures()


# What they got of what was asked.


def judged(tmp_path: Path, *samples: GpuFigures, gpu: str = "{share: 25%, memory: 2GiB}") -> Any:
    """Fidelity and validity of a run of 60 s, with one of `samples` a second."""
    topology = fleet(f"name: a, gpu: {gpu}", "name: b")
    spec = RunSpec(RunDirectory(tmp_path), topology, planned(topology, AMPERE), {})
    lines = [encode(GpuSample("a", 100.0 + at, one)) for at, one in enumerate(samples)]
    (tmp_path / "telemetry.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    clock = LegClock(100.0, end=60.0)
    evidence = Evidence(spec=spec, records=(), clock=clock)
    devices = requested.devices(spec, ())
    found = fidelity.measure(devices, evidence.samples(), clock, {})
    found = replace(found, features=feature_figures(evidence))
    return found, verdict((), found)


def test_device_within_mps_limits_is_reported_and_not_judged(tmp_path: Path) -> None:
    on = GpuFigures(1500 * 2**20, None, mps=True)
    found, validity = judged(tmp_path, GpuFigures(0, 0.0), on, GpuFigures(2**30, None, mps=True))
    devices = found.as_dict()["devices"]
    assert "gpu" not in devices["b"]
    assert (devices["a"]["gpu"]["samples"], devices["a"]["gpu"]["outside"]) == (2, 0)
    assert not [reason for reason in validity.reasons if "GPU" in reason]
    (why,) = [text for text in validity.unjudged if "GPU" in text]
    assert "a, its share of the GPU: MPS limited it, but NVML does not report" in why
    assert devices["a"]["gpu"]["memory"] == {"asked": 2 * GIB, "got": 1500 * 2**20}


@pytest.mark.parametrize(
    ("sample", "reason", "unjudged"),
    [
        (GpuFigures(GIB, 0.9), "a had its whole GPU: its client ran without MPS's limits", ""),
        (GpuFigures(2560 * 2**20, None, mps=True), "", ""),
        (
            GpuFigures(2561 * 2**20, None, mps=True),
            "a took 2561 MiB of its GPU; the limit was 2048 MiB",
            "",
        ),
        (GpuFigures(None, None, mps=True), "", "its GPU memory: NVML does not report"),
        (GpuFigures(0, 0.0), "", "a, its GPU: NVML saw no process of the device on it"),
        (None, "", "a, its GPU: NVML saw no process of the device on it"),
    ],
)
def test_what_a_device_took_of_its_gpu_is_judged(
    sample: GpuFigures | None, reason: str, unjudged: str, tmp_path: Path
) -> None:
    _, validity = judged(tmp_path, *([] if sample is None else [sample]))
    assert [text for text in validity.reasons if "GPU" in text] == ([reason] if reason else [])
    assert any(unjudged in text for text in validity.unjudged)


def test_manifest_names_the_gpu_of_each_device(tmp_path: Path) -> None:
    topology = fleet("name: a, gpu: {share: 25%}", "name: b")
    spec = RunSpec(RunDirectory(tmp_path), topology, planned(topology, AMPERE), {"a": 1, "b": 1})
    told = provenance.describe(spec, {"a": [], "b": []})["devices"]
    assert told["a"]["gpu"] == {"uuid": "GPU-a", "share": 0.25, "memory": None, "limited": True}
    assert "gpu" not in told["b"]


def test_use_of_a_whole_gpu_is_reported(tmp_path: Path) -> None:
    found, validity = judged(tmp_path, GpuFigures(GIB, 0.5), GpuFigures(GIB, 0.7), gpu="true")
    assert found.as_dict()["devices"]["a"]["gpu"]["sm"] == pytest.approx(0.6)
    assert not [text for text in (*validity.reasons, *validity.unjudged) if "GPU" in text]
    shown = StringIO()
    Console(file=shown, width=120).print(table.render(found))
    assert "SM use" in shown.getvalue()
    assert "0.6" in shown.getvalue()
