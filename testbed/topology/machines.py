"""Machines that are described in a file, to plan for before there are any.

    nodes:
      - {name: rack-a, count: 20, cores: 16, memory: 64GiB, labels: {rack: a}}
      - {name: old, cores: 4, memory: 16GiB, core: 0.4}      # one of its cores, in cores of this host

Broker and aggregator are on the first.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from testbed.host.nodes import Node
from testbed.topology import validation_errors, yamlfile
from testbed.topology.fields import Count, Memory, Model, Name, Positive


class Machine(Model):
    """One machine, or `count` equal ones."""

    name: Name
    count: Count | None = None
    cores: Count
    memory: Memory
    core: Positive | None = Field(
        default=None,
        description="Speed of one of its cores, in cores of this host; 1 where not given",
    )
    labels: dict[str, str] = Field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


class Machines(Model):
    nodes: tuple[Machine, ...] = Field(min_length=1)


def read(path: Path) -> tuple[Node, ...]:
    """The nodes that the file at `path` describes. Raises BadInputError that lists all that is wrong."""
    return _nodes(yamlfile.read(path))


def parse(text: str) -> tuple[Node, ...]:
    """`read` of a text instead of a file."""
    return _nodes(yamlfile.parse(text))


def _nodes(document: yamlfile.Document) -> tuple[Node, ...]:
    found = validation_errors.validated(Machines, document)
    if document.problems:
        raise document.source.error(document.problems)
    each = [(name, machine) for machine in found.nodes for name in machine.names]
    return tuple(
        Node(
            id=name,
            name=name,
            cores=machine.cores,
            memory=machine.memory,
            core=machine.core,
            labels=machine.labels,
            here=number == 0,
        )
        for number, (name, machine) in enumerate(each)
    )
