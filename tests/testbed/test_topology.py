from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml

from agents.config import AccessLink, DrawnDuration, LocalTraining, Named
from agents.rules import RULES
from agents.tasks import TASKS
from testbed import topology
from testbed.errors import BadInputError
from testbed.plan import HostResources, catalog, plan

ROOT = Path(__file__).parents[2]
BROKEN = Path(__file__).parent / "broken"
TWO_CORES = HostResources(cores=(0, 1), memory=16 * 2**30)

MINIMAL = """
name: minimal
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff, buffer_size: 3}
devices: [{name: nano, count: 4, cpu: 0.1}]
stop: {after: 60s}
"""


def test_file_that_is_no_topology_is_reported_once(tmp_path: Path) -> None:
    """There is one error, not one per unknown or missing key."""
    sweep, other = tmp_path / "sweep.yaml", tmp_path / "other.yaml"
    sweep.write_text("topology: a.yaml\ngrid: {seed: [1, 2]}\n", encoding="utf-8")
    other.write_text("services: {}\nvolumes: {}\n", encoding="utf-8")
    for path, told in {
        sweep: f"{sweep}:1:1: this is a sweep, not a topology: run testbed sweep {sweep}\n",
        other: f"{other}:1:1: this is not a topology, which has the keys name, task, rule,",
        tmp_path: f"{tmp_path}: cannot be read: this is a folder: name a file in it",
    }.items():
        with pytest.raises(BadInputError) as refused:
            topology.load(path)
        assert str(refused.value).startswith(told)
        assert str(refused.value).count("\n") <= 3


@pytest.mark.parametrize(
    ("file", "place", "told"),
    [
        ("unknown-key", "9:5: devices[0].memroy", "unknown key; did you mean memory?"),
        ("wrong-unit", "6:37: devices[0].memory", "found '512mbit', expected a size above zero"),
        ("megabytes", "9:11: devices[0].link.up", "write 40mbit for bytes"),
        ("negative-cpu", "8:10: devices[1].cpu", "found -0.5, expected a positive share of one host"),
        ("unknown-rule", "3:14: rule.name", "; did you mean fedbuff?"),
        ("duplicate-device", "7:12: devices[1].name", "the name 'pi-1' is already used on line 6"),
        ("device-named-as-a-group", "7:12: devices[1].name", "the name 'pi' is already used"),
        ("tab", "6:1", "found a tab, expected spaces"),
        ("empty", "1:1", "the file is empty, expected a topology; `testbed new topology NAME`"),
        ("too-much-cpu", "5:1: devices", "ask for 1.75 cores (3 x 0.5 big, 1 x 0.25 small)"),
    ],
)
def test_invalid_topology_is_refused_with_place_and_fix(file: str, place: str, told: str) -> None:
    path = BROKEN / f"{file}.yaml"
    with pytest.raises(BadInputError) as refused:
        plan(topology.load(path), "docker", TWO_CORES)
    message, *_, count = str(refused.value).splitlines()
    assert message.startswith(f"{path}:{place}: ")
    assert told in message
    assert count == f"{path}: 1 error"
    assert refused.value.exit_code == 2


def test_missing_file_gets_a_suggestion() -> None:
    path = BROKEN / "emty.yaml"
    with pytest.raises(BadInputError, match=r"emty\.yaml: no such file \(did you mean .*empty"):
        topology.load(path)


def test_all_errors_are_reported_in_file_order() -> None:
    with pytest.raises(BadInputError) as refused:
        topology.load(BROKEN / "many.yaml")
    lines = [line.split(".yaml:")[1] for line in str(refused.value).splitlines() if ".yaml:" in line]
    assert [line.split(": ")[:2] for line in lines[:-1]] == [
        ["2:7", "seed"],
        ["5:3", "task.l3"],
        ["6:10", "task.local"],
        ["7:37", "rule.round_timeout"],
        ["9:36", "devices[0].link.jittre"],
        ["10:12", "devices[1].name"],
        ["11:5", "devices[2]"],
        ["13:5", "devices[2].memory"],
        ["14:7", "stop"],
        ["15:1", "dilatoin"],
    ]
    assert lines[-1] == " 10 errors"


def test_error_shows_its_line() -> None:
    with pytest.raises(BadInputError, match=r"\n    8 \|     cpu: -0\.5\n      \|          \^\n"):
        topology.load(BROKEN / "negative-cpu.yaml")


