"""Services of a Swarm, as the engine's API has them."""

from __future__ import annotations

from testbed.images import Images
from testbed.runtimes.docker.specifications import Attachment, BridgeNetwork, Container, CpuLimits, Mount
from testbed.runtimes.swarm.node_preparation import images_to_push
from testbed.runtimes.swarm.node_services import without_group
from testbed.runtimes.swarm.services import (
    ServiceFile,
    ServiceOptions,
    Volume,
    network_arguments,
    service_arguments,
    short_name,
)

DEVICE = Container(
    component="pi",
    name="testbed-r-1-pi",
    image="testbed-agent:1",
    command=("python3", "-m", "agents.device.main", "/testbed/device.json"),
    user=0,
    group=0,
    labels={"testbed.run": "r-1"},
    environment={"OMP_NUM_THREADS": "1"},
    networks=(Attachment("testbed-r-1-data", ("pi",)),),
    mounts=(Mount("/runs/r-1/work/pi.json", "/testbed/client.json"),),
    cgroup_parent="/r-1",
    memory=512,
    cap_add=("NET_ADMIN",),
    sysctls={"net.ipv4.tcp_congestion_control": "cubic"},
)


def test_service_of_a_device_matches_the_golden_file() -> None:
    options = ServiceOptions(
        nodes=("node.id == n1",),
        secrets=[ServiceFile(id="s1", name="secret", target="/testbed/client.json", user=10001)],
        volumes=[Volume("control", "/testbed/control", read_only=True)],
        names={"server": "172.18.0.2"},
        cores=0.25,
    )
    made = service_arguments(DEVICE, options)
    task = made["task_template"]
    container = task.pop("ContainerSpec")
    assert (made["name"], made["mode"]) == ("testbed-r-1-pi", {"Replicated": {"Replicas": 1}})
    assert made["endpoint_spec"] == {"Mode": "dnsrr"}
    assert task["Resources"] == {
        "Limits": {"Pids": 128, "MemoryBytes": 512},
        "Reservations": {"NanoCPUs": 250_000_000, "MemoryBytes": 512},
    }
    assert task["RestartPolicy"] == {"Condition": "none"}
    assert task["Placement"] == {"Constraints": ["node.id == n1"]}
    assert task["Networks"] == [{"Target": "testbed-r-1-data", "Aliases": ["pi"]}]
    assert container["User"] == "0:0"
    assert container["Env"] == ["OMP_NUM_THREADS=1"]
    assert container["ReadOnly"]
    assert (container["CapabilityDrop"], container["CapabilityAdd"]) == (["ALL"], ["NET_ADMIN"])
    assert container["Sysctls"] == {"net.ipv4.tcp_congestion_control": "cubic"}
    assert container["DNSConfig"] == {"Nameservers": ["127.0.0.1"]}
    assert container["Hosts"] == ["172.18.0.2 server"]
    assert [mount["Type"] for mount in container["Mounts"]] == ["volume", "tmpfs"]
    assert container["Mounts"][0]["VolumeOptions"]["Labels"] == {"testbed.run": "r-1"}
    assert container["Secrets"] == [
        {
            "SecretID": "s1",
            "SecretName": "secret",
            "File": {"Name": "/testbed/client.json", "UID": "10001", "GID": "10001", "Mode": 0o400},
        }
    ]


def test_node_services_have_their_own_files() -> None:
    made = service_arguments(DEVICE, ServiceOptions(everywhere=True, binds=True))
    assert made["mode"] == {"Global": {}}
    (bind, _) = made["task_template"]["ContainerSpec"]["Mounts"]
    assert bind == {
        "Type": "bind",
        "Source": "/runs/r-1/work/pi.json",
        "Target": "/testbed/client.json",
        "ReadOnly": True,
    }


def test_networks_and_service_names() -> None:
    labels = {"testbed.run": "r-1"}
    assert (
        network_arguments(BridgeNetwork(name="testbed-r-1-server", labels=labels))["driver"] == "overlay"
    )
    bridge = network_arguments(
        BridgeNetwork(name="testbed-r-1-data", labels=labels, options={"mtu": "1450"})
    )
    assert (bridge["driver"], bridge["scope"], bridge["internal"]) == ("bridge", "swarm", True)
    long = "testbed-" + 60 * "x" + "-pi"
    assert len(short_name(long)) <= 63
    assert short_name(long) != short_name(long + "2")
    assert short_name(long).endswith("-pi")
    assert short_name(short_name(long)) == short_name(long)


def test_images_are_tagged_for_a_registry() -> None:
    groups = {"cam": "cam", "pi": "own.example:80/pi:4", "pi-2": "own.example:80/pi:4"}
    built = Images(
        agent="testbed-agent:1", broker="testbed-broker:2", base="testbed-base:3", groups=groups
    )
    assert images_to_push(built, "registry.example:5000/team/") == [
        ("testbed-base:3", "registry.example:5000/team/testbed-base", "3"),
        ("testbed-agent:1", "registry.example:5000/team/testbed-agent", "1"),
        ("testbed-broker:2", "registry.example:5000/team/testbed-broker", "2"),
        ("cam", "registry.example:5000/team/cam", "latest"),
        ("own.example:80/pi:4", "registry.example:5000/team/own.example-80/pi", "4"),
    ]


def test_device_outside_the_group_gets_its_share_of_the_groups_weight() -> None:
    """The weight is relative to single processes: 50 for a whole core of devices
    (`launch.group_weights`)."""
    assert without_group(CpuLimits(quota=1, weight=10_000)).weight == 50 * 1024
    assert without_group(CpuLimits(weight=2_000)).weight == 10 * 1024
    assert without_group(CpuLimits(weight=100_000)).weight == 262_144  # the kernel's most
    assert without_group(CpuLimits(quota=1)).weight is None
