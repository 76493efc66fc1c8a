"""Runs with real devices: machines with an SSH server, each in namespaces of its own, beside local
processes or containers."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import pytest

from agents import events
from agents.device import link as device_link
from testbed import bundle
from testbed.fidelity import host_load
from testbed.runtimes.ssh import environment
from testbed.runtimes.ssh.hosts import RealDevice
from tests.chaos import Outboxes, unaccounted
from tests.conftest import unavailable
from tests.platforms.arm_board import PYTHON, arm_board
from tests.running import (
    TOPOLOGIES,
    Finished,
    Testbed,
    interrupt,
    left_as_processes,
    left_in_docker,
    started,
    until_printed,
)
from tests.ssh_servers import SshServer, SshServers, servers, write_with_real_devices
from tests.testbed.test_repetition import stranger
from tests.waiting import eventually

__all__ = ["stranger"]
PORT = 18_890
ARM64 = "TESTBED_ARM64" in os.environ
"""Whether one machine more has another processor, which is emulated and slow (`make platforms`)."""
SLOWNESS = 10 if ARM64 else 1
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{0}/podman"
runroot = "{0}/podman-run"
"""
PODMAN = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
volumes = [{volumes}]
[engine]
runtime = "runc"
"""
"""Settings with which Podman runs in containers, too, and on a host with both versions of cgroups. All
its containers see this machine's libraries, so that the image of a client can be small."""
LIBRARIES = ("/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix)
SMALL_IMAGE = f"""\
FROM scratch
COPY agents /opt/testbed/agents
ENV PATH={sys.prefix}/bin:/usr/bin PYTHONPATH=/opt/testbed
"""
"""Dockerfile of the agents without libraries: to send PyTorch takes more than a minute of CPU time."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    folder = tmp_path_factory.mktemp("hosts")
    storage, engine = folder / "storage.conf", folder / "containers.conf"
    storage.write_text(STORAGE.format(folder))
    volumes = [f'"{one}:{one}:ro"' for one in dict.fromkeys(LIBRARIES) if Path(one).exists()]
    engine.write_text(PODMAN.format(volumes=", ".join(volumes)))
    podman = f" CONTAINERS_STORAGE_CONF={storage} CONTAINERS_CONF={engine}"
    one_thread = " OMP_NUM_THREADS=1"  # two would wait for each other where a core is busy
    docker_host = f" DOCKER_HOST={url}" if (url := os.environ.get("DOCKER_HOST")) else ""
    environment = podman + one_thread + docker_host
    with ExitStack() as stack:
        roots = {"arm": stack.enter_context(arm_board())} if ARM64 else {}
        names = ("pi1", "pi2", *roots)
        yield stack.enter_context(servers(folder, names, environment, roots=roots))


@pytest.fixture(autouse=True)
def ssh(hosts: SshServers, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.repair()
    monkeypatch.setenv("TESTBED_SSH", hosts.ssh)


def topology(folder: Path, hosts: SshServers, **changes: Any) -> Path:
    pis = {"name": "pi", "hosts": ["root@pi1", "ssh://pi2"], "python": sys.executable}
    return write_with_real_devices(folder, hosts, PORT, pis, **changes)


def groups(run: Path) -> list[Path]:
    """Control groups of real devices of the run in the directory `run`. The machines share them."""
    return [*Path("/sys/fs/cgroup").glob(f"**/edge-fl-testbed-{run.name}-*")]


def assert_whole(run: Finished) -> None:
    """Each update was applied once, and no client lost one that it had finished."""
    counted = Counter((update.client, update.dispatch) for update in run.updates)
    assert {key: count for key, count in counted.items() if count > 1} == {}


@pytest.mark.hosts
def test_real_and_emulated_devices_share_a_run(
    testbed: Testbed, hosts: SshServers, tmp_path: Path
) -> None:
    """With a task of the user's own. One of them leaves and joins again, by the scenario."""
    own = {"name": "circle:Circle", "local": {"steps": 20, "lr": 0.1}}
    code = str(TOPOLOGIES / "own" / "circle.py")
    scenario = [{"at": "2s", "leave": "pi-2"}, {"at": "3s", "join": "pi-2"}]
    scenario += [{"at": "2s", "crash": "pi-1", "restart_after": "1s"}]
    file = topology(tmp_path, hosts, scenario=scenario, stop={"after": "20s"}, task=own, code=code)
    planned = testbed("plan", file)
    assert f"{hosts.address}, port {PORT}" in planned.out
    done = testbed("up", file, "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    assert {update.client for update in run.updates} == {"near", "pi-1", "pi-2"}
    assert_whole(run)
    acted = [r for r in run.records if isinstance(r, events.Acted)]
    assert len(acted) == 4
    back = [r.client for r in run.records if isinstance(r, events.ClientStatus) and r.state == "ready"]
    assert {"pi-1", "pi-2"} <= set(back)
    assert run.manifest["devices"]["pi-1"]["host"] == "root@pi1"
    measured = {line["device"] for line in run.telemetry if "cpu" in line}
    assert measured == {"near", "pi-1", "pi-2"}
    assert "clocks: within" in done.out
    assert (run.path / "logs" / "pi-1.log").is_file()
    assert not (run.path / "hosts.json").exists()
    refused = testbed("shell", run.path, "pi-1")
    assert (refused.code, "ssh root@pi1" in refused.err) == (2, True)
    assert hosts.left() == []
    assert left_as_processes(run.path.name) == []


def kill(machine: SshServer, pattern: str) -> None:
    """Kill the processes whose command contains `pattern`, and wait until others have replaced them."""
    before = {*machine.processes(pattern)}
    assert before, pattern
    for process in before:
        process.kill()

    def replaced() -> bool:
        now = machine.processes(pattern)
        return bool(now) and before.isdisjoint(now)

    eventually(replaced, 120 * SLOWNESS)


@pytest.mark.timeout(600 * SLOWNESS)
@pytest.mark.hosts
def test_containers_and_real_devices_outlive_kills_cut_links_and_a_resume(
    engine: docker.DockerClient, testbed: Testbed, hosts: SshServers, tmp_path: Path
) -> None:
    """Each device is killed in turn, and each link is cut for 30 s. Then the controller is killed, and
    the run is resumed. No finished update is lost or applied twice, and nothing is left anywhere."""
    first, second, *others = hosts.machines
    runs, names = tmp_path / "runs", {"box-1", "box-2", "pi-1", "pi-2", *(one.name for one in others)}
    boxes = {"name": "box", "count": 2, "cpu": 0.15, "link": {"up": "5mbit", "rtt": "20ms"}}
    pis = {"name": "pi", "hosts": ["root@pi1", "ssh://pi2"], "python": sys.executable}
    devices = [boxes, pis, *({"name": "arm", "hosts": ["root@arm"], "python": PYTHON} for _ in others)]
    scenario = [{"at": f"{n}s", "crash": f"box-{n}", "restart_after": "1s"} for n in (1, 2)]
    scenario += [{"at": "8s", "disconnect": "box", "for": "30s"}]
    times = {"stop": {"after": f"{10 * SLOWNESS}min"}, "start": {"timeout": f"{5 * SLOWNESS}min"}}
    changes = {"scenario": scenario, "runtime": {"name": "docker"}, **times}
    file = topology(tmp_path, hosts, devices=devices, **changes)

    def each_since(kind: type[events.Record]) -> bool:
        return since_last(Finished.only_one_in(runs), kind) == names

    with Outboxes(runs, sorted(names), [machine.home for machine in hosts.machines]) as outboxes:
        with started("up", file, "--runs", runs) as up:
            until_printed(up, "the run clock starts")
            second.unplug()
            cut = time.monotonic()
            kill(first, "agents.client.main")
            kill(first, "agents.device.main")
            kill(first, "agents.remote.keeper")
            first.power_off()
            time.sleep(1)
            first.power_on()
            eventually(lambda: first.processes("agents.client.main") != [])
            time.sleep(max(0.0, cut + 30 - time.monotonic()))
            second.plug()
            kill(second, "agents.client.main")
            for other in others:
                kill(other, "agents.client.main")
            for machine in (first, *others):
                machine.unplug()
            time.sleep(30)
            for machine in (first, *others):
                machine.plug()
            (run,) = runs.iterdir()
            eventually(lambda: "no contact with pi-1" in reasons(Finished.only_one_in(runs)))
            eventually(lambda: each_since(events.Disrupted), 120 * SLOWNESS)
            os.kill(up.pid, signal.SIGKILL)
            up.wait()
        assert testbed("down", run.name, "--runs", runs).code == 0
        before = Finished.only_one_in(runs).updates[-1].applied
        with started("up", "--resume", run.name, "--runs", runs) as up:
            until_printed(up, "the run clock starts")
            eventually(lambda: names <= {*begun_after(runs, before)}, 120 * SLOWNESS)
            _, output = interrupt(up)
        assert up.returncode == 130, output
    done = Finished.only_one_in(runs)
    assert_whole(done)
    kept = {(path.parent.name, int(path.stem)) for path in run.glob("state/clients/*/*.update")}
    assert set(unaccounted(outboxes.finished, done.records)) <= kept
    told = reasons(done)
    assert told.count("the processes of pi-1") >= 3, told
    assert "no contact with pi-2" in told
    assert hosts.left() == left_as_processes(run.name) == left_in_docker(engine, run.name) == []
    socket.create_server((hosts.address, PORT)).close()


def all_work(runs: Path, names: set[str]) -> None:
    """Wait until each of these clients has an update in the only run."""
    eventually(lambda: {update.client for update in Finished.only_one_in(runs).updates} >= names)


def reasons(run: Finished) -> str:
    """Lines with the reasons of disruptions."""
    return "\n".join(r.reason for r in run.records if isinstance(r, events.Disrupted))


def since_last(run: Finished, kind: type[events.Record]) -> set[str]:
    """Clients with updates of models that were sent after the last record of this kind."""
    last = max((n for n, record in enumerate(run.records) if isinstance(record, kind)), default=0)
    later = run.records[last:]
    begun = getattr(run.records[last], "at", 0.0)
    return {r.client for r in later if isinstance(r, events.UpdateApplied) and r.dispatched > begun}


def begun_after(runs: Path, at: float) -> list[str]:
    """Client of each update of a model that was sent after `at` (s)."""
    return [one.client for one in Finished.only_one_in(runs).updates if one.dispatched > at]


@pytest.mark.hosts
def test_killed_controller_is_cleaned_up_after_and_its_run_resumed(
    testbed: Testbed, hosts: SshServers, tmp_path: Path
) -> None:
    """The devices are limited. What limits them goes, too."""
    runs = tmp_path / "runs"
    limits = {"shape": True, "cpu": 0.5, "link": {"up": "20mbit", "down": "30mbit"}}
    pis = {"name": "pi", "hosts": ["root@pi1", "ssh://pi2"], "python": sys.executable, **limits}
    devices = [{"name": "near", "cpu": 0.3}, pis]
    file = topology(tmp_path, hosts, stop={"after": "6s"}, devices=devices)
    with started("up", file, "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        time.sleep(2)
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (path,) = runs.iterdir()
    assert hosts.left() != []  # the devices look for the broker for some minutes
    first, second = hosts.machines
    assert {"eth0 tbf", "eth0 ingress"} <= {*first.limits()}
    assert len({group.name for group in groups(path)}) == 2
    for process in first.processes("agents.remote.keeper"):
        process.kill()
    second.power_off()
    down = testbed("down", path.name, "--runs", runs)
    assert down.code == 1
    assert "ssh://pi2" in down.err
    assert "testbed down" in down.err
    assert first.processes() == first.files() == []
    assert first.limits() == []
    assert {group.name for group in groups(path)} == {f"edge-fl-testbed-{path.name}-pi-2"}
    second.power_on()
    assert path.name in testbed("ps", "--runs", runs).out
    assert testbed("down", path.name, "--runs", runs).code == 0
    assert hosts.left() == groups(path) == []
    before = len(Finished.only_one_in(runs).updates)
    done = testbed("up", "--resume", path.name, "--runs", runs)
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(runs)
    assert len(run.updates) > before
    assert_whole(run)
    assert hosts.left() == groups(path) == []


@pytest.mark.hosts
def test_interrupt_leaves_nothing_on_real_devices(hosts: SshServers, tmp_path: Path) -> None:
    """Two devices have a machine in common, but not a login."""
    pis = {"name": "pi", "hosts": ["root@pi1", "ssh://pi2", "root@pi1"], "python": sys.executable}
    file = topology(tmp_path, hosts, devices=[{"name": "near", "cpu": 0.3}, pis])
    for stage in ("Preparing 3 real devices", "the run clock starts"):
        runs = tmp_path / stage
        with started("up", file, "--runs", runs) as up:
            until_printed(up, stage)
            if "clock" in stage:
                first = hosts.machines[0].home
                logins = [json.loads(one.read_text())["broker"] for one in first.rglob("client.json")]
                for key in ("username", "password"):
                    assert len({login[key] for login in logins}) == 2
                all_work(runs, {"near", "pi-1", "pi-2", "pi-3"})
            _, output = interrupt(up)
        assert up.returncode == 130, output
        assert "Traceback" not in output
        assert hosts.left() == []


@pytest.mark.timed
def test_limits_of_a_real_device_are_kept_and_judged(
    testbed: Testbed, hosts: SshServers, tmp_path: Path
) -> None:
    """A machine with settings of its own is refused, and left as it is. Updates are compressed."""
    link = {"up": "4mbit", "down": "9mbit", "compression": {"kind": "int8"}}
    pi = {"name": "pi", "hosts": ["root@pi1"], "python": sys.executable, "shape": True, "link": link}
    devices = [{"name": "near", "cpu": 0.2}, {**pi, "cpu": 0.2, "local": {"steps": 800}}]
    rule = {"name": "fedasync"}
    file = topology(tmp_path, hosts, devices=devices, rule=rule, stop={"after": "8s"})
    first = hosts.machines[0]
    first.output("tc qdisc add dev eth0 root handle 7: pfifo limit 900")
    refused = testbed("up", file, "--runs", tmp_path / "runs")
    assert refused.code == 1
    assert "root@pi1: eth0 has the qdisc pfifo 7:" in refused.err
    assert "pfifo 7:" in first.output("tc qdisc show dev eth0")
    first.output("tc qdisc del dev eth0 root")
    done = testbed("up", file, "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    figures = json.loads((run.path / "fidelity.json").read_text())["devices"]["pi"]
    assert (figures["up"]["asked"], figures["down"]["asked"]) == (4e6, 9e6)
    assert abs(figures["up"]["error"]) < 6, figures
    assert abs(figures["down"]["error"]) < 6, figures
    assert figures["cpu"]["asked"] == 0.2
    assert -25 < figures["cpu"]["error"] < 6, figures  # less if others want these cores, too
    assert figures.get("wrong_limits", []) == []
    assert {update.client for update in run.updates} == {"near", "pi"}
    saved = {update.client: update.bytes_before - update.bytes for update in run.updates}
    assert saved["near"] == 0
    assert 1500 < saved["pi"] < 3 * 650  # of 650 float32 values
    assert hosts.left() == groups(run.path) == []


@pytest.mark.timed
@pytest.mark.usefixtures("stranger")
def test_link_of_a_real_device_is_measured_again_on_a_busy_host(
    testbed: Testbed, hosts: SshServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody gives it half of its rate before the first measurement, and all before the second."""
    limits = {"shape": True, "cpu": 0.2, "link": {"up": "4mbit", "down": "9mbit"}}
    pi = {"name": "pi", "hosts": ["root@pi1"], "python": sys.executable, **limits}
    file = topology(tmp_path, hosts, devices=[{"name": "near", "cpu": 0.2}, pi])
    first, rates, measure = hosts.machines[0], [2_000_000, 4_000_000], RealDevice.measure

    def altered(device: RealDevice, *, is_shaped: bool = False) -> None:
        if is_shaped:
            eventually(lambda: any(name.endswith("/shaped") for name in first.files()))
            first.output(f"tc qdisc replace dev eth0 root handle 1: {device_link._tbf(rates.pop(0))}")
        measure(device, is_shaped=is_shaped)

    monkeypatch.setattr(RealDevice, "measure", altered)
    monkeypatch.setattr(host_load, "PAUSES", (0.5,))
    done = testbed("up", file, "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    assert "Measuring 1 link again: the host is busy (others use " in done.out
    assert "root@pi1" in done.out.partition("Measuring 1 link again")[2].partition("ready after")[0]
    assert rates == []
    run = Finished.only_one_in(tmp_path / "runs")
    figures = json.loads((run.path / "fidelity.json").read_text())["devices"]["pi"]
    assert abs(figures["up"]["error"]) < 10, figures
    assert hosts.left() == groups(run.path) == []


@pytest.mark.hosts
def test_unfit_real_devices_are_named_before_the_run(
    testbed: Testbed, hosts: SshServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once, each with cause and mend. Nothing is left of the run."""
    devices = [
        {"name": "no-python", "hosts": ["root@pi1"], "python": "/nowhere/python3"},
        {"name": "bare", "hosts": ["root@pi2"], "python": "/usr/bin/python3"},
        {"name": "unknown", "hosts": ["root@no-such-host.invalid"]},
    ]
    file = topology(tmp_path, hosts, devices=devices)
    up = testbed("up", file, "--runs", tmp_path / "runs")
    assert up.code == 1
    assert "root@pi1: it has no /nowhere/python3" in up.err
    assert "root@pi2: /usr/bin/python3 lacks" in up.err
    assert "root@no-such-host.invalid: its name is unknown" in up.err
    assert not (tmp_path / "runs").exists()
    key = (hosts.machines[0].folder / "known").read_text()
    other = key.replace("AAAA", "AAAB", 1)
    changed = tmp_path / "known"
    changed.write_text(other)
    monkeypatch.setenv("TESTBED_SSH", f"{hosts.ssh} -o UserKnownHostsFile={changed}")
    refused = testbed("up", topology(tmp_path, hosts), "--runs", tmp_path / "runs")
    assert refused.code == 1
    assert "host key" in refused.err
    monkeypatch.setenv("TESTBED_SSH", hosts.ssh)
    unreachable = topology(tmp_path, hosts, server={"address": "127.0.0.1", "port": PORT})
    told = testbed("up", unreachable, "--runs", tmp_path / "runs").err
    assert f"root@pi1: it cannot connect to 127.0.0.1, port {PORT}" in told
    elsewhere = topology(tmp_path, hosts, server={"address": "192.0.2.77"})
    assert "server.address 192.0.2.77" in testbed("up", elsewhere, "--runs", tmp_path / "runs").err


@pytest.mark.hosts
def test_device_is_inspected_and_cleaned(testbed: Testbed, hosts: SshServers, tmp_path: Path) -> None:
    first = hosts.machines[0]
    left_behind = first.home / ".cache" / "edge-fl-testbed" / "environments" / "abc" / "pyvenv.cfg"
    left_behind.parent.mkdir(parents=True)
    left_behind.touch()
    found = json.loads(testbed("doctor", "ssh://pi1", "root@nowhere.invalid", "--json").out)
    assert [one["status"] for one in found] == ["ok", "missing"]
    assert f"address: {hosts.address}" in found[0]["detail"]
    assert "shape: true can limit it" in found[0]["detail"]
    assert testbed("doctor", "--clean", "ssh://pi1").code == 0
    assert hosts.left() == []
    shown = testbed("up", topology(tmp_path, hosts), "--dry-run", "--runs", tmp_path / "runs").out
    assert f"{hosts.ssh} -T -o BatchMode=yes" in shown
    assert "agents.remote.keeper" in shown
    assert not (tmp_path / "runs").exists()


def containers(hosts: SshServers, *engine: str) -> dict[str, str]:
    """Id of each container of the testbed on the machines, with its device's folder."""
    shown = '{{.ID}} {{.Label "edge-fl-testbed"}}'
    listed = subprocess.run(
        [*(engine or ("docker",)), "ps", "--all", "--no-trunc", "--format", shown],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = [line.split() for line in listed.splitlines()]
    homes = tuple(str(machine.home) for machine in hosts.machines)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].startswith(homes)}


@pytest.mark.docker
@pytest.mark.hosts
def test_contained_client_has_no_rights_and_is_removed_after_kills(
    testbed: Testbed, hosts: SshServers, tmp_path: Path
) -> None:
    """Kills of the keeper, of the client, and of the controller."""
    testbed("images", "build")
    devices = [
        {"name": "near", "cpu": 0.3},
        {"name": "pi", "hosts": ["root@pi1"], "container": "docker"},
    ]
    file, runs = topology(tmp_path, hosts, devices=devices, stop={"after": "90s"}), tmp_path / "runs"
    first = hosts.machines[0]
    with started("up", file, "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (before,) = containers(hosts)
        (seen,) = json.loads(subprocess.check_output(["docker", "inspect", before]))
        assert seen["HostConfig"]["CapDrop"] == ["ALL"]
        assert seen["HostConfig"]["ReadonlyRootfs"]
        assert seen["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
        writable = [mount["Destination"] for mount in seen["Mounts"] if mount["RW"]]
        assert writable == ["/device/disk"]
        (keeper,) = first.processes("agents.remote.keeper")
        keeper.kill()
        eventually(lambda: [*containers(hosts)] not in ([], [before]))
        (second,) = containers(hosts)
        status = Path(f"/proc/{pid_of(second)}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        subprocess.run(["docker", "kill", second], check=True, capture_output=True)
        eventually(lambda: [*containers(hosts)] not in ([], [second]))
        eventually(lambda: "pi" in [one.client for one in Finished.only_one_in(runs).updates])
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (path,) = runs.iterdir()
    assert len(containers(hosts)) == 1
    assert testbed("down", path.name, "--runs", runs).code == 0
    assert containers(hosts) == {}
    assert hosts.left() == []
    assert_whole(Finished.only_one_in(runs))


@pytest.fixture
def small_image(engine: docker.DockerClient, tmp_path: Path) -> Iterator[str]:
    """Tag of an image for clients that is made for this test alone."""
    folder = tmp_path / "small"
    shutil.copytree(bundle.AGENTS, folder / "agents")
    (folder / "Dockerfile").write_text(SMALL_IMAGE)
    tag = f"testbed-small:{secrets.token_hex(6)}"
    engine.images.build(path=str(folder), tag=tag, rm=True, forcerm=True)
    yield tag
    engine.images.remove(tag)


@pytest.mark.docker
@pytest.mark.hosts
def test_image_is_sent_to_an_engine_that_lacks_it(
    testbed: Testbed,
    hosts: SshServers,
    tmp_path: Path,
    small_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("podman") is None:
        unavailable("podman", "its program is not installed")
    monkeypatch.setattr(environment, "image_tag", lambda _: small_image)
    devices = [
        {"name": "near", "cpu": 0.3},
        {"name": "pi", "hosts": ["root@pi1"], "container": "podman"},
    ]
    file = topology(tmp_path, hosts, devices=devices, stop={"after": "5s"})
    podman = ["env", f"CONTAINERS_STORAGE_CONF={hosts.machines[0].folder}/storage.conf", "podman"]
    done = testbed("up", file, "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    run = Finished.only_one_in(tmp_path / "runs")
    assert {update.client for update in run.updates} == {"near", "pi"}
    assert containers(hosts, *podman) == {}
    assert small_image in listed(podman)
    assert testbed("doctor", "--clean", "root@pi1").code == 0
    assert listed(podman) == ""
    assert hosts.left() == []


def listed(engine: list[str]) -> str:
    """Names and tags of the images that the engine has."""
    shown = "{{.Repository}}:{{.Tag}}"
    return subprocess.check_output([*engine, "images", "--format", shown], text=True)


def pid_of(container: str) -> int:
    """Process id of the client in a container."""
    shown = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    return int(subprocess.check_output(shown))