@pytest.mark.parametrize(
    ("instead", "told"),
    [
        ("rule: {name: fedasync, mixing: 2}", "4:32: rule.mixing: found 2"),
        ("rule: {name: fedavg, sample: 9}", "4:30: rule.sample: found 9, but there are only 4 clients"),
        ("rule: {}", "4:7: rule: name is missing"),
        ("rule: fedbuff", "4:7: rule: found 'fedbuff', expected keys and values such as rule: {name:"),
        ("rule: {name: fedbuff, server_lr: '1'}", "4:34: rule.server_lr: found '1', expected a number"),
        ("rule: a: b", "4:8: not YAML: mapping values are not allowed in this context; put a text "),
        (" rule: a", "not find expected key (while parsing a block mapping that begins on line 2); "),
        ("rule: [a", "(while parsing a flow sequence that begins on line 4); close the bracket, or"),
        ("rule", "not find expected ':' (while scanning a simple key that begins on line 4); write"),
        ("rule: @a", "start any token (while scanning for the next token); put the text in quotes"),
        ("rule: *fedbuff", "4:7: not YAML: found undefined alias 'fedbuff'; put a text that begins"),
        ("rule: 'a", "(while scanning a quoted scalar that begins on line 4); close the quotes"),
        ('rule: "a\\d"', "(while parsing a quoted scalar that begins on line 4); put a text with a "),
        ("---", "(expected a single document in the stream that begins on line 2); remove the line ---"),
        ("rule: &r {name: *r}", "4:7: not YAML: this value contains itself"),
        ("rule: !!python/object/apply:os.getcwd []", "4:7: not YAML: could not determine a constructor"),
        (f"rule: {{name: fedasync, mixing: {10**400}}}", "4:32: not YAML: expected a whole number of"),
        ("1: 2", "4:1: not YAML: a key must be a text"),
        ("rule: " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_further_invalid_topologies_are_refused(instead: str, told: str) -> None:
    lines = MINIMAL.splitlines()
    lines[3] = instead
    with pytest.raises(BadInputError) as refused:
        topology.parse("\n".join(lines))
    assert told in str(refused.value)


def test_yaml_aliases_cannot_expand_a_small_file() -> None:
    text = "a: &a [1,2,3,4,5,6,7,8,9]\n"
    for name, inner in ("ba", "cb", "dc", "ed", "fe", "gf", "hg"):
        text += f"{name}: &{name} [{','.join([f'*{inner}'] * 9)}]\n"
    with pytest.raises(BadInputError, match="too many values"):
        topology.parse(text)


def test_numbers_follow_yaml_1_2() -> None:
    task = "task: {name: digits-logreg, l2: 1e-3, local: {steps: 20}}"
    lines = [*MINIMAL.splitlines()[:2], task, *MINIMAL.splitlines()[3:]]
    assert topology.parse("\n".join(lines)).task.named == Named(
        "digits-logreg", {"l2": 1e-3, "bias": True}
    )


def test_resolved_topology_spells_out_defaults_and_groups() -> None:
    groups = """
  - {name: pi, count: 2, cpu: 0.25, think: 200ms}
  - {name: nano, cpu: 0.1, think: {distribution: trace, values: [1s, 20ms]}, local: {epochs: 2, lr: 0.5}}
"""
    parsed = topology.parse(MINIMAL.replace(" [{name: nano, count: 4, cpu: 0.1}]", groups))
    pi, nano = parsed.devices
    assert parsed.device_names == ("pi-1", "pi-2", "nano")
    assert parsed.rule.named.params["server_lr"] == 1.0
    assert pi.memory == 512 * 2**20
    assert pi.local.build() == LocalTraining(steps=20)
    assert nano.local.build() == LocalTraining(epochs=2, lr=0.5)
    assert pi.think is not None
    assert pi.think.plain() == DrawnDuration("constant", {"value": 0.2})
    assert nano.think is not None
    assert nano.think.plain() == DrawnDuration("trace", {"values": (1.0, 0.02)})
    assert topology.parse(parsed.to_yaml()) == parsed


VIRTUAL = """
name: virtual
task: {name: digits-logreg, local: {steps: 20, fednova: true}, flops_per_step: 1e6}
rule: {name: fedavg}
server: {link: {up: 100mbit}}
devices:
  - {name: a, timing: 200ms, speed: {distribution: normal, mean: 1, std: 0.3}}
  - {name: b, gflops: 10, speed: 0.5, link: {up: 5mbit, rtt: 60ms}}
  - {name: c, cpu: 0.5, timing: {distribution: normal, mean: 1s, std: 1s, low: 100ms}}
stop: {after: 60s, target_accuracy: 90%}
runtime: {name: virtual}
virtual: {step_time: 2ms}
"""


def test_virtual_time_keys_are_resolved() -> None:
    parsed = topology.parse(VIRTUAL)
    a, b, c = parsed.devices
    assert a.timing is not None
    assert a.timing.plain() == DrawnDuration("constant", {"value": 0.2})
    assert b.link is not None
    assert b.link.plain() == AccessLink(up=5_000_000, rtt=0.06)
    assert c.timing is not None
    assert c.timing.plain() == DrawnDuration("normal", {"mean": 1.0, "std": 1.0, "low": 0.1})
    assert c.local.build().fednova
    assert parsed.server.link is not None
    assert parsed.server.link.plain() == AccessLink(up=100_000_000)
    assert parsed.virtual.step_time == 0.002
    assert topology.parse(parsed.to_yaml()) == parsed


def test_target_accuracy_conflicts_with_evaluation_after_the_run() -> None:
    late = VIRTUAL + "evaluate: {when: after}\n"
    with pytest.raises(BadInputError) as refused:
        topology.parse(late)
    assert "10:20: stop.target_accuracy: with evaluate.when" in str(refused.value)
    assert topology.parse(late.replace(", target_accuracy: 90%", "")).evaluate.when == "after"


QUADRATIC = VIRTUAL.replace("digits-logreg,", "quadratic, centers: [[0, 1], [2, 3.5], [4, 5]],").replace(
    ", target_accuracy: 90%", ""
)


def test_task_may_supply_data_per_device() -> None:
    parsed = topology.parse(QUADRATIC)
    assert parsed.task.named.params == {"centers": ((0.0, 1.0), (2.0, 3.5), (4.0, 5.0))}
    assert parsed.task.brings_shards
    assert topology.parse(parsed.to_yaml()) == parsed


@pytest.mark.parametrize(
    ("found", "instead", "told"),
    [
        (", [4, 5]", "", "3:34: task.centers: has 2 points"),
        ("[4, 5]", "[4]", "3:34: task.centers: has 3 points of [1, 2] numbers"),
        ("[4, 5]", "4", "3:53: task.centers[2]: found 4, expected a list"),
        ("60s", "60s, target_accuracy: 90%", "stop.target_accuracy: the task quadratic has no accuracy"),
        ("local", "partition: {scheme: shards}, local", "3:62: task.partition: the task quadratic"),
    ],
)
def test_keys_that_conflict_with_task_data_are_refused(found: str, instead: str, told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        topology.parse(QUADRATIC.replace(found, instead))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("partition", "params"),
    [
        ("{scheme: iid}", {}),
        (
            "{scheme: dirichlet, alpha: 1}",
            {"alpha": 1.0, "min_samples": 10, "self_balancing": False},
        ),
        (
            "{scheme: pathological}",
            {"classes_per_client": 2, "assignment": "first-deterministic"},
        ),
        (
            "{scheme: shards, shards_per_client: 4}",
            {"shards_per_client": 4, "shard_size": None, "keep_incomplete_shard": False},
        ),
        ("{scheme: resampled}", {"samples": 60}),
    ],
)
def test_partition_schemes_are_parsed(partition: str, params: dict[str, object]) -> None:
    text = MINIMAL.replace("local:", f"partition: {partition}, local:")
    parsed = topology.parse(text)
    assert parsed.task.partition.params == params
    assert topology.parse(parsed.to_yaml()) == parsed


def test_device_speeds_are_drawn_from_the_seed() -> None:
    speed = topology.parse(VIRTUAL).devices[0].speed
    drawn = np.array([speed.draw(1, f"a-{k}") for k in range(2000)])
    assert drawn.mean() == pytest.approx(1, abs=0.03)
    assert drawn.std() == pytest.approx(0.3, abs=0.03)
    assert drawn.min() >= 0.1
    assert speed.draw(1, "a-7") == drawn[7]
    assert speed.draw(2, "a-7") != drawn[7]


@pytest.mark.parametrize(
    ("speed", "lowest", "median", "highest"),
    [
        ("0.5", 0.5, 0.5, 0.5),
        ("{distribution: uniform, low: 1, high: 3}", 1.0, 2.0, 3.0),
        ("{distribution: lognormal, median: 2, sigma: 0.5}", 0.0, 2.0, np.inf),
        ("{distribution: pareto, scale: 1, shape: 1}", 1.0, 2.0, np.inf),
    ],
)
def test_device_speeds_follow_their_distribution(
    speed: str, lowest: float, median: float, highest: float
) -> None:
    group = topology.parse(VIRTUAL.replace("0.5, link", f"{speed}, link")).devices[1]
    drawn = np.array([group.speed.draw(1, f"b-{k}") for k in range(2000)])
    assert drawn.min() >= lowest
    assert np.median(drawn) == pytest.approx(median, rel=0.05)
    assert drawn.max() <= highest


@pytest.mark.parametrize(
    ("found", "instead", "told"),
    [
        ("fedavg", "fedasync", "3:48: task.local.fednova: the rule fedasync does not accept normalised"),
        (", flops_per_step: 1e6", "", "8:15: devices[1].gflops: needs the number of operations"),
        ("gflops: 10, speed: 0.5, ", "", "8:5: devices[1]: found none of cpu, profile, timing"),
        ("gflops: 10", "cpu: 0.1", "8:32: devices[1].speed: has no effect"),
        ("speed: 0.5", "speed: 0", "8:34: devices[1].speed: value is 0, expected a number above 0"),
        ("speed: 0.5", "speed: fast", "devices[1].speed: found 'fast'"),
        ("mean: 1,", "mean: 0.05,", "7:66: devices[0].speed.mean: found 0.05"),
        ("speed: 0.5", "speed: {distribution: uniform, low: 0, high: 1}", "8:63: devices[1].speed.low"),
        (
            "speed: 0.5",
            "speed: {distribution: uniform, low: 1s, high: 2s}",
            "8:63: devices[1].speed.low: found '1s', expected a number",
        ),
        ("{up: 100mbit}", "{rtt: 9ms}", "5:17: server.link.rtt: unknown key"),
        ("{up: 100mbit}", "{}", "5:16: server.link: found none of up, down, expected a rate"),
        ("name: b", "name: b, count: 1000001", "devices from 1 to 1000000"),
        ("step_time: 2ms}", "step_time: 2ms}\nevaluate: {on: clients}", "13:11: evaluate: found on:"),
        ("{name: virtual}", "{name: virtul}", "runtime.name: found 'virtul'"),
    ],
)
def test_conflicting_keys_are_refused(found: str, instead: str, told: str) -> None:
    assert VIRTUAL.count(found) == 1
    with pytest.raises(BadInputError) as refused:
        topology.parse(VIRTUAL.replace(found, instead))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "topologies").glob("*.yaml")), ids=lambda path: path.stem
)
def test_example_topologies_fit_two_cores_and_resolve(path: Path) -> None:
    parsed = topology.load(path)
    runtime = "docker" if parsed.runtime.name == "auto" else parsed.runtime.name
    plan(parsed, runtime, TWO_CORES, catalog.read(parsed))
    assert parsed.name == path.stem
    assert topology.parse(parsed.to_yaml()) == parsed


