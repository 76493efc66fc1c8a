"""Drawn fleets: surveys, populations, FedScale's traces and distributions become devices of the plan."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from testbed import topology as topologies
from testbed.errors import BadInputError
from testbed.fleets import surveys
from testbed.plan import catalog, plan_tables
from testbed.plan.assignment import plan
from testbed.plan.machines import HostResources
from testbed.topology import Topology, profiles
from testbed.topology.schema import FLEET
from tests.running import Finished, Testbed

_SURVEY = """\
# boards of a lab
weight,cpu,memory,link.class
5,0.1,512MiB,3g
3,0.2,1GiB,4g
2,0.4,,lte
"""
_HOST = HostResources(cores=tuple(range(64)), memory=2**40)


def _write(folder: Path, draw: dict[str, Any], count: int = 12, **others: Any) -> Path:
    """Write a topology whose group `phones` is drawn, and the survey beside it."""
    (folder / "survey.csv").write_text(_SURVEY)
    extra = others.pop("groups", [])
    content = {
        "name": "drawn",
        "seed": 7,
        "task": {"name": "digits-logreg", "local": {"steps": 5, "batch_size": 16, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 3},
        "devices": [{"name": "phones", "count": count, "draw": draw, **others}, *extra],
        "stop": {"after": "5s"},
        "virtual": {"step_time": "10ms"},
    }
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _load(folder: Path, draw: dict[str, Any], count: int = 12, **others: Any) -> Topology:
    return topologies.load(_write(folder, draw, count, **others))


def _error(folder: Path, draw: dict[str, Any], **others: Any) -> str:
    with pytest.raises(BadInputError) as raised:
        _load(folder, draw, **others)
    return str(raised.value)


def _drawn(topology: Topology) -> dict[str, Any]:
    return dict(topology.fleet.keys["phones"])


def test_columns_of_a_row_stay_together(tmp_path: Path) -> None:
    topology = _load(tmp_path, {"from": "survey.csv"}, 60)
    kinds = {(group.cpu, group.link and group.link.kind, group.origin) for group in topology.devices}
    assert kinds == {
        (0.1, "3g", "survey.csv:3"),
        (0.2, "4g", "survey.csv:4"),
        (0.4, "lte", "survey.csv:5"),
    }
    # An empty cell leaves the key out: the default holds.
    assert {group.cpu: group.memory for group in topology.devices} == {
        0.1: 512 * 2**20,
        0.2: 2**30,
        0.4: 512 * 2**20,
    }


def test_batteries_and_availability_are_drawn_with_the_other_columns(tmp_path: Path) -> None:
    file = _write(tmp_path, {"from": "survey.csv"}, energy={"idle": "1W", "core": "2W"}, cpu=0.1)
    (tmp_path / "survey.csv").write_text(
        "weight,energy.battery.capacity,energy.battery.initial,availability.on,availability.off\n"
        "1,10Wh,90%,5s,1s\n1,20Wh,50%,1s,5s\n"
    )
    found = set()
    for group in topologies.load(file).devices:
        assert group.energy is not None
        assert group.energy.battery is not None
        assert group.energy.idle == 1.0
        assert group.availability is not None
        assert group.availability.on is not None
        battery = group.energy.battery
        found.add((battery.capacity, battery.initial, group.availability.on.params["value"]))
    assert found == {(36_000.0, 0.9, 5.0), (72_000.0, 0.5, 1.0)}


def test_frequencies_agree_with_the_weights(tmp_path: Path) -> None:
    counts = Counter(
        keys["cpu"] for keys in _drawn(_load(tmp_path, {"from": "survey.csv"}, 2000)).values()
    )
    test = stats.chisquare([counts[0.1], counts[0.2], counts[0.4]], [1000, 600, 400])
    assert test.pvalue > 0.01


def test_keys_of_each_are_independent_with_their_frequencies(tmp_path: Path) -> None:
    each = {
        "cpu": {"0.1": 3, "0.2": 1},
        "link": {
            "class": {"3g": 1, "lte": 1},
            "loss": {"distribution": "uniform", "low": 0, "high": 0.1},
        },
        "memory": {"512MiB": 1, "1GiB": 1},
    }
    drawn = _drawn(_load(tmp_path, {"each": each}, 2000)).values()
    pairs = Counter((keys["cpu"], keys["link"]["class"]) for keys in drawn)
    table = [[pairs[cpu, link] for link in ("3g", "lte")] for cpu in (0.1, 0.2)]
    assert stats.chi2_contingency(table).pvalue > 0.01
    assert stats.chisquare([sum(row) for row in table], [1500, 500]).pvalue > 0.01
    assert stats.kstest([keys["link"]["loss"] for keys in drawn], "uniform", (0, 0.1)).pvalue > 0.01


def test_other_devices_and_keys_do_not_change_a_draw(tmp_path: Path) -> None:
    draw = {"from": "survey.csv", "each": {"timing": {"distribution": "exponential", "mean": "2s"}}}
    few = _drawn(_load(tmp_path, draw, 5))
    more = _load(
        tmp_path, draw, 9, groups=[{"name": "more", "count": 3, "draw": {"from": "survey.csv"}}]
    )
    assert {name: _drawn(more)[name] for name in few} == few
    each = {"timing": {"distribution": "exponential", "mean": "2s"}, "memory": {"2GiB": 1}}
    changed = _drawn(_load(tmp_path, {"from": "survey.csv", "each": each}, 5))
    assert {name: {**keys, "memory": "2GiB"} for name, keys in few.items()} == changed


def test_seed_of_the_draw_replaces_that_of_the_topology(tmp_path: Path) -> None:
    text = _write(tmp_path, {"from": "survey.csv", "seed": 1}, 30).read_text()

    def drawn(text: str) -> dict[str, Any]:
        return _drawn(topologies.parse(text, str(tmp_path / "fleet.yaml")))

    assert drawn(text) == drawn(text.replace("seed: 7", "seed: 8"))
    without = text.replace("    seed: 1\n", "")
    assert without != text
    assert drawn(without) != drawn(without.replace("seed: 7", "seed: 8"))


def test_keys_of_the_group_override_drawn_ones(tmp_path: Path) -> None:
    draw = {"from": "survey.csv", "each": {"memory": {"2GiB": 1}}}
    devices = _load(tmp_path, draw, cpu=0.3, link={"rtt": "20ms"}).devices
    assert {group.cpu for group in devices} == {0.3}
    assert {group.memory for group in devices} == {2 * 2**30}
    assert {group.link and (group.link.kind, group.link.rtt) for group in devices} <= {
        ("3g", 0.02),
        ("4g", 0.02),
        ("lte", 0.02),
    }


def test_plan_is_the_same_in_every_runtime(tmp_path: Path) -> None:
    topology = _load(tmp_path, {"from": "survey.csv"})
    found = catalog.read(topology)
    first, *others = (
        [
            (one.name, one.group, one.cpu, one.memory, one.link, one.origin)
            for one in plan(topology, runtime, _HOST, found).devices
        ]
        for runtime in ("docker", "process", "virtual")
    )
    assert others == [first, first]
    assert [one[:2] for one in first] == [(f"phones-{number}", "phones") for number in range(1, 13)]


def test_written_topology_and_kept_fleet_repeat_the_draw_without_the_survey(tmp_path: Path) -> None:
    topology = _load(tmp_path, {"from": "survey.csv"}, groups=[{"name": "plain", "cpu": 0.1}])
    again = topologies.parse(topology.to_yaml(), str(tmp_path / "copy.yaml"))
    assert again.devices == topology.devices
    assert again.to_yaml() == topology.to_yaml()
    kept = tmp_path / "run"
    kept.mkdir()
    (tmp_path / "survey.csv").unlink()
    (kept / FLEET).write_text(topology.fleet.to_json())
    (kept / "topology.yaml").write_text(topology.to_yaml())
    repeated = topologies.load(kept / "topology.yaml")
    assert repeated.fleet.keys == topology.fleet.keys
    assert [one.name for one in repeated.devices] == [one.name for one in topology.devices]
    (kept / FLEET).write_text("[")
    with pytest.raises(BadInputError, match="remove the file"):
        topologies.load(kept / "topology.yaml")


def test_scenario_acts_on_a_drawn_group_and_on_its_devices(tmp_path: Path) -> None:
    file = _write(tmp_path, {"from": "survey.csv"}, 3)
    scenario = "scenario: [{at: 1s, pause: phones, for: 1s}, {at: 2s, crash: phones-2}]\n"
    topology = topologies.parse(file.read_text() + scenario, str(file))
    assert topologies.scenario.devices_by_group(topology.devices)["phones"] == topology.device_names


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fedscale")
    capacity = {n: {"computation": 10.0 * n, "communication": 1000.0 * n} for n in range(1, 101)}
    behaviour = {
        0: {"duration": 100, "active": [0, 50], "inactive": [25, 75], "finish_time": 100, "model": "a"}
    }
    (folder / "client_device_capacity").write_bytes(pickle.dumps(capacity))
    (folder / "client_behave_trace").write_bytes(pickle.dumps(behaviour))
    return folder


def test_fedscales_clients_give_timing_or_cpu_with_their_link(traces: Path) -> None:
    topology = _load(traces, {"from": "client_device_capacity"})
    for group in topology.devices:
        client = int(group.origin.removeprefix("client "))
        assert group.timing is not None
        # Three times the inference time, for 16 samples in each of 5 steps.
        assert group.timing.params["value"] == pytest.approx(3 * 0.01 * client * 16 * 5)
        assert group.link is not None
        assert group.link.up == 1024 * 1000 * client
    shares = {
        "from": "client_device_capacity",
        "fedscale": {"cpu": 0.5, "behaviour": "client_behave_trace"},
    }
    for group in _load(traces, shares).devices:
        client = int(group.origin.removeprefix("client "))
        assert group.timing is None
        assert group.cpu == pytest.approx(0.5 / client, rel=1e-3)  # client 1 is the fastest
        assert group.availability is not None
        assert group.availability.loop == 100
    assert plan_tables._connected(group.availability) == 0.5
    epochs = {"epochs": 1}
    assert "needs local.steps" in _error(traces, {"from": "client_device_capacity"}, local=epochs)


@pytest.mark.parametrize(
    ("survey", "told"),
    [
        ("", "survey.csv:1:1: the survey is empty"),
        ("weight,cpu\n", "survey.csv:1:1: no row follows the header"),
        ("cpu,memory\n0.1,1GiB\n", "survey.csv:1:1: there is no column weight"),
        ("weight\n1\n", "there is no column but weight"),
        ("weight,cpus\n1,1\n", "survey.csv:1:8: found the column 'cpus', did you mean cpu?"),
        ("weight,cpu,cpu\n1,1,1\n", "survey.csv:1:12: the column 'cpu' occurs twice"),
        ("weight,cpu\n1,0.1\n-1,0.2\n", "survey.csv:3:1: weight is '-1', expected a number"),
        ("weight,cpu\nnan,0.1\n", "survey.csv:2:1: weight is 'nan'"),
        ("weight,cpu\n,0.1\n", "survey.csv:2:1: weight is ''"),
        ("weight,cpu\n0,0.1\n0,0.2\n", "survey.csv:1:1: weight is 0 in all rows"),
        ("weight,cpu\n1,0.1,3\n", "survey.csv:2:1: found 3 cells, expected 2"),
        ("weight,cpu\n1,.nan\n", "survey.csv:2:3: cpu: found '.nan', expected a positive share"),
        ("weight,profile\n1,raspberry-pi-44\n", "survey.csv:2:3: profile: there is no device profile"),
        ("weight,cpu,link\n1,0.1,ltee\n", "survey.csv:2:7: link.class: there is no link class"),
        ("weight,cpu,link.up\n1,0.1,fast\n", "survey.csv:2:7: link.up: found 'fast', expected a rate"),
        ("weight,cpu,link.speed\n1,0.1,4g\n", "survey.csv:2:7: link.speed: unknown key"),
        ("weight,memory,cpu\n1,1GiB,0.1\n2,1GiB,\n", "survey.csv:3:1: found none of cpu, profile"),
        (
            "weight,memory\n1,1GiB\n",
            "survey.csv says nothing about the speed of its devices: add one of",
        ),
        (
            "weight,cpu,link.up,link.up.x\n1,0.1,1mbit,5\n",
            "another column sets a value around this key",
        ),
        ("weight,cpu\n1,[\n", "survey.csv:2:3: cpu: found '[', expected a value"),
    ],
)
def test_faulty_survey_is_refused_with_line_and_mend(tmp_path: Path, survey: str, told: str) -> None:
    file = _write(tmp_path, {"from": "survey.csv"})
    (tmp_path / "survey.csv").write_text(survey)
    with pytest.raises(BadInputError) as raised:
        topologies.load(file)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        ({}, "found neither from nor each"),
        ({"each": {}}, "found no key"),
        ({"from": "mobile-subscription-2022"}, "did you mean mobile-subscriptions-2022?"),
        ({"from": "client_device_capacity"}, "get the file from github.com/SymbioticLab/FedScale"),
        ({"from": "us-homes-2024"}, "says nothing about the speed of its devices"),
        ({"from": "survey.csv", "fedscale": {"cpu": 0.1}}, "is a survey, not FedScale's"),
        ({"fedscale": {}, "each": {"cpu": {"0.1": 1}}}, "fedscale: needs from"),
        ({"each": {"cpu": {"0.1": -1}}}, "found the weight -1, expected a number of at least 0"),
        ({"each": {"cpu": {"0.1": 0}}}, "found no weight above 0"),
        ({"each": {"cpu": {"0.1": 1}, "profile": {"pi": "x"}}}, "expected names with weights"),
        ({"each": {"cpu": {"distribution": "trace"}}}, "expected constant, exponential"),
        ({"each": {"cpu": 0.2}}, "expected values with weights"),
        ({"each": {"memory": {"1MiB": 1}}, "from": "survey.csv"}, "expected a size of at least 256MiB"),
        ({"each": {"cpu": {"0.1": 1}, "memory": {"1MiB": 1}}}, "devices[0].draw: phones-1 (phones-1)"),
        ({"from": "survey.csv", "sed": 1}, "did you mean seed?"),
    ],
)
def test_faulty_draw_is_refused_with_its_place(tmp_path: Path, draw: dict[str, Any], told: str) -> None:
    message = _error(tmp_path, draw)
    assert told in message
    assert "fleet.yaml:" in message or "survey.csv:" in message


def test_group_without_devices_is_refused(tmp_path: Path) -> None:
    assert "found 0, expected a whole number" in _error(tmp_path, {"from": "survey.csv"}, count=0)


def test_device_that_exceeds_the_host_is_refused_with_its_row(tmp_path: Path) -> None:
    topology = _load(tmp_path, {"from": "survey.csv", "each": {"cpu": {"9": 1}}}, 30)
    small = HostResources(cores=(0, 1, 2), memory=2**40)
    with pytest.raises(BadInputError) as raised:
        plan(topology, "process", small, catalog.read(topology))
    message = str(raised.value)
    assert "devices[0] (survey.csv:3).cpu: found 9, expected at most 2" in message
    assert message.count("found 9") == 3  # equal errors of one row, and of three rows
    topology = _load(tmp_path, {"from": "survey.csv"}, 60)
    with pytest.raises(BadInputError, match="60 x drawn phones"):
        plan(topology, "process", small, catalog.read(topology))


@pytest.mark.parametrize("name", profiles.population_names())
def test_population_has_source_licence_date_and_known_classes(name: str, tmp_path: Path) -> None:
    survey = surveys.read_population(name)
    assert survey.about.keys() == {"about", "source", "licence", "date"}
    assert (profiles.POPULATIONS / f"{name}.csv").stat().st_size < 10_000
    devices = _load(tmp_path, {"from": name}, 20, cpu=0.1).devices
    assert all(group.link is not None for group in devices)


def test_tables_show_quantiles_counts_and_histogram(tmp_path: Path) -> None:
    topology = _load(tmp_path, {"from": "survey.csv"}, 200)
    made = plan(topology, "virtual", _HOST, catalog.read(topology))
    rows = {
        row["key"]: row
        for row in plan_tables.quantile_table(plan_tables.key_distributions(topology, made))
    }
    assert (rows["cpu"]["least"], rows["cpu"]["median"], rows["cpu"]["most"]) == ("0.1", "0.2", "0.4")
    assert len(rows["cpu"]["histogram"]) == 24
    (numbers,) = [one for one in plan_tables.key_distributions(topology, made) if one.key == "cpu"]
    assert sum(numbers.bars) == 200
    names = plan_tables.name_table(topology, made)
    assert sum(row["devices"] for row in names) == 200
    assert [row["value"] for row in names] == ["3g", "4g", "lte"]


def test_commands_plan_draw_and_run_a_fleet(testbed: Testbed, tmp_path: Path) -> None:
    file = _write(tmp_path, {"from": "survey.csv"}, 20)
    assert json.loads(testbed("validate", file, "--json").out)["devices"] == 20
    svg = tmp_path / "fleet.svg"
    planned = testbed("plan", file, "--runtime", "virtual", "--draw-to", svg)
    assert planned.code == 0
    assert "histogram" in planned.out
    assert svg.read_text().count('class="bar"') >= 24
    devices = json.loads(testbed("plan", file, "--runtime", "virtual", "--json").out)
    assert devices[0]["origin"].startswith("survey.csv:")
    ran = testbed("up", file, "--runtime", "virtual", "--runs", tmp_path / "runs")
    assert ran.code == 0
    run = Finished.only_one_in(tmp_path / "runs")
    manifest = json.loads((run.path / "manifest.json").read_text())
    kept = json.loads((run.path / FLEET).read_text())["phones"]
    assert {name: facts["cpu"] for name, facts in manifest["devices"].items()} == {
        name: keys["cpu"] for name, keys in kept.items()
    }
    (tmp_path / "survey.csv").write_text("weight,cpu\n-1,1\n")
    refused = testbed("validate", file)
    assert refused.code == 2
    assert "survey.csv:2:1" in refused.err
