"""Hardware in files: device profiles and link classes, the testbed's and the user's own, and machines to
plan for."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from agents.disk import files
from testbed.errors import BadInputError
from testbed.host.nodes import Node
from testbed.topology import validation_errors, yamlfile
from testbed.topology.features import LONG_FIGURES, FeatureProfileKeys
from testbed.topology.fields import (
    Count,
    Memory,
    Model,
    Name,
    Positive,
    RelativeError,
    Size,
    Thermal,
    optional,
)
from testbed.topology.links import LinkKeys
from testbed.topology.yamlfile import Document

# Device profiles and link classes: the testbed's, and the user's own.
#
# A profiles file has the keys `devices` and `links`, each with entries by name. The testbed's files are
# read first. Then the user's file follows (`~/.config/testbed/profiles.yaml`), and then `profiles.yaml`
# in the folder of the topology. A later entry replaces the whole earlier entry of the same name.

FILE = "profiles.yaml"
_BUILT_IN = Path(__file__).parents[1] / "catalog"
POPULATIONS = _BUILT_IN / "populations"
"""From which fleets are drawn: each file is a survey (`testbed.fleets.surveys`)."""
_WIDTH = 80
EMULATED = """\
How a device profile is used: the speeds in training become a CPU share, given
the speeds of this host and the operations of a step of the task. They are
fitted to published training times, or measured (--add); "within" is the mean
error of the times that they predict for other networks. Without speeds (–),
gflops become the share. They are measured with HPL only: training may be
several times slower or faster. memory becomes the memory limit of the
container, reduced if the host has less (see testbed plan). The limit covers the
client and its init; on a real device the system takes a part of the memory.
Outside containers memory is not limited. power is for estimates of energy;
energy is for devices with energy in the topology. cpu and memory in the
topology override those of the profile.
Not emulated: single cores (one CPU quota stands for all of them, so that work
for one core alone is faster here than on the device), GPU, caches, and memory
bandwidth. Heat is emulated if thermal says how a device slows down."""
"""For users. Its lines have at most 80 characters."""
_ABOUT = ("description", "source")


class _ProfileEntry(Model):
    description: str = optional("Description in words", "")
    source: str = optional("Source of the figures", "")

    @model_validator(mode="after")
    def _has_figures(self) -> Self:
        figures = [name for name in type(self).model_fields if name not in _ABOUT]
        if not self.figures():
            raise ValueError(f"found none of {', '.join(figures)}, expected at least one of them")
        return self

    def figures(self) -> dict[str, Any]:
        """The known figures, written as in a topology: `{"down": "12mbit", "rtt": "70ms"}`."""
        return self.model_dump(mode="json", exclude=set(_ABOUT), exclude_none=True)


class TrainingSpeeds(Model):
    """Speeds of the kinds of work that training consists of, on all cores of a device."""

    convolution: Positive = Field(description="Gflop/s (FP32) of convolutions")
    depthwise: Positive = Field(description="Gflop/s (FP32) of depthwise and other grouped convolutions")
    memory: Positive = Field(description="GB/s that all other operations read and write")
    matrix: Positive | None = optional("Gflop/s (FP32) of matrix products. Default: derived from gflops")
    error: RelativeError | None = optional(
        "Mean relative error of predicted training times, for neural networks that were not used to fit "
        "the speeds"
    )


class _Hardware(_ProfileEntry):
    gflops: Positive | None = optional(
        "FP64 Gflop/s of the whole device in High-Performance Linpack (HPL)"
    )
    cores: Count | None = optional("Number of cores")
    memory: Size | None = optional("Size of the memory")


class DeviceProfile(FeatureProfileKeys, _Hardware):
    """A type of device. A key without a value is unknown."""

    thermal: Thermal | None = optional("Slow-down by heat, used if the topology has none")
    training: TrainingSpeeds | None = optional(
        "Speeds in training, fitted or measured; used in preference to gflops"
    )

    @model_validator(mode="after")
    def _has_speed_of_products(self) -> Self:
        if self.training is not None and self.training.matrix is None and self.gflops is None:
            raise ValueError("training has no matrix, and there are no gflops: add one of the two")
        return self


class LinkClass(LinkKeys, _ProfileEntry):
    """A type of access link."""


def _entries(value: Any) -> Any:
    """Accept a key that has only comments below it."""
    if not isinstance(value, dict | None):
        raise PydanticCustomError("complete", "expected entries by name, such as my-own: {...}")
    return value or {}


E = TypeVar("E", bound=_ProfileEntry)
_Entries = Annotated[dict[Name, E], BeforeValidator(_entries)]


class Profiles(Model):
    """Content of one profiles file, or of several combined files."""

    devices: _Entries[DeviceProfile] = Field(default={})
    links: _Entries[LinkClass] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _has_sections(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            message = "expected devices: or links:, and entries by name below"
            raise PydanticCustomError("complete", message)
        return data

    def device(self, name: str) -> DeviceProfile:
        """Raises BadInputError that suggests a known name."""
        return _look_up(name, self.devices, "device profile")

    def link(self, name: str) -> LinkClass:
        """Raises BadInputError that suggests a known name."""
        return _look_up(name, self.links, "link class")

    def select(self, name: str, populations: Sequence[str] = ()) -> Profiles:
        """Return the device profile and the link class called `name`, if any.

        Raises BadInputError that suggests a known name, unless `name` is one of `populations`.
        """
        known: dict[str, object] = {**self.devices, **self.links, **dict.fromkeys(populations)}
        if name not in known:
            message = f"no device profile, link class or population is called {name!r}"
            raise BadInputError(f"{message}: {suggestion(name, known)}")
        return Profiles(
            devices={key: entry for key, entry in self.devices.items() if key == name},
            links={key: entry for key, entry in self.links.items() if key == name},
        )


def load(folder: Path | None = None) -> Profiles:
    """If `folder` is None, read only the testbed's profiles and the user's profiles. Raises
    BadInputError that lists all errors in one of the files."""
    paths = [_BUILT_IN / "devices.yaml", _BUILT_IN / "links.yaml", user_file()]
    if folder is not None:
        paths.append(folder / FILE)
    found = [read(path) for path in paths if path.exists()]
    return Profiles(
        devices={name: entry for each in found for name, entry in each.devices.items()},
        links={name: entry for each in found for name, entry in each.links.items()},
    )


def population_names() -> list[str]:
    return sorted(path.stem for path in POPULATIONS.glob("*.csv"))


def user_file() -> Path:
    root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(root) / "testbed" / FILE


def read(path: Path) -> Profiles:
    """Raises BadInputError that lists all errors."""
    return Profiles() if _is_blank(path) else _profiles(yamlfile.read(path))


def parse(text: str, name: str = "<text>") -> Profiles:
    """Errors call the text `name`. Raises BadInputError that lists all errors."""
    return _profiles(yamlfile.parse(text, name))


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the most similar name in `known`, or all known names if none is similar."""
    known = list(known)
    longer = next((each for each in known if name in each), None)
    found = validation_errors.did_you_mean(name, known) or (longer and f"did you mean {longer}?")
    return found or f"known are {', '.join(known)}."