def test_schema_has_the_parameters_of_every_rule_and_task() -> None:
    schema = topology.json_schema()
    rules = schema["properties"]["rule"]["discriminator"]["mapping"]
    assert sorted(rules) == sorted(RULES)
    assert schema["$defs"]["FedBuff"]["properties"]["buffer_size"]["description"].startswith("K")
    assert schema["$defs"]["LocalSettings"]["properties"]["lr"]["description"] == "Step size."
    assert schema["$defs"]["EvaluationSettings"]["properties"]["every"]["default"] == "2s"
    json.dumps(schema)


@pytest.mark.parametrize(
    ("instead", "valid"),
    [
        ("timing: {distribution: uniform, low: 1s, high: 2s}", True),
        ("timing: {distribution: uniform, low: 1mbit, high: 2s}", False),
        ("timing: {distribution: uniform, low: 1s, hihg: 2s}", False),
        ("draw: {each: {cpu: {distribution: uniform, low: 1, high: 2}}}", True),
        ("draw: {each: {cpu: {distribution: uniform, low: 1s, high: 2s}}}", False),
        ("draw: {each: {memory: {distribution: choice, values: [1GiB], weights: [1]}}}", True),
    ],
)
def test_schema_knows_units_of_distributions_that_are_defined_once(instead: str, valid: bool) -> None:
    validator = jsonschema.Draft202012Validator(topology.json_schema())
    found = yaml.safe_load(MINIMAL.replace("cpu: 0.1", instead))
    assert validator.is_valid(found) == valid


