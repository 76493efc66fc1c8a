"""`testbed up` with real containers, a real broker and the kernel's own limits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pexpect
import pytest

from agents import events
from agents.wire import payloads
from testbed.host import kernel
from testbed.runtimes.docker.specifications import RUN_LABEL
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
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("built")]


def test_containers_have_least_privilege_and_ctrl_c_removes_them(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """From inside a device neither its client nor its init gains further access."""
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "batch_size": 32, "lr": 0.01}},
        devices=[
            {"name": "one", "cpu": 0.7, "timing": "300ms", "link": {"rtt": "10ms"}},
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
        before = len(Finished.only_one_in(tmp_path / "runs").of_group("two"))
        attacked = attack_from(device, by_component)
        during = len(Finished.only_one_in(tmp_path / "runs").of_group("two"))
        assert during > before
        eventually(lambda: len(Finished.only_one_in(tmp_path / "runs").of_group("two")) > during)
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
    shell = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=120, dimensions=(33, 99))
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
    """Nobody but who attacked has lost a session, and no update of `device` was refused."""
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
        interrupt_leaves_nothing(up, engine, tmp_path / "runs")


def interrupt_leaves_nothing(up: subprocess.Popen[str], engine: docker.DockerClient, runs: Path) -> None:
    (run,) = runs.iterdir()
    _, output = interrupt(up)
    assert up.returncode == 130, output
    assert "Traceback" not in output
    assert left_in_docker(engine, run.name) == []


def test_large_model_of_a_paper_runs_in_containers(data_root: Path, tmp_path: Path) -> None:
    """Updates of 44.7 MB with buffers, learned from a dataset on this host."""
    devices = [{"name": "d", "count": 2, "cpu": 0.4, "memory": "1GiB"}]
    topology = write_topology(
        tmp_path,
        "resnet18",
        task={
            "name": "cifar10-resnet18",
            "partition": {"scheme": "resampled", "samples": 8},
            "local": {"steps": 1, "batch_size": 4, "lr": 0.01},
        },
        devices=devices,
        evaluate={"every": "10min", "samples": 8},
        stop={"updates": 3, "after": "4min"},
    )
    run = run_to_its_end(topology, "docker", "--data", data_root)
    assert run.manifest["outcome"] == "updates"
    size = 4 * (11_173_962 + 9600) + 8 * 20
    assert all(size < update.bytes < size + 2000 for update in run.updates)
    _, _, buffers = payloads.unpack((run.path / "models" / "final.safetensors").read_bytes())
    assert (buffers.integers > 0).all()  # batches that were counted


def test_run_whose_controller_was_killed_is_taken_down_and_resumed(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    """`down` is called from another directory. The run has a link, so that there is a router and traffic
    control to remove."""
    devices = [{"name": "far", "cpu": 0.3, "timing": "50ms", "link": {"rtt": "20ms"}}]
    changes: dict[str, Any] = {"rule": {"name": "fedasync"}, "stop": {"updates": 60, "after": "4min"}}
    topology = write_topology(tmp_path, devices=devices, **changes)
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "docker", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        eventually(lambda: Finished.only_one_in(runs).updates)
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (run,) = (path.name for path in runs.iterdir())
    assert len(left_in_docker(engine, run)) == 9  # four containers, three networks, two control groups
    networks = engine.api.networks(filters={"label": f"{RUN_LABEL}={run}"})
    interfaces = [network["Id"][:12] for network in networks]
    assert all(name in network_state() for name in interfaces)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert cli("down", run, cwd=elsewhere).returncode == 0
    assert left_in_docker(engine, run) == []
    assert not any(name in network_state() for name in interfaces)
    before = Finished.only_one_in(runs).records
    resumed = cli("up", "--resume", run, "--runs", runs)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = Finished.only_one_in(runs)
    assert after.records[: len(before)] == before
    assert (after.manifest["runtime"], after.manifest["outcome"]) == ("docker", "updates")
    assert len({(u.client, u.dispatch) for u in after.updates}) == len(after.updates) >= 60
    assert left_in_docker(engine, run) == []


def network_state() -> str:
    """Interfaces, qdiscs and firewall rules of this host: all that a run's networks could leave."""
    commands = ("ip -brief link", "tc qdisc", "iptables -S", "iptables -t nat -S")
    return "".join(subprocess.check_output(each.split(), text=True) for each in commands)
