"""The benchmark: topologies/benchmark/benchmark.yaml, and the topologies of the tasks beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from testbed.errors import BadInputError
from testbed.topology import validation_errors, yamlfile
from testbed.topology.fields import Model, Positive, PositiveShare

FOLDER = Path(__file__).parents[2] / "topologies" / "benchmark"
FILE = "benchmark.yaml"
Changes = dict[str, Any]
"""Changes to a topology, as in a variant of a sweep."""


class TaskEntry(Model):
    """A task. Its topology is NAME.yaml beside the benchmark's file."""

    target: PositiveShare
    """Accuracy to reach."""
    steps: tuple[Positive, ...]
    """Step sizes that are tried first, ascending."""
    changes: dict[str, Changes] = Field(default={})
    """Changes for this task, by fleet."""


class Seeds(Model):
    tune: int
    """Seed that chooses step sizes."""
    compare: tuple[int, ...]
    """Seeds that compare rules. None of them chooses."""


class BenchmarkFile(Model):
    """Keys of benchmark.yaml. Fleets, skews and rules are changes to the task's topology."""

    version: int
    tasks: dict[str, TaskEntry]
    fleets: dict[str, Changes]
    skews: dict[str, Changes]
    rules: dict[str, Changes]
    step_keys: dict[str, str]
    """Key of the step size, by rule; `task.local.lr` for the other rules."""
    seeds: Seeds


@dataclass(frozen=True, slots=True, order=True)
class Condition:
    """What rules are compared on."""

    task: str
    fleet: str
    skew: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.fleet}-{self.skew}"


@dataclass(frozen=True)
class Benchmark:
    """The benchmark in a folder."""

    file: BenchmarkFile
    """The file, with the rules of the user."""
    folder: Path
    written: BenchmarkFile
    """The file as it is."""

    @property
    def version(self) -> int:
        return self.file.version

    def digest(self, task: str) -> str:
        """Return digits of the SHA-256 of all that the results of `task` depend on. Results with another
        digest are results of another benchmark."""
        facts = self.written.model_dump(mode="json") | {"tasks": None, "task": self.written.tasks[task]}
        facts["task"] = facts["task"].model_dump(mode="json")
        text = json.dumps(facts, sort_keys=True) + yamlfile.write(
            yamlfile.read(self.topology(task)).data
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def topology(self, task: str) -> Path:
        return self.folder / f"{task}.yaml"

    def conditions(self, task: str) -> Iterator[Condition]:
        """Yield the conditions of `task`, skew by skew."""
        for skew in self.file.skews:
            for fleet in self.file.fleets:
                yield Condition(task, fleet, skew)

    def step_key(self, rule: str) -> str:
        return self.file.step_keys.get(rule, "task.local.lr")

    def changes(self, condition: Condition, rule: str, step: float) -> Changes:
        """Return the changes to the task's topology for a run of `rule` with step size `step`."""
        file, task = self.file, self.file.tasks[condition.task]
        return {
            **file.fleets[condition.fleet],
            **task.changes.get(condition.fleet, {}),
            **file.skews[condition.skew],
            **file.rules[rule],
            self.step_key(rule): step,
        }


def load(folder: Path = FOLDER, added: Mapping[str, Changes] | None = None) -> Benchmark:
    """Read the benchmark in `folder`. `added`: further rules, by name. Raises BadInputError."""
    file = validation_errors.validate(BenchmarkFile, yamlfile.read(folder / FILE))
    known = sorted((added or {}).keys() & file.rules.keys())
    if known:
        raise BadInputError(f"the benchmark has a rule {known[0]} already: give yours another name")
    rules = {**file.rules, **(added or {})}
    return Benchmark(file.model_copy(update={"rules": rules}), folder, file)


def read_rules(path: Path) -> dict[str, Changes]:
    """Read rules of the user: a mapping as the benchmark's `rules`, with paths of own code relative to
    `path`. Raises BadInputError."""
    data = yamlfile.read(path).data
    if not isinstance(data, dict) or not all(isinstance(changes, dict) for changes in data.values()):
        raise BadInputError(f"{path}: expected rules by name such as mine: {{rule: {{name: fedasync}}}}")
    code = {name: changes.get("code") for name, changes in data.items()}
    return {
        str(name): {**changes, **({"code": str(path.parent.resolve() / str(own))} if own else {})}
        for (name, changes), own in zip(data.items(), code.values(), strict=True)
    }
