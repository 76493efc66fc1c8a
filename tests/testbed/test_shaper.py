"""The shaper of delay, jitter and loss: chosen by what the kernel supports, and used by the runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.device_actions import SetLink
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.wire import messages
from testbed import broker
from testbed.errors import BadInputError
from testbed.plan import HostResources, agent_configs, plan
from testbed.plan.agent_configs import RunSpec
from testbed.plan.machines import Shaper, choose_shaper, lack_of_netem
from testbed.run import provenance
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker.container_actions import ContainerDevice, respond
from testbed.topology import Topology, parse
from testbed.traits import RUNTIMES

LACKING = HostResources((0, 1), 2**34, "this kernel has no netem (Specified qdisc kind is unknown)")
HAVING = HostResources((0, 1), 2**34, None)
LINKED = "devices: [{name: pi, cpu: 0.2, link: {up: 1mbit, rtt: 80ms}}]"


def asking(shaper: str, devices: str = LINKED, more: str = "") -> Topology:
    return parse(
        "name: fleet\n"
        "task: {name: digits-logreg, local: {steps: 20}}\n"
        "rule: {name: fedasync}\n"
        f"{devices}\n"
        f"runtime: {{shaper: {shaper}}}\n"
        f"stop: {{after: 60s}}\n{more}"
    )


def test_auto_selects_netem_if_available() -> None:
    assert plan(asking("auto"), "docker", HAVING).shaper == Shaper("netem", "auto: this kernel has it")
    found = plan(asking("auto"), "docker", LACKING).shaper
    assert found == Shaper("tbf+delay", f"auto: {LACKING.lack_of_netem}")
    assert plan(asking("tbf+delay"), "docker", HAVING).shaper == Shaper("tbf+delay", "asked for")
    assert plan(asking("netem"), "docker", HAVING).shaper == Shaper("netem", "asked for")


def test_missing_netem_is_refused_with_the_fix() -> None:
    with pytest.raises(BadInputError) as refused:
        plan(asking("netem"), "docker", LACKING)
    assert (
        f"5:19: runtime.shaper: found netem, but {LACKING.lack_of_netem}: use auto or tbf+delay, or "
        "see `testbed doctor` for the fix"
    ) in str(refused.value)


def test_plan_without_links_has_no_shaper() -> None:
    bare = "devices: [{name: pi, cpu: 0.2}]"
    assert plan(asking("netem", bare), "docker", LACKING).shaper is None
    later = asking("auto", bare, "scenario: [{at: 1s, set: pi, link: {rtt: 50ms}}]")
    found = plan(later, "docker", HAVING).shaper
    assert found is not None
    assert found.is_netem
    assert plan(asking("auto"), "virtual", HAVING).shaper is None


def test_netem_must_be_requested_on_several_hosts() -> None:
    """No other machine's kernel is tried."""
    found, _ = choose_shaper(asking("auto"), RUNTIMES["swarm"], None)
    assert found is not None
    assert found.name == "tbf+delay"
    found, _ = choose_shaper(asking("netem"), RUNTIMES["swarm"], None)
    assert found is not None
    assert found.is_netem


def test_process_runtime_shapes_with_the_relay() -> None:
    shared = "devices: [{name: pi, cpu: 0.2, access: {name: wifi, up: 1mbit}}]"
    for devices in (LINKED, shared):
        found = plan(asking("auto", devices), "process", HAVING).shaper
        assert found is not None
        assert found.name == "relay"


def test_netem_is_tried_on_this_kernel() -> None:
    found = lack_of_netem()
    assert found is None or "netem" in found


def _spec(folder: Path, host: HostResources) -> RunSpec:
    topology = asking("auto")
    planned = plan(topology, "docker", host)
    return RunSpec(RunDirectory.create(folder, "shaped"), topology, planned, {"pi": 1})


@pytest.mark.parametrize(
    ("host", "orders"),
    [
        (HAVING, [("pi", messages.DeviceOrder("pi", SetLink({"up": None, "rtt": 0.3, "loss": 0.0})))]),
        (
            LACKING,
            [
                ("pi", messages.DeviceOrder("pi", SetLink({"up": None}))),
                (ROUTER, messages.DeviceOrder("pi", SetLink({"rtt": 0.3, "loss": 0.0}))),
            ],
        ),
    ],
)
def test_link_changes_go_to_the_active_shaper(
    tmp_path: Path, host: HostResources, orders: list[Any]
) -> None:
    spec = _spec(tmp_path, host)
    device = ContainerDevice(spec.plan.devices[0], away=False)
    found = respond(spec, device, SetLink({"up": None, "rtt": 0.3, "loss": None}))
    assert found.orders == orders
    assert found.limits is None


@pytest.mark.parametrize(("host", "netem"), [(HAVING, True), (LACKING, False)])
def test_device_and_router_get_the_shaper(tmp_path: Path, host: HostResources, netem: bool) -> None:
    """With netem the router's delay line holds no packets."""
    spec = _spec(tmp_path, host)
    accounts = broker.accounts("shaped", ["pi"])
    agent_configs.write(spec, accounts, agent_configs.container_places(None))
    agent_configs.write_router(
        spec, accounts[ROUTER], agent_configs.container_places(None), {"pi": "10.0.0.2"}
    )
    device = json.loads(spec.directory.config(agent_configs.init_name("pi")).read_text(encoding="utf-8"))
    router = json.loads(spec.directory.config(ROUTER).read_text(encoding="utf-8"))
    assert device["netem"] is netem
    assert device["link"]["rtt"] == 0.08
    client = json.loads(spec.directory.config("pi").read_text(encoding="utf-8"))
    # A fleet may take longer to start than any constant: the router is the last.
    assert client["timeout_s"] == device["timeout_s"] == spec.topology.start.timeout == 300
    told = json.loads(spec.directory.config(AGGREGATOR).read_text(encoding="utf-8"))
    assert told["settings"]["silence"] == {"pi": 45 * 10**9}
    assert router["links"] == ({} if netem else {"pi": {"rtt": 0.08, "jitter": 0.0, "loss": 0.0}})


def test_routers_of_several_nodes_draw_different_random_numbers(tmp_path: Path) -> None:
    spec, places = _spec(tmp_path, LACKING), agent_configs.container_places(None)
    login = broker.accounts("shaped", ["pi"])[ROUTER].at(*places.router)
    one, other, again, alone = (
        agent_configs.router_config(spec, login, places, {}, node) for node in ("a", "b", "a", None)
    )
    assert one.seed == again.seed
    assert len({one.seed, other.seed, alone.seed}) == 3
    assert alone.seed == spec.topology.seed
    assert (one.several, alone.several) == (True, False)


def test_manifest_records_the_shaper_and_its_reason(tmp_path: Path) -> None:
    told = provenance.describe(_spec(tmp_path, LACKING), {"pi": [1]})
    assert (told["shaper"], told["shaper_why"]) == ("tbf+delay", f"auto: {LACKING.lack_of_netem}")
