"""Segments at the router: the tree by literal numbers, and the kernel's classes in a namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from agents.config import Segment
from agents.device.link import LinkError
from agents.device.netlink import ShapedClass
from agents.links.max_min import rates_on
from agents.router.segments import Leaf, SegmentTree, frame, redirection
from tests.conftest import unavailable

BACKHAUL = Segment("backhaul", up=8_000_000)
CELL = Segment("cell", "backhaul", up=2_000_000, rtt=0.02)
LEAVES = [
    Leaf(0x1000, "cell", "src", "10.0.0.2"),
    Leaf(0x1001, "cell", "src", "10.0.0.3"),
    Leaf(0x1002, "backhaul", "src", "10.0.0.4"),
]
TREE = SegmentTree([BACKHAUL, CELL], {"up": LEAVES, "down": []})


def test_leaves_borrow_all_of_their_rate_from_the_segments() -> None:
    assert TREE.commands("up")[:5] == [
        "qdisc add dev segup root handle 1: htb default 0",
        "class replace dev segup parent 1: classid 1:1 htb rate 8000000bit ceil 8000000bit burst 2000 "
        "cburst 2000",
        "class replace dev segup parent 1:1 classid 1:2 htb rate 8bit ceil 2000000bit burst 1514 "
        "cburst 1514",
        "class replace dev segup parent 1:2 classid 1:1000 htb rate 8bit ceil 100000000000bit "
        "burst 1514 cburst 1000000 quantum 1514 prio 1",
        "qdisc replace dev segup parent 1:1000 handle 1000: tbf rate 100000000000bit burst 1000000 "
        "limit 50000 peakrate 200000000000bit mtu 1514",
    ]


def test_shares_are_max_min_fair_over_devices() -> None:
    def of(*leaves: Leaf) -> list[float]:
        return [*rates_on({leaf: leaf.segment for leaf in leaves}, TREE.segments, "up").values()]

    assert of(*LEAVES) == [1e6, 1e6, 6e6]
    assert of(*LEAVES[:2]) == [1e6, 1e6]
    assert of(LEAVES[2]) == [8e6]
    assert rates_on({"a": "cell"}, TREE.segments, "down") == {}


def test_classes_that_the_kernel_made_otherwise_are_found() -> None:
    made = {
        1: ShapedClass(0, 1_000_000, 1_000_000, 0),
        2: ShapedClass(1, 1, 250_000, 0),
        **{leaf.number: ShapedClass(2, 1, 12_500_000_000, 0) for leaf in LEAVES},
    }
    TREE.check("up", made)
    with pytest.raises(LinkError, match=r"8000000 bit/s up for segment backhaul.*8 bit/s"):
        TREE.check("up", {**made, 1: ShapedClass(0, 1, 1, 0)})
    with pytest.raises(LinkError, match=r"no class for 10.0.0.4 in backhaul"):
        TREE.check("up", {number: one for number, one in made.items() if number != 0x1002})


def test_trees_deeper_than_the_kernels_are_refused() -> None:
    chain = [Segment("s0"), *(Segment(f"s{n}", f"s{n - 1}") for n in range(1, 8))]
    with pytest.raises(LinkError, match="segment s7 is at level 8"):
        SegmentTree(chain, {"up": [], "down": []})


def test_frames_carry_the_address_in_the_right_field() -> None:
    assert frame("src", "10.0.0.2", 100)[26:30] == bytes([10, 0, 0, 2])
    assert frame("dst", "10.0.0.2", 100)[30:34] == bytes([10, 0, 0, 2])
    assert len(frame("dst", "10.0.0.2", 100)) == 100


def test_packets_of_measurements_do_not_enter_the_classes() -> None:
    assert redirection("up") == [
        "ingress protocol ip prio 1 u32 match ip protocol 17 0xff match ip dport 1884 0xffff flowid 1:1",
        "ingress protocol ip prio 1 u32 match ip protocol 1 0xff flowid 1:1",
        "ingress protocol ip prio 2 u32 match u32 0 0 action mirred egress redirect dev segup",
    ]
    assert (
        "egress protocol ip prio 1 u32 match ip protocol 17 0xff match ip sport"
        in redirection("down")[0]
    )


PROGRAM = """
    import json, subprocess, time
    from agents.config import Background, BrokerAccess, RouterConfig, Segment
    from agents.device.delayline import Impairment
    from agents.device_actions import Disconnect, Reconnect, SetBackground, SetLink
    from agents.router.network import Network

    for command in (
        "ip link set lo up", "ip link add inside type veth peer name other", "ip link set inside up"
    ):
        subprocess.run(command.split(), check=True)
    size = {"distribution": "constant", "params": {"value": 10_000.0}}
    network = Network(RouterConfig(
        run="r", broker=BrokerAccess("h", 1, "u", "p"), targets={}, links={}, seed=1,
        addresses={name: f"10.9.0.{number}" for number, name in enumerate("abcde", 2)},
        segments=[
            Segment("backhaul", up=4_000_000, down=5_000_000, rtt=0.01),
            Segment("cell", "backhaul", up=3_000_000, rtt=0.02, background=(
                Background(0, "down", "constant", {"rate": 1e6}),
                Background(1, "up", "flows", {"arrivals": 20.0, "size": size}),
            )),
            Segment("other", "backhaul", up=2_000_000),
            Segment("slow", up=4_000),
            Segment("elsewhere", up=1),
        ],
        attached={"a": "cell", "b": "cell", "c": "other", "e": "slow"},
    ))
    probe = network.set_up("inside")
    again = network.measure(["other"])
    unused = network.use(time.monotonic()) is None
    impaired = [len(network.impairments(name)) for name in "abcd"]
    network.start(0.0)
    while network.use(time.monotonic()) is None:  # the generator starts
        time.sleep(0.05)
    time.sleep(2)
    on = network.use(time.monotonic())
    network.act("cell", SetBackground(on=False))
    time.sleep(0.3)
    network.use(time.monotonic())
    time.sleep(0.3)
    off = network.use(time.monotonic())
    below = sorted(network.act("backhaul", Disconnect()))
    cut = network.impairments("c") == [Impairment(loss=1.0)]
    network.act("backhaul", Reconnect())
    network.act("cell", SetLink({"up": 1_500_000}))
    network.act("backhaul", SetLink({"up": 1_000_000}))  # less than its children
    network.close()
    print(json.dumps({
        "probe": [[one.segment, one.way, one.full, one.together / one.full, one.alone / one.reach]
                  for one in probe.segments],
        "again": [[one.segment, one.way, one.together / one.full] for one in again.segments],
        "unused": unused, "impaired": impaired,
        "on": {f"{one.segment} {one.way}": 8 * one.background / on.seconds for one in on.segments},
        "off": off is None, "below": below, "cut": cut,
        "rates": [network.segments[name].up for name in ("cell", "backhaul")],
    }))