def rows(profiles: Profiles) -> list[dict[str, Any]]:
    return [
        {"name": name, "kind": kind, **entry.model_dump(mode="json")}
        for kind, entries in (("device", profiles.devices), ("link", profiles.links))
        for name, entry in entries.items()
    ]


def listing(profiles: Profiles) -> str:
    """Without descriptions. The tables of the testbed's own profiles fit into 80 columns."""
    tables = _table("device", profiles.devices), _table("link", profiles.links)
    return "\n\n".join(filter(None, tables))


def details(profiles: Profiles) -> str:
    entries = (*profiles.devices.items(), *profiles.links.items())
    return "\n\n".join("\n".join(_block(*entry)) for entry in entries)


def _look_up(name: str, entries: Mapping[str, E], what: str) -> E:
    if name in entries:
        return entries[name]
    raise BadInputError(f"no {what} is called {name!r}: {suggestion(name, entries)}")


def _is_blank(path: Path) -> bool:
    lines = path.read_bytes().splitlines() if path.is_file() else [b"not a file: the reader says so"]
    return all(not line.strip() or line.lstrip().startswith(b"#") for line in lines)


def _profiles(document: Document) -> Profiles:
    profiles = validation_errors.validate(Profiles, document)
    if document.problems:
        raise document.source.error(document.problems)
    return profiles


