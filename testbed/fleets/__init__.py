"""Fleets: groups with `draw`, `from_run` or `from_log` are generators of devices. Each of their devices
becomes a plain group, so that a topology knows nothing of them.

Each device has generators of its own, whose keys are its name and the key that is drawn, so that its
draws do not depend on other devices, on the runtime, or on the host.

A run's directory keeps the drawn or recorded keys of each device (`FLEET`). If the folder of a topology
has this file, a run can be repeated without the survey or the recorded run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agents import random_generators
from agents.disk import files
from testbed.errors import BadInputError
from testbed.fleets import fedscale, recorded, surveys
from testbed.fleets.settings import (
    DrawSettings,
    FedScaleSettings,
    GroupSettings,
    WrittenTopology,
)
from testbed.topology import profiles, validation_errors
from testbed.topology.devices import DeviceGroup
from testbed.topology.schema import FLEET, Keys, MadeFleet, Topology
from testbed.topology.yamlfile import Document, DrawnPlace, Problem, Source

_MAX_BYTES = 2 * 2**30
_MAX_SHOWN = 5
"""Devices of a group whose faulty draws are reported."""
_SPEEDS = ("cpu", "profile", "timing", "gflops")
"""A device needs at least one of them."""
_FEDSCALE_FILES = ("client_device_capacity", "client_behave_trace")
_FEDSCALE_FOLDER = "github.com/SymbioticLab/FedScale, benchmark/dataset/data/device_info"
_UNWRITTEN = ("name", "count", "draw", "from_run", "from_log", "columns")
"""Keys of a group that its devices do not have."""


def read(
    document: Document, problems: Iterable[Problem], context: Mapping[str, Any]
) -> tuple[Topology, Document]:
    """Return the topology with plain groups alone, and the document with their places. `context`:
    validation context. Raises BadInputError that lists `problems`, too, or that lists errors of a survey
    or of drawn devices."""
    document = _with_list_of_groups(document)
    written = validation_errors.validate(WrittenTopology, document, problems, context)
    kept: Mapping[str, Mapping[str, Keys]] = {}
    if any(group.is_generator for group in written.devices):
        kept = _read_kept(Path(document.source.name).parent / FLEET)
    groups: list[DeviceGroup] = []
    members: list[DrawnPlace] = []
    keys: dict[str, dict[str, Keys]] = {}
    told: list[str] = []
    faulty: list[Problem] = []
    for index, group in enumerate(written.devices):
        generator: _Drawing | _RecordedGroup
        if group.draw is not None:
            generator = _Drawing(written, index, document, context, group.draw)
        elif group.is_recorded:
            generator = _RecordedGroup(written, index, document, context, told.append)
        else:
            groups.append(group)
            members.append(DrawnPlace(index))
            continue
        try:
            found = list(generator.devices(kept.get(group.name, {})))
        except _DrawError as error:
            faulty += error.problems
            continue
        groups += [device for device, _ in found]
        members += [DrawnPlace(index, device.origin) for device, _ in found]
        keys[group.name] = {device.name: own for device, own in found}
    faulty += _name_problems(written.devices, groups, members, document)
    if faulty:
        raise document.source.error(faulty)
    fleet = MadeFleet(
        tuple(
            group.model_dump(mode="json", by_alias=True, exclude_unset=True)
            if group.is_generator
            else None
            for group in written.devices
        ),
        keys,
        (*dict.fromkeys(told), *_other_trainings(written, groups, keys)),
    )
    document = replace(document, source=replace(document.source, members=tuple(members)))
    return written.with_devices(groups, fleet, document.source), document


def json_schema() -> dict[str, Any]:
    return WrittenTopology.model_json_schema()


def _with_list_of_groups(document: Document) -> Document:
    """Accept the short form `devices: {from_run: RUN}`."""
    devices = document.data.get("devices") if isinstance(document.data, dict) else None
    if not isinstance(devices, dict) or not {"from_run", "from_log"} & devices.keys():
        return document
    groups = ({"name": "recorded", **devices},)
    return replace(document, data={**document.data, "devices": groups})


def _read_kept(path: Path) -> Mapping[str, Mapping[str, Keys]]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(files.read(path, _MAX_BYTES))
        return {
            group: {device: surveys.as_written(keys) for device, keys in devices.items()}
            for group, devices in found.items()
        }
    except (ValueError, AttributeError, OSError) as error:
        raise BadInputError(
            f"{path}: cannot be read as the drawn devices of a run ({error}): remove the file to draw "
            "them again"
        ) from error


def _other_trainings(
    topology: Topology, groups: Sequence[DeviceGroup], keys: Mapping[str, Mapping[str, Keys]]
) -> Iterator[str]:
    """Warn if trainings have another number of steps than those that were recorded."""
    counts = {
        name: own[recorded.STEPS]
        for devices in keys.values()
        for name, own in devices.items()
        if recorded.STEPS in own
    }
    for group in groups if counts else ():
        steps = topology.task.local.changed_by(group.local).build().steps
        if steps is not None and counts.get(group.name, steps) != steps:
            yield (
                f"{group.name} was recorded with trainings of {counts[group.name]} steps, and has "
                f"trainings of {steps}: they last as long as the recorded ones"
            )
            return  # once for the fleet


def _name_problems(
    written: Sequence[GroupSettings],
    groups: Sequence[DeviceGroup],
    members: Sequence[DrawnPlace],
    document: Document,
) -> Iterator[Problem]:
    """Problems of recorded devices that have the name of another device or group."""
    if not any(group.is_recorded for group in written):
        return
    names = Counter(name for group in groups for name in group.device_names)
    names.update({group.name for group in written if not group.is_generator and group.count})
    for group, member in zip(groups, members, strict=True):
        if written[member.index].is_recorded and names[group.name] > 1:
            yield document.source.problem(
                ("devices", member.index),
                f"records a device {group.name}, a name that another group has, too: rename that group",
            )


class _DrawError(Exception):
    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__()
        self.problems = problems


_Draw = tuple[str, Keys, str]
"""Name of a device, its keys, and the place that they come from."""


@dataclass(frozen=True)
class _Generator:
    topology: WrittenTopology
    index: int
    """Index of the group."""
    document: Document
    context: Mapping[str, Any]

    @property
    def group(self) -> GroupSettings:
        return self.topology.devices[self.index]

    def problem(self, message: str, *keys: str) -> Problem:
        return self.document.source.problem(("devices", self.index, *keys), message)

    def draws(self, kept: Mapping[str, Keys]) -> Iterator[_Draw]:
        raise NotImplementedError

    def devices(self, kept: Mapping[str, Keys]) -> Iterator[tuple[DeviceGroup, Keys]]:
        """Yield each device as a plain group, and its drawn or recorded keys. `kept`: by device, in the
        directory of an earlier run. Raises _DrawError."""
        made: dict[str, DeviceGroup] = {}
        faulty = 0
        problems: list[Problem] = []
        for name, keys, origin in self.draws(kept):
            own = {key: one for key, one in keys.items() if key not in (recorded.GROUP, recorded.STEPS)}
            text = json.dumps(own)
            if text not in made:
                try:
                    made[text] = self.validated(own)
                except BadInputError as error:
                    faulty += 1
                    problems += [
                        self.problem(f"{name} ({origin}): {one.message}")
                        for one in surveys.problems_of(error)
                    ]
                    if faulty == _MAX_SHOWN:
                        break
                    continue
            group = keys.get(recorded.GROUP, self.group.name)
            yield made[text].drawn_device(name, group, origin), keys
        if problems:
            raise _DrawError(problems)

    def written(self) -> Keys:
        data = self.document.value(("devices", self.index))
        return {key: value for key, value in data.items() if key not in _UNWRITTEN and value is not None}

    def validated(self, keys: Keys, source: Source | None = None) -> DeviceGroup:
        """Keys that the group has in the file win. Raises FaultyFileError."""
        data = {"name": "drawn", **merged(keys, self.written())}
        document = Document(data, source or Source(), ())
        return validation_errors.validate(DeviceGroup, document, context=self.context)


@dataclass(frozen=True)
class _RecordedGroup(_Generator):
    remark: Callable[[str], object]
    """Called with a sentence on how a file was read."""

    def draws(self, kept: Mapping[str, Keys]) -> Iterator[_Draw]:
        found, origin = (kept, FLEET) if kept else self._read()
        return ((name, keys, origin) for name, keys in found.items())

    def _read(self) -> tuple[Mapping[str, Keys], str]:
        key = "from_log" if self.group.from_run is None else "from_run"
        path = Path(self.group.from_run or self.group.from_log or "")
        try:
            if key == "from_run":
                found = recorded.from_run(path)
            else:
                columns = {str(name): column for name, column in (self.group.columns or {}).items()}
                found = recorded.from_log(path, columns, self.remark)
        except (ValueError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"{path}: cannot be read: {error.strerror or error}"
            raise _DrawError([self.problem(reason, key)]) from None
        return {name: surveys.as_written(keys) for name, keys in found.items()}, path.name


@dataclass(frozen=True)
class _Drawing(_Generator):
    settings: DrawSettings

    def problem(self, message: str, *keys: str) -> Problem:
        return super().problem(message, "draw", *keys)

    def draws(self, kept: Mapping[str, Keys]) -> Iterator[_Draw]:
        names = self.group.device_names
        population = None if all(name in kept for name in names) else self._population()
        for name in names:
            yield (name, *((kept[name], FLEET) if name in kept else self._keys(name, population)))

    def _keys(self, device: str, population: _Population | None) -> tuple[Keys, str]:
        """Return the keys, and the place they come from."""
        seed = self.topology.seed if self.settings.seed is None else self.settings.seed

        def generator(key: str) -> np.random.Generator:
            return random_generators.generator(seed, device, f"draw {key}".rstrip())

        keys, origin = ({}, device) if population is None else population(generator)
        if self.settings.each is not None:
            keys = merged(keys, self.settings.each.draw(generator))
        return keys, origin

    def _population(self) -> _Population | None:
        path = self.settings.origin
        if path is None:
            return None
        try:
            if path in profiles.population_names():
                return self._survey(surveys.read_population(path))
            content = self._content(Path(path))
            if content.lstrip()[:1] == b"{" or content[:1] == b"\x80":
                return self._fedscale(path, self.settings.fedscale or FedScaleSettings())
            if self.settings.fedscale is not None:
                message = f"{path} is a survey, not FedScale's client_device_capacity: remove this"
                raise _DrawError([self.problem(message, "fedscale")])
            return self._survey(surveys.parse(content.decode("utf-8-sig"), path))
        except UnicodeDecodeError as error:
            message = f"{path}: byte {error.start} is not UTF-8: save the survey as CSV in UTF-8"
            raise _DrawError([self.problem(message, "from")]) from None

    def _content(self, path: Path) -> bytes:
        try:
            return files.read(path, _MAX_BYTES)
        except FileNotFoundError:
            written = self.document.value(("devices", self.index, "draw", "from"))
            guess = profiles.suggestion(Path(written).name, profiles.population_names())
            if path.name in _FEDSCALE_FILES:
                guess = f"get the file from {_FEDSCALE_FOLDER}"
            message = (
                f"found {written!r}, which is neither a file nor a population ({path} does not exist); "
                f"{guess}"
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            message = f"{path} cannot be read: {reason}"
        raise _DrawError([self.problem(message, "from")])

    def _survey(self, survey: surveys.Survey) -> _Population:
        """Raises FaultyFileError for any of the rows."""
        sample: Keys = {}
        if self.settings.each is not None:
            sample = self.settings.each.draw(lambda key: random_generators.generator(0, "", key))
        given = {key for key in _SPEEDS if key in sample or key in self.written()}
        if not given and not any(set(_SPEEDS) & row.keys.keys() for row in survey.rows):
            message = (
                f"{Path(survey.source.name).name} says nothing about the speed of its devices: add one "
                f"of {', '.join(_SPEEDS)} to the group, or to draw.each"
            )
            raise _DrawError([self.problem(message, "from")])
        known = profiles.load(Path(self.document.source.name).parent)
        problems = list(surveys.check_names(survey, known))
        for row in survey.rows:
            try:
                self.validated(merged(row.keys, sample), survey.row_source(row))
            except BadInputError as error:
                problems += surveys.problems_of(error)
        if problems:
            raise survey.source.error(problems)
        name = Path(survey.source.name).name

        def drawn(generator: Callable[[str], np.random.Generator]) -> tuple[Keys, str]:
            row = survey.draw(generator(""))
            return dict(row.keys), f"{name}:{row.line}"

        return drawn

    def _fedscale(self, path: str, settings: FedScaleSettings) -> _Population:
        steps: int | None = None
        batch = 0
        if settings.cpu is None and not {"cpu", "timing"} & self.written().keys():
            try:
                own = self.topology.task.local.changed_by(self.group.local).build()
            except ValueError:  # reported where it is written
                own = self.topology.task.local.build()
            steps, batch = own.steps, own.batch_size
            if steps is None:
                message = (
                    "the speed of FedScale's clients becomes a timing, which needs local.steps: write "
                    "steps instead of epochs, or give CPU shares with fedscale: {cpu: 0.2}"
                )
                raise _DrawError([self.problem(message)])
        capacity = self._traces(path, "from")
        behaviour = None
        if settings.behaviour is not None:
            behaviour = self._traces(settings.behaviour, "fedscale", "behaviour")
        clients = fedscale.Clients(capacity, behaviour)

        def drawn(generator: Callable[[str], np.random.Generator]) -> tuple[Keys, str]:
            try:
                client = clients.draw(generator("client"), generator("behaviour"))
                share = settings.cpu and settings.cpu * clients.fastest / client.computation
                keys = fedscale.device_keys(
                    client,
                    cpu=share,
                    steps=steps,
                    batch_size=batch,
                    begin=settings.begin,
                    length=settings.length,
                    speed_up=settings.speed_up,
                )
            except ValueError as error:
                raise _DrawError([self.problem(f"{path}: {error}", "from")]) from None
            return surveys.as_written(keys), f"client {client.number}"

        return drawn

    def _traces(self, path: str, *keys: str) -> Mapping[str, Any]:
        try:
            state = Path(path).stat()
            return _read_traces(path, state.st_mtime_ns, state.st_size)
        except FileNotFoundError:
            message = f"the file {path} does not exist: get it from {_FEDSCALE_FOLDER}"
            raise _DrawError([self.problem(message, *keys)]) from None
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise _DrawError([self.problem(f"{path}: {reason}", *keys)]) from None


_Population = Callable[[Callable[[str], np.random.Generator]], tuple[Keys, str]]
"""Return the keys of one device, and the place they come from. The argument returns the device's
generator for a purpose."""


@lru_cache(maxsize=2)  # a command reads the topology several times
def _read_traces(path: str, modified: int, size: int) -> Mapping[str, Any]:
    return fedscale.read(files.read(Path(path), _MAX_BYTES))


def merged(keys: Mapping[str, Any], over: Mapping[str, Any]) -> Keys:
    """Return `keys` with the values of `over`, which win. Mappings are merged key by key. A value of
    None counts as left out, and so does `true` where `keys` has a mapping (`energy: true`)."""
    found: Keys = dict(keys)
    for key, value in over.items():
        if value is None:
            continue
        if key == "link" and isinstance(value, str):
            value = {"class": value}
        before = found.get(key)
        if value is True and isinstance(before, Mapping):  # energy: true
            continue
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        both = both and "distribution" not in value  # else it replaces the parameters of another one
        found[key] = merged(before or {}, value) if both else value
    return found
