"""`testbed up` with real containers, a real broker and the kernel's own limits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pexpect
import pytest

from agents import events
from agents.wire import payloads
from analysis.device_states import timeline
from analysis.load import load
from testbed.host import kernel
from tests import attacks
from tests.running import (
    Finished,
    cli,
    interrupt,
    left_in_docker,
    run_to_its_end,
    started,
    until_printed,
    write_small_topology,
    write_topology,
)

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("built")]


def test_containers_have_least_privilege_and_ctrl_c_removes_them(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """From inside a device neither its client nor its init gains further access."""
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "batch_size": 32, "lr": 0.01}},
        devices=[
            {"name": "one", "cpu": 0.7, "timing": "300ms", "link": {"up": "5mbit"}},
            {"name": "two", "cpu": 0.2, "timing": "300ms"},
        ],
        rule={"name": "fedasync"},
        broker={"tls": True},
        stop={"after": "5min"},
    )
    with started("up", topology, "--runtime", "docker", "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        run_label = f"testbed.run={next((tmp_path / 'runs').iterdir()).name}"
        containers = engine.containers.list(filters={"label": run_label})
        by_component = {c.labels["testbed.part"]: c for c in containers}
        assert by_component.keys() == {"broker", "aggregator", "router", "one", "two"}
        for container in containers:
            host = container.attrs["HostConfig"]
            assert host["ReadonlyRootfs"]
            assert host["CapDrop"] == ["ALL"]
            assert not host["Privileged"]
            assert host["PidsLimit"] > 0
            assert host["Memory"] == host["MemorySwap"] > 2**28
            told: Any = container.exec_run("cat /proc/sys/net/ipv4/tcp_congestion_control").output
            assert told.decode().strip() == kernel.congestion_control()
            for bindings in (container.attrs["NetworkSettings"]["Ports"] or {}).values():
                assert {b["HostIp"] for b in bindings or []} <= {"127.0.0.1"}
        device = by_component["one"]
        processes = device.top(ps_args="-eo pid,uid,args")["Processes"]
        assert {uid for _, uid, args in processes if "agents.client" in args} == {"10001"}
        a_shell_is_the_clients(next((tmp_path / "runs").iterdir()), "one")
        attacked = attack_from(device, by_component)
        interrupt_leaves_nothing(up, engine, tmp_path / "runs")
    run = Finished.only_one_in(tmp_path / "runs")
    assert isinstance(run.records[-1], events.RunEnded)
    assert run.manifest["outcome"] == "interrupted"
    assert [row for row in attacked if row["refused by"] is None] == []
    assert len(attacked) > 100
    assert_no_effect_on("two", run)


def a_shell_is_the_clients(run: Path, device: str) -> None:
    """`testbed shell` on a terminal, and for one command."""
    arguments = ["-m", "testbed", "shell", str(run), device]
    shell = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=60, dimensions=(33, 99))
    shell.expect_exact("$ ")
    shell.sendline("stty size; hostname; id -u; exit 3")
    shell.expect("33 99\r\n")
    shell.expect(f"{device}\r\n10001\r\n")
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.exitstatus == 3
    said = cli("shell", run, device, "sh", "-c", "echo out; echo err >&2; exit 4")
    assert (said.returncode, said.stdout, said.stderr) == (4, "out\n", "err\n")
    refused = cli("shell", run, device)
    assert (refused.returncode, "a shell needs a terminal" in refused.stderr) == (2, True)


def attack_from(device: Any, by_component: dict[str, Any]) -> list[dict[str, str | None]]:
    """Print a table of the outcomes of all attacks from `device`, by its client and by its init."""

    def address(component: str, network: str) -> str:
        networks = by_component[component].attrs["NetworkSettings"]["Networks"]
        return next(str(one["IPAddress"]) for name, one in networks.items() if name.endswith(network))

    gateways = [
        one["Gateway"] for one in by_component["broker"].attrs["NetworkSettings"]["Networks"].values()
    ]
    own = address("one", "-data")
    run = device.labels["testbed.run"]
    with socket.create_server(("0.0.0.0", 0)) as service:  # noqa: S104  # what the host may have
        port = service.getsockname()[1]
        host = [own.rpartition(".")[0] + ".1", "172.17.0.1", *gateways]
        behind = [("broker", "-server"), ("broker", "-control"), ("aggregator", "-server")]
        facts = {
            "run": run,
            "device": "one",
            "other": "two",
            "server": address("router", "-data"),
            "others_address": address("two", "-data"),
            "reachable": {
                "the host": [(each, port) for each in host if each],
                "another device": [(address("two", "-data"), 8883)],
                "behind the router": [(address(*each), 1883) for each in behind],
            },
        }

        def attack(who: str, config: str, user: str) -> list[str]:
            told = json.dumps(facts | {"config": f"/testbed/{config}.json"})
            command = ["python3", "-c", Path(attacks.__file__).read_text(), who, told]
            code, output = device.exec_run(command, user=user)
            assert code == 0, output.decode()
            return str(output.decode()).splitlines()

        gid = device.attrs["Config"]["User"].partition(":")[2]
        # In turn: what init does to the interface the client has to bear, too.
        lines = [*attack("client", "client", "10001:10001"), *attack("init", "device", f"0:{gid}")]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        sys.stdout.write(f"{row['who']:8}{row['attack']:62}{row['refused by']}\n")
    return rows


def assert_no_effect_on(device: str, run: Finished) -> None:
    """`device` has learned all the time, and nobody but who attacked has lost a session."""
    applied = [update.applied for update in run.updates if update.client == device]
    assert max(b - a for a, b in itertools.pairwise(applied)) < 2
    assert applied[-1] > run.records[-1].at - 2
    log = (run.path / "logs" / "broker.log").read_text()
    assert attacks.reconnected(log) == {"one", "init/one"}
    assert set(run.manifest["refused"]) == {"one", "init/one", "?"}
    assert min(run.manifest["refused"].values()) >= 5
    rejected = [one for one in run.records if isinstance(one, events.UpdateRejected)]
    assert device not in {one.client for one in rejected}


def test_ctrl_c_during_startup_leaves_nothing(engine: docker.DockerClient, tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path)
    with started("up", topology, "--runtime", "docker", "--runs", tmp_path / "runs") as up:
        until_printed(up, "Starting broker")
        time.sleep(1)
        interrupt_leaves_nothing(up, engine, tmp_path / "runs")


def interrupt_leaves_nothing(up: subprocess.Popen[str], engine: docker.DockerClient, runs: Path) -> None:
    (run,) = runs.iterdir()
    took, output = interrupt(up)
    assert up.returncode == 130, output
    assert "Traceback" not in output
    assert left_in_docker(engine, run.name) == []
    assert took < 10


FAST_AND_SLOW: list[dict[str, Any]] = [
    {"name": "fast", "count": 2, "cpu": 0.25, "memory": "512MiB"},
    {"name": "slow", "count": 2, "cpu": 0.04, "memory": "512MiB"},
]
EVALUATE = {"every": "1s", "samples": 500}


def test_fedbuff_learns_mnist_and_slow_devices_are_stale(data_root: Path, tmp_path: Path) -> None:
    stop = {"target_accuracy": 0.8, "after": "2min"}
    changes = {"devices": FAST_AND_SLOW, "evaluate": EVALUATE, "stop": stop}
    topology = write_topology(tmp_path, "mnist-fedbuff", **changes)
    run = run_to_its_end(topology, "docker", "--data", data_root)
    assert run.manifest["outcome"] == "target_accuracy"
    stale = {
        group: statistics.mean(u.staleness for u in run.of_group(group)) for group in ("fast", "slow")
    }
    assert stale["slow"] > 2 * stale["fast"]


@pytest.mark.parametrize(
    ("task", "partition", "size"),
    [
        ("cifar10-resnet18", {"scheme": "resampled", "samples": 8}, 4 * (11_173_962 + 9600) + 8 * 20),
        ("shakespeare-lstm", {"scheme": "natural"}, 4 * 133_520),
    ],
)
def test_large_model_of_a_paper_runs_in_containers(
    task: str, partition: dict[str, Any], size: int, data_root: Path, tmp_path: Path
) -> None:
    """Updates of 44.7 MB, buffers among them; sequences of each role."""
    local = {"steps": 1, "batch_size": 4, "lr": 0.01}
    topology = write_topology(
        tmp_path,
        "resnet18",
        task={"name": task, "partition": partition, "local": local},
        evaluate={"every": "10min", "samples": 8},
        stop={"updates": 3, "after": "4min"},
    )
    run = run_to_its_end(topology, "docker", "--data", data_root)
    assert run.manifest["outcome"] == "updates"
    assert all(size < update.bytes < size + 2000 for update in run.updates)
    _, _, buffers = payloads.unpack((run.path / "models" / "final.safetensors").read_bytes())
    assert (buffers.integers > 0).all()  # batches that were counted


def test_same_topology_runs_with_another_rule_and_runtime(data_root: Path, tmp_path: Path) -> None:
    """Another rule and another runtime: the topology is the same, and the run ends well."""
    changes = {"rule": {"name": "fedasync"}, "evaluate": EVALUATE, "stop": {"updates": 8}}
    topology = write_topology(tmp_path, "mnist-fedbuff", devices=FAST_AND_SLOW, **changes)
    run = run_to_its_end(topology, "process", "--data", data_root)
    assert (run.manifest["outcome"], run.manifest["rule"]) == ("updates", "fedasync")
    assert len(run.updates) >= 8


@pytest.mark.timed  # others make networks, too
def test_down_removes_a_run_whose_controller_was_killed(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """`down` is called from another directory. The run has links, so that there is a router and traffic
    control to remove."""
    before = _network_state()
    link = {"up": "100mbit", "down": "100mbit", "rtt": "20ms"}  # measured in a moment
    topology = write_small_topology(tmp_path, devices=[{"name": "far", "cpu": 0.3, "link": link}])
    with started("up", topology, "--runtime", "docker", "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (run,) = (path.name for path in (tmp_path / "runs").iterdir())
    assert len(left_in_docker(engine, run)) == 9  # four containers, three networks, two control groups
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert cli("down", run, cwd=elsewhere).returncode == 0
    assert left_in_docker(engine, run) == []
    assert _network_state() == before


def _network_state() -> list[str]:
    """Everything that a run could leave on the host: namespaces, interfaces, qdiscs, and firewall
    rules."""
    commands = ("ip netns", "ip -brief link", "tc qdisc", "iptables -S", "iptables -t nat -S")
    found = [subprocess.run(each.split(), capture_output=True, text=True) for each in commands]
    return [done.stdout for done in found]


def test_ten_devices_run_in_containers(
    engine: docker.DockerClient,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Started in parallel; the times are printed, not asserted. Only sums leave the devices, and what
    that costs them is theirs."""
    privacy = {"secure": {"colluding": 4, "needed": 6}}
    devices = [{"name": "sensor", "count": 10, "cpu": 0.06, "memory": "384MiB"}]
    changes = {"devices": devices, "stop": {"after": "4s"}, "privacy": privacy}
    topology = write_topology(tmp_path, "twenty", **changes)
    run = run_to_its_end(topology, "docker")
    assert len(run.manifest["devices"]) == 10
    assert run.manifest["timings"].keys() == {"launch", "ready", "down"}
    assert all(u.masking > 0 for u in run.updates)
    record = load(run.path)
    assert "mask" in set(timeline(record)["state"])
    updates = record.updates["bytes"].sum()
    sent = record.telemetry.groupby("device", observed=True)["sent"].max().sum()
    assert sent > 3.5 * updates  # shares to 9 others, each half a model
    assert left_in_docker(engine, run.path.name) == []
