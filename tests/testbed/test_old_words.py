"""Words of the version before this one: read as those of today, with a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from testbed import topology
from testbed.api import launching
from testbed.errors import BadInputError
from tests.running import Testbed

TEXT = """
name: t
task: {name: digits-logreg, local: {steps: 1}, partition: {scheme: iid}}
rule: {name: fedbuff, buffer_size: 1}
devices:
  - {name: a, cpu: 0.1, link: {up: 5mbit, rtt: 80ms}}
  - {name: b, cpu: 0.1}
scenario: [{at: 1s, set: a, link: {rtt: 10ms}}]
durability: update
stop: {after: 1s}
"""


@pytest.mark.parametrize(
    ("now", "old", "place"),
    [
        ("up: 5mbit, rtt: 80ms", "up: 5mbit, delay: 40ms", "devices[0].link"),
        ("up: 5mbit, rtt: 80ms", "up: 5mbit, rtt: 80ms, delay: null", "devices[0].link"),
        ("link: {rtt: 10ms}", "link: {delay: 5ms}", "scenario[0].link"),
        ("durability: update", "durability: update\nrecord: nothing", "record"),
        ("durability: recording", "record: updates", "record"),
        ("durability: recording", "durability: none\nrecord: updates", "record"),
        ("scheme: iid", "scheme: IidPartitioner", "task.partition"),
        (
            "scheme: dirichlet, alpha: [0.5, 1], min_samples: 5, self_balancing: true",
            "scheme: DirichletPartitioner, alpha: [0.5, 1], min_partition_size: 5, self_balancing: true",
            "task.partition",
        ),
        (
            "scheme: pathological, classes_per_client: 3, assignment: random",
            "scheme: PathologicalPartitioner, num_classes_per_partition: 3",
            "task.partition",
        ),
        (
            "scheme: pathological, classes_per_client: 3, assignment: deterministic",
            "scheme: PathologicalPartitioner, num_classes_per_partition: 3, "
            "class_assignment_mode: deterministic",
            "task.partition",
        ),
        (
            "scheme: shards, shards_per_client: null, shard_size: 45",
            "scheme: ShardPartitioner, shard_size: 45",
            "task.partition",
        ),
        (
            "scheme: natural, choice: first, min_samples: 1",
            "scheme: NaturalIdPartitioner",
            "task.partition",
        ),
        (
            "durability: update\nvirtual: {step_time: 1ms}",
            "durability: update\nruntime: {name: auto, step_time: 1ms, start_time: null}",
            "virtual",
        ),
        ("cpu: 0.2, name: b", "cpu: 0.2, name: b, cpus: {b: 0.3}", "devices[1]"),
    ],
)
def test_old_keys_are_read_as_the_current_ones_with_a_hint(now: str, old: str, place: str) -> None:
    key = now.split(":")[0]
    lines = {
        "up": "up: 5mbit, rtt: 80ms",
        "link": "link: {rtt: 10ms}",
        "scheme": "scheme: iid",
        "cpu": "name: b, cpu: 0.1",
    }
    line = lines.get(key, "durability: update")
    today, before = (topology.parse(TEXT.replace(line, words)) for words in (now, old))
    assert before == today
    assert today.hints == ()
    (hint,) = before.hints
    assert place in hint


def test_invalid_old_keys_are_errors_at_their_place_and_not_in_the_schema() -> None:
    for old, message in (
        ("delay: 40", "6:50: devices[0].link.rtt: found 40"),
        ("rtt: 80ms, delay: 40ms", "6:54: devices[0].link.delay: unknown key"),
    ):
        with pytest.raises(BadInputError) as refused:
            topology.parse(TEXT.replace("rtt: 80ms", old))
        assert message in str(refused.value)
    with pytest.raises(BadInputError, match=r"11:1: record: unknown key"):
        topology.parse(TEXT + "record: everything\n")
    schema = json.dumps(topology.json_schema())
    for old in ('"delay"', '"record"', "IidPartitioner", '"NaturalIdPartitioner', "min_partition_size"):
        assert old not in schema


def test_hints_are_printed_before_a_run(testbed: Testbed, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT.replace("rtt: 80ms", "delay: 40ms").replace("durability: update", ""))
    hint = "devices[0].link: write rtt: 80ms in place of delay: 40ms"
    for command in ("validate", "plan"):
        assert hint in testbed(command, path).out
    assert launching.plan_run(path, runtime="virtual").hints[0].startswith(hint)
    as_mapping = launching.validate(yaml.safe_load(path.read_text()))
    assert as_mapping.hints[0].startswith(hint)


def test_sweep_may_have_old_keys(tmp_path: Path) -> None:
    from testbed.run.options import Options
    from testbed.sweeps import cells

    (tmp_path / "t.yaml").write_text(TEXT)
    grid = {"record": ["nothing", "updates"], "devices[1].link": [{"delay": "5ms"}]}
    sweep = cells.from_mapping({"topology": "t.yaml", "grid": grid}, "s", tmp_path, Options("virtual"))
    assert [cell.topology.durability for cell in sweep.cells] == ["update", "recording"]
    assert {hint.split(":")[0] for cell in sweep.cells for hint in cell.topology.hints} == {
        "write durability",
        "remove record",
        "devices[1].link",
    }