def test_schema_defines_tasks_with_the_same_keys_once() -> None:
    schema = topology.json_schema()
    tasks = schema["properties"]["task"]["discriminator"]["mapping"]
    assert sorted(tasks) == sorted(TASKS)
    definition = schema["$defs"][tasks["mnist-mlp"].removeprefix("#/$defs/")]
    names = {one["const"]: one["description"] for one in definition["properties"]["name"]["oneOf"]}
    assert names["mnist-cnn"].startswith("MNIST: two 5×5 convolutions")
    assert tasks["mnist-cnn"] == tasks["mnist-mlp"] != tasks["mnist-logreg"]


def test_link_class_expands_to_its_link() -> None:
    short, long = (
        topology.parse(MINIMAL.replace("cpu: 0.1", f"cpu: 0.1, link: {link}"))
        for link in ("lte", "{class: lte}")
    )
    assert short == long
    assert short.devices[0].link is not None
    assert short.devices[0].link.kind == "lte"
    with pytest.raises(BadInputError, match=r"devices\[0\].link: found 'LTE!'"):
        topology.parse(MINIMAL.replace("cpu: 0.1", "cpu: 0.1, link: LTE!"))


def test_image_is_a_tag_or_a_dockerfile() -> None:
    def dockerfile(image: str) -> Path | None:
        return (
            topology.parse(MINIMAL.replace("cpu: 0.1", f"cpu: 0.1, image: '{image}'"))
            .devices[0]
            .dockerfile
        )

    for tag in ("my-agent", "my-agent:1", "host:5000/team/agent:1", "agent:Dockerfile"):
        assert dockerfile(tag) is None
    for path in ("Dockerfile", "./a b/Dockerfile", "sensor/Dockerfile.pi", "x.Dockerfile"):
        assert dockerfile(path) == Path(path).absolute()  # from the folder of the topology


