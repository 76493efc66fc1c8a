"""Machines described in a file, to plan a run for machines that are not available yet.

    nodes:
      - {name: rack-a, count: 20, cores: 16, memory: 64GiB, labels: {rack: a}}
      - {name: old, cores: 4, memory: 16GiB, core: 0.4}      # a core is 0.4 times as fast as this host's

Broker and aggregator run on the first machine.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from testbed.host.nodes import Node
from testbed.topology import validation_errors, yamlfile
from testbed.topology.fields import Count, Memory, Model, Name, Positive


class Machine(Model):
    """A machine, or `count` equal machines."""

    name: Name = Field(description="Name of the machine; with count, of the group of machines")
    count: Count | None = Field(
        default=None, description="Number of equal machines, called name-1, name-2, ..."
    )
    cores: Count = Field(description="Number of cores")
    memory: Memory = Field(description="Size of the memory")
    core: Positive | None = Field(
        default=None,
        description="Speed of a core of the machine, relative to a core of this host. Default: 1",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels that placement of a device group can select"
    )

    @property
    def names(self) -> tuple[str, ...]:
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


class Machines(Model):
    """A file of machines."""

    nodes: tuple[Machine, ...] = Field(min_length=1)


def read(path: Path) -> tuple[Node, ...]:
    """Raises BadInputError that lists all errors."""
    return _nodes(yamlfile.read(path))


def parse(text: str) -> tuple[Node, ...]:
    """Raises BadInputError that lists all errors."""
    return _nodes(yamlfile.parse(text))


def _nodes(document: yamlfile.Document) -> tuple[Node, ...]:
    found = validation_errors.validate(Machines, document)
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
