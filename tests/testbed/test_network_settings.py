"""Key `network` of a topology: the tree of segments, background traffic, errors with their places."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from agents.config import AccessLink, Background
from agents.links import background
from testbed.errors import BadInputError
from testbed.plan import HostResources, Plan, plan
from testbed.plan.catalog import read
from testbed.segments.planned import place
from testbed.topology import load, parse

HEAD = """
name: n
task: {name: digits-logreg, local: {steps: 1}}
rule: {name: fedbuff}
stop: {after: 10s}
"""
TREE = """
network:
  cell: {parent: backhaul, up: 2mbit, down: 10mbit, rtt: 20ms, jitter: 1ms, loss: 50%, queue: 10 packets}
  backhaul: {up: 5mbit, down: 20mbit, rtt: 10ms}
devices:
  - {name: phone, count: 2, timing: 1s, segment: cell, link: {up: 1mbit, rtt: 40ms}}
  - {name: home, timing: 1s, access: {name: wifi, up: 3mbit}}
  - {name: alone, timing: 1s}
"""


def _plan(text: str) -> Plan:
    topology = parse(HEAD + text)
    return plan(topology, "virtual", HostResources((0, 1), 2**34), read(topology))


def test_devices_get_the_path_to_the_root_and_its_end_to_end_properties() -> None:
    planned = _plan(TREE)
    assert list(planned.segments) == ["backhaul", "cell", "wifi"]
    assert [[one.name for one in device.path] for device in planned.devices] == [
        ["cell", "backhaul"],
        ["cell", "backhaul"],
        ["wifi"],
        [],
    ]
    assert planned.segments["cell"].queue == 10 * 1514
    whole = planned.devices[0].end_to_end
    assert whole == AccessLink(1_000_000, 10_000_000, 0.07, 0.001, 0.5)
    topology = parse(HEAD + TREE)
    again = parse(topology.to_yaml())
    assert (again.network, again.segments) == (topology.network, topology.segments)


def test_segment_with_devices_on_several_nodes_is_refused() -> None:
    topology, host = parse(HEAD + TREE), HostResources(cores=(0,), memory=2**33)
    nodes = {"phone-1": "n1", "phone-2": "n1", "home": "n2", "alone": "n2"}
    together = replace(_plan(TREE), placement=nodes)
    assert place(together, topology, host) == (together, [])
    apart = replace(together, placement={**nodes, "phone-2": "n2"})
    (problem,) = place(apart, topology, host)[1]
    assert problem.message.startswith("devices[0].segment: cell is shared by devices on several nodes")
    assert "hosts: [NODE]" in problem.message


@pytest.mark.parametrize(
    ("network", "group", "expected"),
    [
        ("{a: {parent: b, up: 1mbit}}", "segment: a", "network.a.parent.*'b'"),
        ("{a: {parent: b}, b: {parent: a}}", "segment: a", "cycle"),
        ("{a: {up: 1mbit}}", "segment: aa", "devices.0..segment.*'aa'.*did you mean a"),
        ("{a: {up: 1mbit}}", "access: {name: a, up: 2mbit}", "a is a segment of network"),
        ("{a: {up: 1mbit}}", "segment: a, access: {name: b, up: 2mbit}", "keep segment"),
        ("{a: {loss: 1}}", "segment: a", "network.a.*nothing ever passes"),
        ("{a: {jitter: 1ms}}", "segment: a", "network.a.jitter: exceeds"),
        ("{a: {queue: 3}}", "segment: a", "queue.*100 packets"),
        ("{a: {background: [{kind: constant}]}}", "segment: a", "neither up nor down"),
        ("{a: {background: [{kind: constant, up: 50%}]}}", "segment: a", "add up to the segment"),
        ("{a: {up: 1mbit, background: [{kind: x}]}}", "segment: a", "background.0..kind"),
        (
            "{a: {up: 1mbit, background: [{kind: on_off, up: 50%, on: 1ms, off: 1ms}]}}",
            "segment: a",
            "at least 0.01 s",
        ),
        (
            "{a: {up: 1mbit, background: [{kind: flows, up: 2/s, size: 100kB}]}}",
            "segment: a",
            "never carry",
        ),
    ],
)
def test_errors_name_place_and_mend(network: str, group: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=f"(?s){expected}"):
        parse(f"{HEAD}network: {network}\ndevices: [{{name: d, timing: 1s, {group}}}]\n")


def test_background_traffic_of_a_device_is_refused() -> None:
    text = f"{HEAD}{TREE}scenario: [{{at: 1s, set: [cell, wifi], background: false}}]\n"
    assert len(parse(text).scenario) == 1
    device = parse(text).device_names[0]
    with pytest.raises(BadInputError, match=f"scenario.0..set.1.*{device} is no segment"):
        parse(text.replace("[cell, wifi]", f"[cell, {device}]"))


def test_unused_segments_and_those_that_cannot_have_their_rate_are_noted() -> None:
    text = """
