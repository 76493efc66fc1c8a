"""Device profiles and link classes: those of the testbed, and the user's own.

A profiles file has `devices:` and `links:`, each by name. Read are the testbed's, the user's
(`~/.config/testbed/profiles.yaml`) and `profiles.yaml` beside the topology. An entry of a later one
replaces the whole entry of that name of an earlier one.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from testbed.errors import BadInputError
from testbed.topology import validation_errors, yamlfile
from testbed.topology.fields import (
    Count,
    Model,
    Name,
    Positive,
    Power,
    Rate,
    RelativeError,
    Seconds,
    Share,
    Size,
    Thermal,
)
from testbed.topology.yamlfile import Document

FILE = "profiles.yaml"
_BUILT_IN = Path(__file__).parents[1] / "catalog"
_WIDTH = 80
EMULATED = """\
Of a device, its speeds in training become a CPU share, by the speeds of this
host and by what a step of the task consists of. They are fitted to published
training times, or measured (--add); "within" is the mean error of the times
that they predict for other networks.
Where there are none (–), gflops become the share, which are of HPL alone:
training may be several times as slow or as fast. memory becomes the limit of
the device's container, as far as the host has it (testbed plan says so). Where
the topology says cpu or memory itself, that counts. The limit is for the
client and its init; of a real device's memory the system takes a part. Outside
containers memory is not limited. power is for estimates of energy. cores are
not emulated one by one: one CPU quota stands for all of them, so beside work
that they share, what only one could do is faster here than on the device. Nor
is anything else emulated, such as GPU, caches, memory bandwidth; heat is, where
thermal says how a device slows down."""
"""What becomes of a device profile, in 80 columns."""
_ABOUT = ("description", "source")


class _Entry(Model):
    description: str = ""
    source: str = Field(default="", description="Where the figures are from")

    @model_validator(mode="after")
    def _has_figures(self) -> Self:
        figures = [name for name in type(self).model_fields if name not in _ABOUT]
        if not self.figures():
            raise ValueError(f"found none of {', '.join(figures)}, expected at least one of them")
        return self

    def figures(self) -> dict[str, Any]:
        """The known figures, as in a topology: `{"down": "12mbit", "rtt": "70ms"}`."""
        return self.model_dump(mode="json", exclude=set(_ABOUT), exclude_none=True)


class TrainingSpeeds(Model):
    """Speeds of the kinds of work that training consists of, on all cores of a device."""

    convolution: Positive = Field(description="Gflop/s (FP32) of convolutions")
    depthwise: Positive = Field(description="Gflop/s (FP32) of convolutions in groups")
    memory: Positive = Field(description="GB/s that all other operations read and write")
    matrix: Positive | None = Field(
        default=None, description="Gflop/s (FP32) of products of matrices; where not given, by gflops"
    )
    error: RelativeError | None = Field(
        default=None,
        description="Mean relative error of predicted times, for networks that the speeds are not from",
    )


class DeviceProfile(_Entry):
    """A type of device. What is not known is None."""

    gflops: Positive | None = Field(
        default=None, description="FP64 Gflop/s of the whole device in High-Performance Linpack (HPL)"
    )
    cores: Count | None = None
    memory: Size | None = None
    power: Power | None = Field(default=None, description="Watts of the whole device, by state")
    thermal: Thermal | None = Field(
        default=None, description="Loss of CPU share by heat; used where the topology gives none"
    )
    training: TrainingSpeeds | None = Field(
        default=None, description="Speeds in training, fitted or measured, used before gflops"
    )

    @model_validator(mode="after")
    def _has_speed_of_products(self) -> Self:
        if self.training is not None and self.training.matrix is None and self.gflops is None:
            raise ValueError("training has no matrix, and gflops are not given: add one of them")
        return self


class LinkClass(_Entry):
    """An access link. What is not known is None: a rate is then unlimited, the others are not added."""

    down: Rate | None = None
    up: Rate | None = None
    rtt: Seconds | None = Field(default=None, description="Round-trip time that it adds")
    jitter: Seconds | None = None
    loss: Share | None = Field(default=None, description="Share of the packets that are lost")


def _entries(value: Any) -> Any:
    """Nothing, where there is nothing but comments below the key."""
    if not isinstance(value, dict | None):
        raise PydanticCustomError("complete", "expected entries by name, such as my-own: {...}")
    return value or {}


E = TypeVar("E", bound=_Entry)
_Entries = Annotated[dict[Name, E], BeforeValidator(_entries)]


class Profiles(Model):
    """A profiles file, or several made one."""

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
        """Raises BadInputError that names one that may be meant."""
        return _named(name, self.devices, "device profile")

    def link(self, name: str) -> LinkClass:
        """Raises BadInputError that names one that may be meant."""
        return _named(name, self.links, "link class")

    def only(self, name: str) -> Profiles:
        """The device profile, or the link class, of that name, or both.

        Raises BadInputError that names one that may be meant.
        """
        _named(name, {**self.devices, **self.links}, "device profile or link class")
        return Profiles(
            devices={key: entry for key, entry in self.devices.items() if key == name},
            links={key: entry for key, entry in self.links.items() if key == name},
        )


def load(folder: Path | None = None) -> Profiles:
    """All profiles, for a topology in `folder`.

    Raises BadInputError that lists all that is wrong with one of the files, and where.
    """
    paths = [_BUILT_IN / "devices.yaml", _BUILT_IN / "links.yaml", user_file()]
    if folder is not None:
        paths.append(folder / FILE)
    found = [read(path) for path in paths if path.exists()]
    return Profiles(
        devices={name: entry for each in found for name, entry in each.devices.items()},
        links={name: entry for each in found for name, entry in each.links.items()},
    )


def user_file() -> Path:
    """The user's own profiles, in `$XDG_CONFIG_HOME/testbed`, by default under ~/.config."""
    root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(root) / "testbed" / FILE


