"""`testbed plan --draw`: a plan as text and as SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from testbed.plan import HostResources, drawing, plan
from testbed.topology import parse
from tests.running import Testbed

TOPOLOGY = """
name: t
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff}
devices:
  - {name: home, count: 3, cpu: 0.1, link: {up: 1mbit, rtt: 80ms, jitter: 10ms, loss: 1%}, access: &wifi
      {name: wifi, up: 20mbit, down: 50mbit}}
  - {name: fast, count: 2, cpu: 0.25, image: "<mine>:1"}
  - {name: tv, cpu: 0.1, access: *wifi}
stop: {after: 60s}
"""
HOST = HostResources((0, 1), 2**34, "this kernel has no netem")


def test_text_drawing_has_servers_cells_groups_and_links() -> None:
    topology = parse(TOPOLOGY)
    drawn = drawing.picture(topology, plan(topology, "docker", HOST))
    assert drawing.as_text(drawn).splitlines() == [
        "aggregator (fedbuff) ─ broker ─ router",
        "├─ fast × 2  0.25 cpu, 512 MiB, image <mine>:1 ── no limits",
        "└─ wifi, shared: up 20mbit, down 50mbit",
        "   ├─ home × 3  0.1 cpu, 512 MiB                  ── up 1mbit, rtt 80ms ± 10ms, loss 0.01",
        "   └─ tv        0.1 cpu, 512 MiB                  ── no limits",
    ]


def test_drawing_has_the_tree_of_segments() -> None:
    topology = parse(
        """
name: t
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff}
network:
  cell: {parent: backhaul, up: 2mbit}
  backhaul: {up: 5mbit, rtt: 10ms, background: [{kind: constant, up: 50%}]}
devices:
  - {name: a, timing: 1s, segment: cell}
  - {name: b, timing: 1s, segment: backhaul}
stop: {after: 60s}
"""
    )
    drawn = drawing.picture(topology, plan(topology, "virtual", HOST))
    assert [line.rstrip() for line in drawing.as_text(drawn).splitlines()] == [
        "aggregator (fedbuff) ─ broker",
        "└─ backhaul, shared: up 5mbit, rtt 10ms, background constant",
        "   ├─ b  timing 1s ── no limits",
        "   └─ cell, shared: up 2mbit",
        "      └─ a  timing 1s ── no limits",
    ]
    shapes = ElementTree.fromstring(drawing.as_svg(drawn))  # noqa: S314
    texts = [each.text for each in shapes.iter("{http://www.w3.org/2000/svg}text")]
    assert {"cell: up 2mbit", "backhaul: up 5mbit, rtt 10ms, background constant"} <= {*texts}


@pytest.mark.parametrize(("runtime", "between"), [("docker", "router"), ("virtual", None)])
def test_svg_is_well_formed_and_its_texts_fit(runtime: str, between: str | None) -> None:
    topology = parse(TOPOLOGY)
    image = ElementTree.fromstring(  # noqa: S314  # our own
        drawing.as_svg(drawing.picture(topology, plan(topology, runtime, HOST)))
    )
    width, height = (float(image.attrib[name]) for name in ("width", "height"))
    texts = {
        str(one.text): (float(one.attrib["x"]), float(one.attrib["y"]))
        for one in image.iter()
        if one.tag.endswith("text")
    }
    assert {"aggregator (fedbuff)", "broker", "home × 3", "tv", "wifi: up 20mbit, down 50mbit"} <= set(
        texts
    )
    assert (between in texts) == (between is not None)
    assert any(text.endswith("image <mine>:1") for text in texts) == (runtime == "docker")
    assert all(0 < x < width and 0 < y < height for x, y in texts.values())
    # From left to right: servers, what is shared, devices.
    assert texts["broker"][0] < texts["wifi: up 20mbit, down 50mbit"][0] < texts["tv"][0]


def test_plan_draws_the_topology(testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TOPOLOGY)
    to = tmp_path / "t.svg"
    said = testbed("plan", tmp_path / "t.yaml", "--runtime", "virtual", "--draw", "--draw-to", to)
    assert said.code == 0, said.err
    assert "└─ wifi, shared: up 20mbit, down 50mbit" in said.out
    assert to.read_text().startswith("<svg ")
