"""Runs on a Swarm of two engines of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import docker
import pytest

from agents import events
from agents.mqtt.topics import AGGREGATOR
from testbed import images
from testbed.broker import BROKER
from testbed.data import preparation
from testbed.errors import HostError
from testbed.host.nodes import Node, swarm_nodes
from testbed.images import building
from testbed.plan import HostResources, plan
from testbed.plan.agent_configs import DISK, SHARD, RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL, Container
from testbed.runtimes.swarm import engine_proxies, removal, services
from testbed.runtimes.swarm.node_services import NODE_AGENT
from testbed.runtimes.swarm.runtime import launcher
from testbed.topology import load
from testbed.view import View
from tests.conftest import unavailable
from tests.running import TESTBED, Finished, cli, interrupt, started, until_printed, write_topology
from tests.ssh_servers import in_network_of, servers
from tests.two_engines import Engine, lacking, swarm
from tests.waiting import eventually

pytestmark = pytest.mark.hosts
LINK = {"up": "2mbit", "down": "5mbit", "rtt": "20ms"}
PACE = {"cpu": 0.3, "timing": "400ms"}
"""Devices start quickly, and wait most of the time."""
DEVICES: list[dict[str, Any]] = [
    {"name": "first", **PACE, "link": LINK, "hosts": ["ENGINE-1"]},
    {"name": "second", "count": 2, **PACE, "link": LINK, "hosts": ["ENGINE-2"]},
]
"""Devices of a topology, to be completed with the names of the nodes, which share one host name."""
TASK = {"name": "digits-logreg", "local": {"steps": 5, "batch_size": 32, "lr": 0.01}}
KINDS = ("agent", "broker", "base")
NO_OTHER_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc")
"""Prefix that hides other processes, so that `down --all` ends no run of other tests."""
NAMES = {"first", "second-1", "second-2"}
PORT = 18_891


@pytest.fixture(scope="module")
def engines(engine: docker.DockerClient) -> Iterator[tuple[Engine, Engine]]:
    """The manager and a worker, with the images of a run."""
    if (why := lacking()) is not None:
        unavailable("swarm", why)
    building.ensure(engine, print)
    tags = images.current_tags(images.FOLDER, images.AGENTS)
    with (
        tempfile.TemporaryDirectory(prefix="testbed-") as folder,  # short: of Unix sockets
        swarm(Path(folder), [tags[kind] for kind in KINDS]) as found,
    ):
        yield found


@pytest.fixture
def on_swarm(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine]:
    monkeypatch.setenv("DOCKER_HOST", engines[0].url)
    return engines


def topology(path: Path, groups: list[dict[str, Any]] = DEVICES, **changes: Any) -> Path:
    host = os.uname().nodename
    devices = [
        {**group, "hosts": [name.replace("ENGINE", host) for name in group["hosts"]]} for group in groups
    ]
    return write_topology(path, task=TASK, devices=devices, rule={"name": "fedasync"}, **changes)


def left(engines: tuple[Engine, Engine]) -> list[str]:
    """All that any engine has of any run."""
    found = []
    filters = {"label": RUN_LABEL}
    for one in engines:
        api = one.client.api
        found += [c["Names"][0] for c in api.containers(all=True, filters=filters)]
        found += [n["Name"] for n in api.networks(filters=filters)]
        found += [v["Name"] for v in api.volumes(filters=filters)["Volumes"] or ()]
    api = engines[0].client.api
    for kind in (api.services, api.secrets, api.configs):
        found += [each["Spec"]["Name"] for each in kind(filters=filters)]
    return found


def nothing_is_left(engines: tuple[Engine, Engine]) -> None:
    """The last network of a worker, by which its engine was reached, is removed by the Swarm itself, a
    moment after its last task."""
    eventually(lambda: not left(engines))


def test_run_on_two_engines_survives_kills_and_is_resumed(
    on_swarm: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has a scenario. Then the broker is killed, then the controller; the run is resumed,
    changed by hand, its aggregator killed, and interrupted."""
    file = topology(
        tmp_path,
        scenario=[
            {"at": "1s", "set": "second-1", "cpu": 0.1, "link": {"up": "1mbit", "rtt": "60ms"}},
            {"at": "2s", "crash": "second-2", "restart_after": "1s"},
            {"at": "2500ms", "pause": "first", "for": "1s"},
        ],
        stop={"after": "5min"},
        evaluate={"every": "500ms"},
    )
    runs, kernels = tmp_path / "runs", "MKL_CBWR=COMPATIBLE"
    monkeypatch.setenv(*kernels.split("="))
    with started("up", file, "--runtime", "swarm", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        # Nodes may have other processors; the aggregator's is that of a replay.
        for component, chosen in ((AGGREGATOR, True), ("first", False)):
            (container,) = containers(on_swarm[0], component)
            found = on_swarm[0].client.api.inspect_container(container)["Config"]["Env"]
            assert (kernels in found) == chosen
        until(up, runs, lambda run: "resume" in acted(run))
        (broker,) = containers(on_swarm[0], BROKER)
        on_swarm[0].client.api.kill(broker)
        # Over each node's router to the new one; second-2 may still be starting.
        ended = "the broker ended with exit code 137"
        run = until(up, runs, lambda run: since(run, ended) >= {"first", "second-1"})
        for one, device in zip(on_swarm, ("first", "second-1"), strict=True):
            (container,) = containers(one, device)
            executor.put_files(one.client, container, DISK, {"kept": b"by its client"})
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    name = run.path.name
    runtimes = {live["run"]: live["runtime"] for live in json.loads(cli("ps", "--json").stdout)}
    assert runtimes[name] == "swarm"
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", on_swarm[1].url)
        assert name not in cli("ps").stdout  # whose containers a worker has is the manager's to say
    assert "Denied" not in cli("logs", name, cwd=tmp_path).stdout
    down = subprocess.run([*NO_OTHER_PROCESSES, *TESTBED, "down", "--all"], cwd=tmp_path)
    assert down.returncode == 0
    nothing_is_left(on_swarm)
    assert "aggregator" in {path.stem for path in (run.path / "logs").iterdir()}
    for device in ("first", "second-1"):
        kept = run.path / "state/clients" / device / "kept"
        assert kept.read_text() == "by its client"

    before = Finished.only_one_in(runs)
    with started("up", "--resume", name, "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (second,) = containers(on_swarm[1], "second-1")
        assert executor.read_file(on_swarm[1].client, second, f"{DISK}/kept") == b"by its client"
        until(up, runs, lambda run: going_on(run) == NAMES)
        for command in (["set", name, "first", "--cpu", "0.1"], ["kill", name, "second-1"]):
            done = cli(*command, cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        (aggregator,) = containers(on_swarm[0], AGGREGATOR)
        on_swarm[0].client.api.kill(aggregator)
        ended = "the aggregator ended with exit code 137"
        until(up, runs, lambda run: since(run, ended) >= {"first", "second-2"})
        _, told = interrupt(up)
    assert up.returncode == 130, told
    nothing_is_left(on_swarm)
    run = Finished.only_one_in(runs)
    assert (run.manifest["runtime"], run.manifest["outcome"]) == ("swarm", "interrupted")
    assert len(set(run.manifest["placement"].values())) == 2
    assert run.records[: len(before.records)] == before.records
    assert acted(before) == ["set", "set", "crash", "pause", "restart", "resume"]
    assert acted(run)[-2:] == ["set", "crash"]  # by hand, after what the resume has set again
    versions = [r.version for r in run.records if isinstance(r, events.VersionMade)]
    assert versions == list(range(1, len(versions) + 1))
    assert len({(u.client, u.dispatch) for u in run.updates}) == len(run.updates)  # none applied twice
    for u in run.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
    assert {s["device"] for s in run.telemetry} == NAMES
    assert '"clocks"' in (run.path / "fidelity.json").read_text()
    assert {path.stem for path in (run.path / "logs").iterdir()} >= {*NAMES, BROKER, "node.agent"}


@pytest.mark.usefixtures("forked_programs")
def test_real_device_joins_a_run_on_a_swarm(
    on_swarm: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is killed, and the run is taken down and resumed. At last a node
    agent is killed, without which nobody hears of the node's devices any more: the run ends."""
    manager = int((on_swarm[0].folder / "pid").read_text())
    inside = in_network_of(manager)
    with servers(tmp_path, ("pi1",), " OMP_NUM_THREADS=1", beside=manager) as hosts:
        monkeypatch.setenv("TESTBED_SSH", hosts.ssh)
        host = os.uname().nodename
        first, second = (
            {"name": name, "cpu": 0.3, "hosts": [f"{host}-{number}"]}
            for number, name in enumerate(("first", "second"), 1)
        )
        real = {"name": "pi", "hosts": ["ssh://pi1"], "python": sys.executable}
        file = write_topology(
            tmp_path,
            task=TASK,
            devices=[first, second, real],
            rule={"name": "fedfix", "period": "500ms"},  # clients wait for the next tick
            runtime={"name": "swarm"},
            server={"address": hosts.address, "port": PORT},
            dilation=1,
            stop={"after": "10min"},
        )
        names = {"first", "second", "pi"}
        runs = tmp_path / "runs"
        command = [*inside, *TESTBED]
        up_command = [*command, "up", str(file), "--runs", str(runs)]
        with subprocess.Popen(up_command, stdout=PIPE, stderr=STDOUT, text=True) as up:
            try:
                until_printed(up, "the run clock starts")
                until(up, runs, lambda run: {u.client for u in run.updates} == names)
            finally:
                up.kill()
        (path,) = runs.iterdir()
        down = subprocess.run([*command, "down", path.name, "--runs", str(runs)])
        assert down.returncode == 0
        nothing_is_left(on_swarm)
        assert [(one.processes(), one.files()) for one in hosts.machines] == [([], [])]
        resume = [*command, "up", "--resume", path.name, "--runs", str(runs)]
        with subprocess.Popen(resume, stdout=PIPE, stderr=STDOUT, text=True) as up:
            try:
                until(up, runs, lambda run: going_on(run) == names)
                worker = on_swarm[1]
                worker.client.api.kill(*containers(worker, NODE_AGENT))
                output = up.communicate(timeout=180)[0]
            finally:
                up.kill()
        assert up.returncode == 1, output
        assert f"the node agent of {host}-2 has ended" in output
        assert [(one.processes(), one.files()) for one in hosts.machines] == [([], [])]
    nothing_is_left(on_swarm)
    run = Finished.only_one_in(runs)
    assert len({(u.client, u.dispatch) for u in run.updates}) == len(run.updates)
    assert set(run.manifest["placement"]) == {"first", "second"}
    clocks = json.loads((run.path / "fidelity.json").read_text())["clocks"]
    assert set(clocks) == {f"{host}-2", "ssh://pi1"}


def test_device_that_exits_during_the_launch_ends_the_run_and_is_named(
    on_swarm: tuple[Engine, Engine], tmp_path: Path
) -> None:
    here = {"name": "first", **PACE, "hosts": ["ENGINE-1"]}
    there = {"name": "second", "count": 1, **PACE, "hosts": ["ENGINE-2"]}
    file = topology(tmp_path, [here, there], stop={"after": "5min"})
    worker = on_swarm[1]
    with started("up", file, "--runtime", "swarm", "--runs", tmp_path / "runs") as up:
        eventually(lambda: [one for one in containers(worker, "second-1") if has_shard(worker, one)])
        worker.client.api.kill(*containers(worker, "second-1"))
        told = up.communicate(timeout=180)[0]
    assert up.returncode == 1, told
    assert "second-1 ended before the run clock could start" in told
    nothing_is_left(on_swarm)


def test_task_that_fails_is_reported_with_its_log(on_swarm: tuple[Engine, Engine]) -> None:
    manager = on_swarm[0].client
    broken = Container(
        component="broken",
        name="testbed-r-2-broken",
        image=images.current_tags(images.FOLDER, images.AGENTS)["base"],
        command=("sh", "-c", "echo it broke; exit 3"),
        user=0,
        group=0,
        labels={RUN_LABEL: "r-2"},
        cgroup_parent="",
        sysctls={},
    )
    try:
        made = services.create(manager, broken, services.ServiceOptions())
        names = {node.id: node.name for node in swarm_nodes(manager)}
        with pytest.raises(HostError, match=r"broken could not start on .*\(3\)\nit broke$"):
            # Two of one: a look at the task while it runs would be enough for one.
            services.await_tasks(manager, {made: 2}, lambda _: "broken", names)
    finally:
        services.remove_rest(manager, "r-2")
    nothing_is_left(on_swarm)


def test_pending_cleanup_uses_engine_proxies_of_the_same_image(
    on_swarm: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """A node may have this image from a registry, and under no other name."""
    manager, image = on_swarm[0].client, "registry.example:5000/testbed-base:1"
    made = engine_proxies.EngineProxies(
        manager, swarm_nodes(manager), image, "r-1", {RUN_LABEL: "r-1"}, tmp_path
    )
    made.unreachable |= {made.others[0].id}
    try:
        with pytest.raises(HostError, match=f"{os.uname().nodename} does not answer .* down r-1"):
            removal.remove(manager, made, "r-1", None)
        assert engine_proxies.proxy_image(manager, "r-1") == image
    finally:
        services.remove_rest(manager, "r-1")
    nothing_is_left(on_swarm)


def test_node_lost_since_the_plan_is_reported_and_a_new_one_is_ignored(
    on_swarm: tuple[Engine, Engine], tmp_path: Path
) -> None:
    here, other = swarm_nodes(on_swarm[0].client)
    read = load(write_topology(tmp_path, devices=[{"name": "first", "cpu": 0.2}]))

    def planned(name: str, *known: Node) -> RunSpec:
        made = plan(read, "swarm", HostResources((0, 1), 2**34, nodes=known))
        return RunSpec(RunDirectory.create(tmp_path, name), read, made, {"first": 1})

    gone = replace(other, id="gone", name="the-gone-one")
    with pytest.raises(HostError, match="the-gone-one does not accept work"):
        launcher(planned("gone", here, gone), View()).__enter__()

    spec = planned("come", here)
    preparation.write(preparation.prepare(read, None), spec.directory)
    with launcher(spec, View()) as runtime:
        try:
            runtime.start()
            assert len(containers(on_swarm[0], "first")) == 1
        finally:
            runtime.stop()
    nothing_is_left(on_swarm)


def has_shard(engine: Engine, device: str) -> bool:
    return executor.read_file(engine.client, device, SHARD) is not None


def until(up: subprocess.Popen[str], runs: Path, there: Callable[[Finished], bool]) -> Finished:
    """Wait until the only run is as it should be."""
    while not there(found := Finished.only_one_in(runs)):
        if up.poll() is not None:
            pytest.fail("\n".join([*map(str, found.records[-20:]), up.communicate()[0]]))
        time.sleep(0.2)
    return found


def since(run: Finished, note: str) -> set[str]:
    """Return the clients with updates of models sent after the note that begins with `note`."""
    at = [r.at for r in run.records if isinstance(r, events.Note) and r.message.startswith(note)]
    return {u.client for u in run.updates if at and u.dispatched > at[0]}


def going_on(run: Finished) -> set[str]:
    """Return the clients with updates in later legs of the run."""
    begins = [i for i, r in enumerate(run.records) if isinstance(r, events.RunStarted)]
    later = run.records[begins[1] :] if len(begins) > 1 else []
    return {r.client for r in later if isinstance(r, events.UpdateApplied)}


def acted(run: Finished) -> list[str]:
    """Return the actions done to devices."""
    return [r.details["action"] for r in run.records if isinstance(r, events.Acted)]


def containers(engine: Engine, component: str) -> list[str]:
    """Ids of the containers of that component, of any run, that run."""
    found = engine.client.api.containers(filters={"label": f"{COMPONENT_LABEL}={component}"})
    return [one["Id"] for one in found]