def read(path: Path) -> Profiles:
    """The profiles of one file. Raises BadInputError that lists all that is wrong, and where."""
    return Profiles() if _is_blank(path) else _profiles(yamlfile.read(path))


def parse(text: str, name: str = "<text>") -> Profiles:
    """`read` of a text instead of a file; `name` is for errors."""
    return _profiles(yamlfile.parse(text, name))


def guess(name: str, known: Iterable[str]) -> str:
    """The one that `name`, which is unknown, may be meant for; else all `known`."""
    known = list(known)
    longer = next((each for each in known if name in each), None)
    found = validation_errors.did_you_mean(name, known) or (longer and f"did you mean {longer}?")
    return found or f"there are {', '.join(known)}."


def rows(profiles: Profiles) -> list[dict[str, Any]]:
    """A row for each entry, with quantities as in a topology."""
    return [
        {"name": name, "kind": kind, **entry.model_dump(mode="json")}
        for kind, entries in (("device", profiles.devices), ("link", profiles.links))
        for name, entry in entries.items()
    ]


def listing(profiles: Profiles) -> str:
    """A table of the devices and one of the links, without descriptions; 80 columns suffice."""
    tables = _table("device", profiles.devices), _table("link", profiles.links)
    return "\n\n".join(filter(None, tables))


def explained(profiles: Profiles) -> str:
    """A block for each entry: its figures, what it is and where they are from."""
    entries = (*profiles.devices.items(), *profiles.links.items())
    return "\n\n".join("\n".join(_block(*entry)) for entry in entries)


def _named(name: str, entries: Mapping[str, E], what: str) -> E:
    if name in entries:
        return entries[name]
    raise BadInputError(f"no {what} is called {name!r}: {guess(name, entries)}")


def _is_blank(path: Path) -> bool:
    """Whether a file is empty, or has comments only, as when its entries are commented out."""
    lines = path.read_bytes().splitlines() if path.is_file() else [b"not a file: the reader says so"]
    return all(not line.strip() or line.lstrip().startswith(b"#") for line in lines)


def _profiles(document: Document) -> Profiles:
    profiles = validation_errors.validated(Profiles, document)
    if document.problems:
        raise document.source.error(document.problems)
    return profiles


def _table(kind: str, entries: Mapping[str, _Entry]) -> str:
    """A line for each entry, with a column for each figure that one of them has."""
    known = {name: entry.figures() for name, entry in entries.items()}
    for figures in known.values():
        if "training" in figures:
            error = figures["training"].get("error")
            figures["training"] = "known" if error is None else f"within {error:.0%}"
    order = {column: None for entry in entries.values() for column in type(entry).model_fields}
    columns = [column for column in order if any(column in figures for figures in known.values())]
    cells = [[kind, *columns]] if entries else []
    cells += [[name, *(_shown(row.get(column)) for column in columns)] for name, row in known.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _block(name: str, entry: _Entry) -> Iterator[str]:
    yield name
    facts = {**entry.figures(), "source": entry.source}
    for text in (f"{key}: {_shown(value)}" for key, value in facts.items() if value):
        yield textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    if entry.description:
        yield ""
        yield textwrap.fill(entry.description, _WIDTH)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