"""


SWITCHED_OFF = """
    import os, socket, subprocess, time
    from agents.config import Background
    from agents.router.background import RoutedTraffic, TrafficGenerator, TrafficStates, line

    for command in (
        "ip link set lo up", "ip address add 10.9.0.2 dev lo", "ip address add 198.18.255.253 dev lo",
        "ip link add segup type veth peer name segdown",
        "ip link set segup up", "ip link set segdown up",
    ):
        subprocess.run(command.split(), check=True)
    size = {"distribution": "constant", "params": {"value": 1e6}}
    flows = Background(0, "up", "flows", {"arrivals": 20.0, "size": size})
    generator = TrafficGenerator([RoutedTraffic("cell", flows, 1, ["10.9.0.2"])])
    orders, user = socket.socketpair()
    begun = line(TrafficStates(time.monotonic() - 5.0))  # so that a hundred transfers are due at once
    # Longer than one reading: the next one is due together with the sockets of the transfers.
    user.sendall(begun + b" " * 2**16 + line(TrafficStates(time.monotonic(), off=[0])))
    user.close()
    generator.serve(orders.fileno())
"""


def in_a_namespace(program: str) -> str:
    """Run `program` in a network namespace of its own, and return what it printed."""
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("unshare") is None:
        unavailable("netns", "segments take root, tc and unshare of util-linux")
    command = ["unshare", "--net", sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_transfers_end_whose_sockets_are_ready_together_with_the_order() -> None:
    in_a_namespace(SWITCHED_OFF)


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """What a tree of two levels, with background traffic, did in a namespace of its own."""
    found: dict[str, Any] = json.loads(in_a_namespace(PROGRAM))
    return found


@pytest.mark.timed
def test_each_segment_has_its_rate_alone_and_with_all_its_devices(run: dict[str, Any]) -> None:
    assert [row[:3] for row in run["probe"]] == [
        ["backhaul", "up", 4e6],
        ["cell", "up", 3e6],
        ["other", "up", 2e6],
        ["slow", "up", 4e3],
        ["backhaul", "down", 5e6],
    ]
    for _, _, _, together, alone in run["probe"]:
        assert together == pytest.approx(1, abs=0.05)
        assert alone == pytest.approx(1, abs=0.05)


@pytest.mark.timed
def test_single_segment_is_measured_again(run: dict[str, Any]) -> None:
    assert run["again"] == [["other", "up", pytest.approx(1, abs=0.05)]]
    assert run["unused"]


@pytest.mark.timed
def test_background_traffic_passes_its_segment_and_those_above(run: dict[str, Any]) -> None:
    on = run["on"]
    assert on["cell down"] == on["backhaul down"] == pytest.approx(1e6, rel=0.1)
    # 20 transfers of 10 kB a second, in packets: 1.7 Mbit/s on average, and Poisson over two seconds.
    assert 0.5e6 < on["cell up"] < 3e6
    assert run["off"]


@pytest.mark.timed
def test_actions_change_what_devices_below_pass(run: dict[str, Any]) -> None:
    assert run["impaired"] == [2, 2, 1, 0]
    assert run["below"] == ["a", "b", "c"]
    assert run["cut"]
    assert run["rates"] == [1_500_000, 1_000_000]
