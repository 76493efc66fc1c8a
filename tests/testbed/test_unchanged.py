"""A run that is continued has to be the run that began: another topology is refused, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import BadInputError
from testbed.run import preparing
from testbed.rundir.directory import RunDirectory

BEGAN = """
name: one
seed: 7
task: {name: digits-logreg, local: {steps: 5, lr: 0.1}}
rule: {name: fedbuff, buffer_size: 2}
devices: [{name: a, cpu: 0.5}, {name: b, cpu: 0.5}]
stop: {after: 60s}
"""


@pytest.fixture
def begun(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.topology.write_text(BEGAN)
    directory.start.write_bytes(b"weights")
    preparing.save_digests(directory)
    preparing.check_unchanged(directory)
    return directory


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seed: 7", "seed: 8", "seed was 7, and is 8."),
        ("steps: 5", "steps: 6", "task.local.steps was 5, and is 6."),
        ("buffer_size: 2", "buffer_size: 7", "rule.buffer_size was 2, and is 7."),
        (", buffer_size: 2", "", "rule.buffer_size was 2, and is missing."),
        ("cpu: 0.5}]", "cpu: 0.5}, {name: c}]", 'devices[2] is new, {"name": "c"}.'),
        ("{name: a, cpu: 0.5}, ", "", 'devices[0].name was "a", and is "b"; devices[1] was {"cpu": '),
        ("name: one", "name: two\ncode: a.py", 'name was "one", and is "two"; code is new, "a.py"'),
    ],
    ids=["seed", "steps", "rule", "missing", "one more", "one less", "two"],
)
def test_changed_topology_is_refused_with_the_differences(
    old: str, new: str, told: str, begun: RunDirectory
) -> None:
    begun.topology.write_text(BEGAN.replace(old, new))
    with pytest.raises(BadInputError) as raised:
        preparing.check_unchanged(begun)
    assert f"topology.yaml is not the topology that the run began with: {told}" in str(raised.value)
    assert "undo the change, or start a new run with it" in str(raised.value)


def test_at_most_five_differences_are_listed(begun: RunDirectory) -> None:
    begun.topology.write_text("{a: 1, b: 2, c: 3}")
    with pytest.raises(BadInputError, match=r"; 4 more differences\. A resumed run"):
        preparing.check_unchanged(begun)


def test_comments_and_key_order_do_not_count(begun: RunDirectory) -> None:
    *rest, stop = BEGAN.splitlines()
    begun.topology.write_text("\n".join(["# by hand", stop, *rest]))
    preparing.check_unchanged(begun)


def test_differences_are_not_listed_if_the_runs_copy_was_changed(begun: RunDirectory) -> None:
    for text in (begun.state / "topology.yaml", begun.topology):
        text.write_text(BEGAN.replace("seed: 7", "seed: 8"))
    with pytest.raises(BadInputError, match=r"the change is not known: .* was changed, too"):
        preparing.check_unchanged(begun)
    (begun.state / "topology.yaml").unlink()
    with pytest.raises(BadInputError, match=r"the change is not known: .* cannot be read"):
        preparing.check_unchanged(begun)


def test_changed_initial_state_is_refused(begun: RunDirectory) -> None:
    begun.start.write_bytes(b"Weights")
    with pytest.raises(BadInputError, match=r"start\.safetensors, the state that the run's module"):
        preparing.check_unchanged(begun)
    begun.start.unlink()
    with pytest.raises(BadInputError, match="has changed since the run began: put a copy back"):
        preparing.check_unchanged(begun)
