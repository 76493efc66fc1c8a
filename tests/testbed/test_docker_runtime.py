"""Containers of a real engine: limits, ends, isolation and removal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import docker
import psutil
import pytest
from docker.errors import APIError

from agents.device_actions import Crash, Restart, SetCpu
from agents.wire import messages
from testbed import images
from testbed.broker import BROKER
from testbed.data import preparation
from testbed.errors import BadInputError, HostError
from testbed.host import docker_engine, kernel
from testbed.host.gpus import MPS, Gpus, HostGpu
from testbed.images import building
from testbed.plan import HostResources, plan
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.runtime import DockerRuntime, live_runs
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, Container, Mount
from testbed.runtimes.process.log_writer import CUT, LOG_BYTES
from testbed.topology import parse
from tests.agents import test_mps
from tests.running import left_in_docker
from tests.waiting import eventually

pytestmark = pytest.mark.docker


def sleeping_container(device: Container) -> Container:
    """Return the container of a device that has only to be there."""
    return replace(device, networks=(), mounts=(), command=("sleep", "600"))


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """Specification of a run with one device."""
    return spec_of(tmp_path, "name: d, cpu: 0.1")


def spec_of(tmp_path: Path, device: str) -> RunSpec:
    """Return the specification of a run of `device`, called d, on a host with two cores and a GPU."""
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        f"devices: [{{{device}}}]\nstop: {{after: 10s}}\n"
    )
    directory = RunDirectory.create(tmp_path, f"t-{tmp_path.name}")
    host = HostResources((0, 1), 2**34, gpus=Gpus((HostGpu("GPU-1", "A40", 2**35, (8, 6)),)))
    return RunSpec(directory, topology, plan(topology, "docker", host), {"d": 1})


def test_engine_limits_a_device_and_reports_its_exit(spec: RunSpec, engine: docker.DockerClient) -> None:
    """A share that the engine refuses is forgotten: the next limit is as planned. That a log
    cannot be saved keeps nothing from being removed. A device that prints for ever fills no disk."""
    preparation.write(preparation.prepare(spec.topology, None), spec.directory)
    built = building.ensure(engine, lambda _: None)
    runtime = DockerRuntime(engine, built, spec)
    try:
        runtime.start()
        container = engine.containers.get(runtime._containers["d"].id)

        def quota() -> tuple[int, int]:
            container.reload()
            return container.attrs["HostConfig"]["CpuQuota"], container.attrs["HostConfig"]["CpuPeriod"]

        assert quota() == (0, 0)
        runtime.begin()  # with a quorum, of which the device is none
        assert quota()[0] == -1
        assert [container.attrs["HostConfig"][name] for name in ("CpuShares", "CpusetCpus")] == [2, "1"]
        with pytest.raises(HostError, match="limit the CPU of d"):
            runtime.act("d", SetCpu(1e-5))
        runtime.limit("d")
        runtime.begin()
        assert quota() == (5000, 50_000)
        assert runtime.measure_again(["d"]) == [("d", messages.MeasureOrder(["d"]))]
        assert quota()[0] == -1
        runtime.begin()  # an absent device, which nobody limits after the measurement
        assert [container.attrs["HostConfig"][name] for name in ("CpuShares", "CpusetCpus")] == [2, "1"]
        runtime.limit("d")
        runtime.act("d", Crash())
        runtime.act("d", Restart())
        assert quota()[0] == -1
        assert runtime.exit_codes() == {}
        broker = psutil.Process(runtime._containers.pid(BROKER))
        broker.suspend()
        eventually(lambda: runtime.meter.externally_stopped() == {BROKER})
        broker.resume()
        eventually(lambda: runtime.meter.externally_stopped() == set())

        flood = "head -c 12000000 /dev/zero | tr '\\0' x | fold -w 99; echo; echo end"
        aggregator = runtime._launch.aggregator
        labels = {**aggregator.labels, COMPONENT_LABEL: "p"}
        printing = replace(
            aggregator, component="p", name=f"p-{spec.directory.run}", labels=labels, mounts=()
        )
        printer = executor.start(engine, replace(printing, command=("sh", "-c", flood)))
        engine.containers.get(printer).wait()
        container.kill()
        container.wait()
        assert runtime.exit_codes() == {"d": 137}
        runtime.limit("d")  # left alone
        with pytest.raises(BadInputError, match=r"exit code 137"):
            runtime.act("d", Restart())
        (spec.directory.logs / "broker.log").mkdir()
        with pytest.raises(HostError, match=r"logs could not be saved: .*broker\.log: Is a directory"):
            runtime.stop()
        assert left_in_docker(engine, spec.directory.run) == []
    finally:
        runtime.stop()
    assert left_in_docker(engine, spec.directory.run) == []
    assert {path.stem for path in spec.directory.logs.glob("*.log")} == {
        "broker",
        "aggregator",
        "d",
        "p",
    }
    kept = spec.directory.log("p").read_bytes()
    assert kept.startswith(CUT)
    assert kept.endswith(b"x\nend\n")
    assert 2 * 2**20 < len(kept) <= 2 * LOG_BYTES
    assert not spec.directory.log("aggregator").read_bytes().startswith(CUT)


def test_containers_inherit_the_choice_of_kernels_but_no_proxy(
    spec: RunSpec, built: images.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's clients put the proxy into each container, with its password. Kernels for another
    processor would round otherwise than those of a replay on this host."""
    proxy = {"proxies": {"default": {"httpProxy": "http://me:secret@proxy:3128"}}}
    (tmp_path / "config.json").write_text(json.dumps(proxy))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    chosen = {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_ENABLE_CPU_FEATURES": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    run, tell = spec.directory.run, ["sh", "-c", "! env | grep -i proxy"]
    with closing(docker_engine.connect()) as engine:
        runtime = DockerRuntime(engine, built, spec)
        device = replace(runtime._launch.devices[0], networks=(), mounts=(), command=tuple(tell))
        try:
            container = engine.containers.get(executor.start(engine, device))
            assert container.wait()["StatusCode"] == 0
            executor._as_root(engine, built.agent, run, tell)
            environment = container.attrs["Config"]["Env"]
            assert not [one for one in environment if "proxy" in one.lower()]
            assert {f"{name}={value}" for name, value in chosen.items()} <= set(environment)
            assert runtime._launch.aggregator.environment["OPENBLAS_NUM_THREADS"] == "1"
        finally:
            runtime.stop()


def test_router_can_create_the_iptables_lock(
    engine: docker.DockerClient, built: images.Images, tmp_path: Path
) -> None:
    """The router's root file system is read-only."""
    runtime = DockerRuntime(engine, built, spec_of(tmp_path, "name: d, cpu: 0.1, link: {rtt: 20ms}"))
    router = runtime._launch.router
    assert router is not None
    tell = ("iptables-legacy", "-w", "-t", "nat", "-S")
    try:
        container = engine.containers.get(
            executor.start(engine, replace(router, networks=(), mounts=(), command=tell))
        )
        container.wait()
        assert b"lock" not in container.logs()  # whether or not the kernel has its tables
    finally:
        runtime.stop()


def test_containers_are_removed_except_those_of_a_swarm(
    spec: RunSpec, engine: docker.DockerClient, built: images.Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's engine has them, and the Swarm would start them again."""
    monkeypatch.setattr(executor, "_REMOVAL_TIMEOUT_SECONDS", 0.0)
    run = spec.directory.run
    device = sleeping_container(DockerRuntime(engine, built, spec)._launch.devices[0])
    of_a_service = {**device.labels, executor.SERVICE_LABEL: "s"}
    try:
        for number in range(4):
            labels = of_a_service if number == 3 else device.labels
            executor.start(engine, replace(device, name=f"{device.name}-{number}", labels=labels))
        assert [live.components for live in live_runs() if live.run == run] == [3]
        executor.remove(engine, run)
        assert len(executor.containers(engine, run)) == 1
        assert run not in {live.run for live in live_runs()}
    finally:
        executor.remove_containers(engine, run)
        executor.remove_cgroups(engine, built.agent, run)
    assert left_in_docker(engine, run) == []


def test_control_groups_visible_only_to_the_engine_are_removed(
    spec: RunSpec, engine: docker.DockerClient, built: images.Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if the controller runs in a container, which has its own control groups."""
    run = spec.directory.run
    executor.start(engine, sleeping_container(DockerRuntime(engine, built, spec)._launch.devices[0]))
    assert kernel.cgroup_folders(run)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "cgroup_folders", lambda *_: [])
        executor.remove(engine, run)
    assert kernel.cgroup_folders(run) == []


ISOLATE = """
import sys
from contextlib import closing
from testbed.host import docker_engine
from testbed.runtimes.docker import executor
image, run, network = sys.argv[1:]
with closing(docker_engine.connect()) as engine:
    executor.isolate(engine, image, run, network, executor.addresses(engine, network))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may make namespaces")
def test_controller_in_its_own_pid_namespace_isolates_devices(
    spec: RunSpec, engine: docker.DockerClient, built: images.Images
) -> None:
    """The controller does not see their processes, and must not take them for ended ones."""
    runtime = DockerRuntime(engine, built, spec)
    data, device, run = runtime._launch.networks[0], runtime._launch.devices[0], spec.directory.run
    own = ("unshare", "--pid", "--fork", "--mount-proc")
    try:
        executor.create_network(engine, data)
        executor.start(engine, replace(device, mounts=(), command=("sleep", "600")))
        isolate = [*own, sys.executable, "-c", ISOLATE, built.agent, run, data.name]
        subprocess.run(isolate, check=True)
        bridge = f"br-{engine.api.inspect_network(data.name)['Id'][:12]}"
        ports = subprocess.check_output(["bridge", "-d", "link", "show"], text=True)
        port = re.search(rf"master {bridge} .*\n(.*)", ports)
        assert port is not None
        assert "isolated on" in port[1]
    finally:
        runtime.stop()


def test_control_groups_are_removed_even_if_a_network_is_not(
    spec: RunSpec, engine: docker.DockerClient, built: images.Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_NETWORK_RELEASE_TIMEOUT_SECONDS", 0.0)
    runtime = DockerRuntime(engine, built, spec)
    data = runtime._launch.networks[0]
    executor.create_network(engine, data)
    executor.start(engine, sleeping_container(runtime._launch.devices[0]))
    other = engine.containers.run(built.agent, ["sleep", "600"], network=data.name, detach=True)
    try:
        with pytest.raises(HostError, match=r"could not remove the containers.*active endpoints"):
            runtime.stop()
        assert kernel.cgroup_folders(spec.directory.run) == []
    finally:
        other.remove(force=True)
        runtime.stop()
    assert left_in_docker(engine, spec.directory.run) == []


def test_mps_is_ready_before_devices_start_and_reachable_only_by_sharers(
    engine: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program stands in for NVIDIA's daemon, because this host may have no GPU."""
    monkeypatch.setattr("testbed.runtimes.docker.runtime._MPS_TIMEOUT_SECONDS", 120.0)
    spec = spec_of(tmp_path, "name: d, cpu: 0.1, gpu: {share: 25%, memory: 2GiB}")
    agent = building.ensure(engine, lambda _: None).agent
    runtime = DockerRuntime(engine, images.Images(agent, agent, agent, agent), spec)
    control = "/usr/local/bin/nvidia-cuda-mps-control"
    daemon, faulty = tmp_path / "daemon", tmp_path / "faulty"
    daemon.write_text(test_mps.DAEMON)
    faulty.write_text(
        '#!/bin/sh\n[ "$1" = -f ] && echo no GPU >> $CUDA_MPS_LOG_DIRECTORY/server.log; exit 3\n'
    )
    for program in (daemon, faulty):
        program.chmod(0o755)
    assert runtime._launch.mps is not None
    mps = replace(runtime._launch.mps, gpus=())
    folder = spec.directory.mps
    folder.mkdir()
    folder.chmod(0o777)
    device = runtime._launch.devices[0]
    look = ("sh", "-c", "ls /testbed/mps; readlink /proc/self/ns/ipc")
    try:
        with pytest.raises(HostError, match=r"NVIDIA's MPS ended with exit code 3:\nno GPU"):
            runtime._start_mps(replace(mps, mounts=(*mps.mounts, Mount(str(faulty), control))))
        engine.api.remove_container(mps.name, force=True)
        runtime._start_mps(replace(mps, mounts=(*mps.mounts, Mount(str(daemon), control))))
        running = engine.containers.get(mps.name)
        assert running.attrs["Config"]["User"] == "10001:10001"
        assert running.attrs["HostConfig"]["NetworkMode"] == "none"
        assert running.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        mounted = [mount for mount in device.mounts if mount.source == str(folder)]
        beside = replace(device, gpus=(), mounts=tuple(mounted), networks=(), command=look, sysctls={})
        engine.containers.get(executor.start(engine, beside)).wait()
        seen = executor.logs(engine, spec.directory.run, tail=9)["d"]
        assert {"control", "ready"} <= set(seen)
        namespace = running.exec_run(["readlink", "/proc/self/ns/ipc"]).output
        assert namespace == f"{seen[-1]}\n".encode()
        with pytest.raises(APIError, match=r"(?i)device"):  # the engine has no such GPU
            executor.start(engine, replace(beside, name=f"{beside.name}-2", gpus=("GPU-1",)))
        asked = engine.api.inspect_container(f"{beside.name}-2")["HostConfig"]["DeviceRequests"]
        assert asked[0]["DeviceIDs"] == ["GPU-1"]
        assert asked[0]["Capabilities"] == [["gpu", "compute", "utility"]]
    finally:
        runtime.stop()
    assert left_in_docker(engine, spec.directory.run) == []
    assert f"user {10001}" in spec.directory.log(MPS).read_text()