def _table(kind: str, entries: Mapping[str, _ProfileEntry]) -> str:
    known = {name: entry.figures() for name, entry in entries.items()}
    for figures in known.values():
        if "training" in figures:
            error = figures["training"].get("error")
            figures["training"] = "known" if error is None else f"within {error:.0%}"
        figures.update(dict.fromkeys(figures.keys() & {*LONG_FIGURES}, "known"))
    order = {column: None for entry in entries.values() for column in type(entry).model_fields}
    columns = [column for column in order if any(column in figures for figures in known.values())]
    cells = [[kind, *columns]] if entries else []
    cells += [[name, *(_format(row.get(column)) for column in columns)] for name, row in known.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _block(name: str, entry: _ProfileEntry) -> Iterator[str]:
    yield name
    facts = {**entry.figures(), "source": entry.source}
    for text in (f"{key}: {_format(value)}" for key, value in facts.items() if value):
        yield textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    if entry.description:
        yield ""
        yield textwrap.fill(entry.description, _WIDTH)


def _format(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


_DEVICES = re.compile(r"^devices:[ \t]*(#.*)?$", re.MULTILINE)
_INDENT = "  "


def add_own_profile(to: Path, entries: str, source: str) -> list[str]:
    """Add devices to the profiles file `to`, and return their names.

    `entries` is the text of a profiles file, which errors call `source`. The rest of `to` stays
    unchanged. Raises BadInputError if `entries` has an error or no device, or if `to` already has a
    device of the same name.
    """
    names = list(parse(entries, source).devices)
    if not names:
        raise BadInputError(f"{source}: found no devices to add")
    text = to.read_text(encoding="utf-8") if to.is_file() else ""
    known = read(to).devices if to.is_file() else {}
    for name in names:
        if name in known:
            raise BadInputError(
                f"{to} already has a device {name}: remove it there, or rename the new one"
            )
    new = append_devices(text, entries)
    parse(new, str(to))
    with files.atomic_write(to) as partial:
        partial.write_text(new, encoding="utf-8")
    return names


def append_devices(text: str, entries: str) -> str:
    """Both are texts of profiles files. Raises BadInputError if `text` has its devices in braces
    (`devices: {...}`)."""
    body = textwrap.dedent(_DEVICES.split(entries, maxsplit=1)[-1].strip("\n"))
    found = _DEVICES.search(text)
    if found is None:
        if re.search(r"^devices:", text, re.MULTILINE):
            raise BadInputError(
                "the devices are written in braces, so that nothing can be added automatically: add "
                "this by hand\n\n"
                f"{textwrap.indent(body, _INDENT)}"
            )
        before = f"{text.rstrip()}\n" if text.strip() else ""
        return f"{before}devices:\n{textwrap.indent(body, _INDENT)}\n"
    rest = text[found.end() :]
    inside = re.match(r"(?:\s*#.*\n|\s*\n)*([ \t]+)\S", rest)
    indent = inside[1] if inside else _INDENT
    return f"{text[: found.end()]}\n{textwrap.indent(body, indent)}\n{rest.lstrip(chr(10))}"


# Machines described in a file, to plan a run for machines that are not available yet.
#
#     nodes:
#       - {name: rack-a, count: 20, cores: 16, memory: 64GiB, labels: {rack: a}}
#       - {name: old, cores: 4, memory: 16GiB, core: 0.4}      # a core is 0.4 times as fast as this
#       host's
#
# Broker and aggregator run on the first machine.


class Machine(Model):
    """A machine, or `count` equal machines."""

    name: Name = Field(description="Name of the machine; with count, of the group of machines")
    count: Count | None = optional("Number of equal machines, called name-1, name-2, ...")
    cores: Count = Field(description="Number of cores")
    memory: Memory = Field(description="Size of the memory")
    core: Positive | None = optional(
        "Speed of a core of the machine, relative to a core of this host. Default: 1"
    )
    labels: dict[str, str] = optional("Labels that placement of a device group can select", {})

    @property
    def names(self) -> tuple[str, ...]:
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


class Machines(Model):
    """A file of machines."""

    nodes: tuple[Machine, ...] = Field(min_length=1)


def read_machines(path: Path) -> tuple[Node, ...]:
    """Raises BadInputError that lists all errors."""
    return _nodes(yamlfile.read(path))


def parse_machines(text: str) -> tuple[Node, ...]:
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