MERGED = """
x-common: &common {count: 2, cpu: 25%, link: &slow {up: 1mbit}}
name: merged
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff, buffer_size: 3}
devices:
  - {name: own, <<: *common, cpu: 0.5}
  - <<: [{memory: 1GiB, cpu: 10%}, *common]
    name: list
    link: {<<: *slow, rtt: 80ms}
stop: {after: 60s}
"""


def test_merge_keys_and_extension_blocks_are_read_as_in_compose() -> None:
    own, listed = topology.parse(MERGED).devices
    assert (own.count, own.cpu, listed.count, listed.cpu, listed.memory) == (2, 0.5, 2, 0.1, 2**30)
    assert own.link is not None
    assert listed.link is not None
    assert (own.link.up, own.link.rtt, listed.link.up, listed.link.rtt) == (10**6, None, 10**6, 0.08)


@pytest.mark.parametrize(
    ("old", "new", "place", "told"),
    [
        ("<<: *common, cpu: 0.5", "<<: 3, cpu: 0.5", "7:21", "<< needs keys and values"),
        ("cpu: 25%", "cpux: 25%", "2:30: devices[0].cpux", "unknown key; did you mean cpu?"),
        ("x-common: &common", "common: &common", "2:1: common", "unknown key"),
        ("- {name: own, <<: *common", "- &me {name: own, <<: *me", "7:5", "contains itself"),
        ("stop:", "scenario: [{at: 1s, kill: own}]\nstop:", "11:21: scenario[0].kill", "mean crash?"),
    ],
)
def test_wrong_merge_keys_are_reported_with_their_place(
    old: str, new: str, place: str, told: str
) -> None:
    with pytest.raises(BadInputError) as refused:
        topology.parse(MERGED.replace(old, new))
    assert f"<text>:{place}" in str(refused.value)
    assert told in str(refused.value)