network:
  a: {up: 1mbit}
  m: {parent: a}
  b:
    parent: m
    up: 2mbit
    down: 2mbit
    background:
      - {kind: flows, up: 1/s, size: 1kB}
      - {kind: constant, up: 60%, down: 60%}
      - {kind: on_off, up: 40%, down: 39%, on: 1s, off: 1s}
  c: {}
devices: [{name: d, timing: 1s, segment: b}]
"""
    found = [one for one in _plan(text).notes if "egment" in one]
    assert found == [
        "Segment b has up 2mbit, more than the 1mbit of a above it",
        "Background traffic of segment b can take all of its up 2mbit: devices get nothing meanwhile",
        "No device uses the segment c",
    ]


def test_tree_deeper_than_the_kernels_is_refused_in_containers_only() -> None:
    names = [f"s{number}" for number in range(8)]
    parents = ", ".join(f"{name}: {{parent: {above}}}" for above, name in pairwise(names))
    text = f"network: {{s0: {{}}, {parents}}}\ndevices: [{{name: d, cpu: 0.1, segment: s7}}]\n"
    assert len(_plan(text).devices[0].path) == 8
    topology = parse(HEAD + text)
    with pytest.raises(
        BadInputError, match=r"network.s7.parent: is level 8 .* at most 7 levels.*virtual"
    ):
        plan(topology, "docker", HostResources((0, 1), 2**34), read(topology))


def test_background_is_planned_per_direction_and_shares_are_of_the_segment_rate() -> None:
    planned = _plan(
        """
network:
  a:
    up: 1mbit
    down: 10mbit
    background:
      - {kind: constant, up: 50%, down: 1mbit}
      - {kind: on_off, down: 20%, on: 1s, off: {distribution: exponential, mean: 2s}}
      - {kind: flows, up: 2/s, size: {distribution: exponential, mean: 10kB}}
devices: [{name: d, timing: 1s, segment: a}]
"""
    )
    made = planned.segments["a"].background
    assert [(one.number, one.way, one.kind) for one in made] == [
        (0, "up", "constant"),
        (0, "down", "constant"),
        (1, "down", "on_off"),
        (2, "up", "flows"),
    ]
    assert [one.params.get("rate") for one in made] == [500_000, 1_000_000, 2_000_000, None]
    changes = list(itertools.islice(background.rates(made[2], 0, "a"), 5))
    assert [rate for _, rate in changes] == [0, 2_000_000, 0, 2_000_000, 0]
    assert changes[2][0] - changes[1][0] == pytest.approx(1.0)
    first = list(itertools.islice(background.transfers(made[3], 0, "a"), 400))
    assert first == list(itertools.islice(background.transfers(made[3], 0, "a"), 400))
    assert first != list(itertools.islice(background.transfers(made[3], 1, "a"), 400))
    assert 400 / first[-1][0] == pytest.approx(2, rel=0.2)
    assert sum(size for _, size in first) / 400 == pytest.approx(10_000, rel=0.2)


def test_traced_background_is_read_from_files_and_repeats(tmp_path: Path) -> None:
    (tmp_path / "load.csv").write_text("time,down\n0,1000\n1,3000\n")
    (tmp_path / "t.yaml").write_text(
        f"{HEAD}network: {{a: {{down: 1mbit, background: [{{kind: trace, csv: load.csv}}]}}}}\n"
        "devices: [{name: d, timing: 1s, segment: a}]\n"
    )
    topology = load(tmp_path / "t.yaml")
    planned = plan(topology, "virtual", HostResources((0, 1), 2**34), read(topology))
    (one,) = planned.segments["a"].background
    found = list(itertools.islice(background.rates(one, 0, "a"), 4))
    assert found == [(0, 1000), (1, 3000), (2, 1000), (3, 3000)]
    (tmp_path / "load.csv").write_text("time,rtt\n0,1\n")
    with pytest.raises(BadInputError, match="neither column up nor down"):
        read(topology)
    with pytest.raises(ValueError, match="expected one of constant, on_off"):
        background.build(Background(0, "up", "x", {}))
