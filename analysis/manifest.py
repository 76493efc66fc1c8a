"""Reading and checking the manifest of a run. The classes define the types of its entries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents import events
from agents.disk import files
from analysis import alike_devices

_MAX_BYTES = 64 * 2**20

Verdict = Literal["valid", "not valid", "not judged", "simulated"]
"""`not judged` if some requested value could not be checked; `simulated` in virtual time, where no host
is involved."""

_Number = Annotated[float, Field(ge=-1e18, le=1e18)]
_Positive = Annotated[float, Field(gt=0, le=1e18)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Unix = Annotated[float, Field(ge=0, le=2.5e11)]
"""Unix time in seconds, up to the year 9900."""


class _Entries(BaseModel):
    """Every entry may be missing, for example if the run has just started, and there may be others."""

    model_config = ConfigDict(strict=True, extra="allow")


class _DeviceEntry(_Entries):
    count: Annotated[int, Field(ge=1, le=alike_devices.MAX_DEVICES)] = 1
    """Devices that the entry stands for (`analysis.alike_devices`)."""
    group: str | None = None
    profile: str | None = None
    cpu: _Number | None = None
    gflops: _Number | None = None
    speed: _Number | None = None
    memory: _Number | None = None
    power: dict[str, _Number] | None = None
    link: dict[str, _Number | None] | None = None
    samples: _Count | None = None
    importance: _Number | None = None
    labels: list[_Count] = []


class _ControllerEntry(_Entries):
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: _Unix


class _ValidityEntry(_Entries):
    valid: bool | None = None
    reasons: list[str] = []
    unjudged: list[str] = []


class _HostEntry(_Entries):
    name: str = ""


class _Manifest(_Entries):
    format: int = events.FORMAT
    run: str = ""
    created: _Unix | None = None
    controller: _ControllerEntry | None = None
    outcome: str | None = None
    error: str | None = None
    runtime: str | None = None
    rule: str | None = None
    task: str | None = None
    seed: int = 0
    dilation: _Positive = 1.0
    host: _HostEntry = _HostEntry()
    cpus: dict[str, Any] | None = None
    devices: dict[str, _DeviceEntry] = {}
    shaper: str | None = None
    monotonic_zero: _Number = 0.0
    label: str | None = None
    repeats: _Count | None = None
    timings: dict[str, _Number] = {}
    validity: _ValidityEntry | None = None


def read(path: Path) -> dict[str, Any]:
    """`devices` has an entry for each device. Raises the same errors as `read_compact`."""
    manifest = read_compact(path)
    if "devices" in manifest:
        try:
            manifest["devices"] = alike_devices.expand(manifest["devices"])
        except ValueError as error:
            raise ValueError(f"{path}: not a manifest: {error}") from None
    return manifest


def read_compact(path: Path) -> dict[str, Any]:
    """In `devices`, as in the file, devices that are alike share an entry.

    Raises OSError if the file cannot be read (FileNotFoundError if it does not exist). Raises ValueError
    that names file and entry if the file is not a manifest or has a newer format.
    """
    try:
        manifest = files.from_json(files.read(path, _MAX_BYTES))
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: not a manifest: {where or 'the file'}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a manifest: {error}") from error
    check_format(path, manifest.get("format", 0))
    return dict(manifest)


def check_format(path: Path, version: int) -> None:
    """Raise ValueError that names `path` if the format is newer than this program's."""
    if version > events.FORMAT:
        raise ValueError(f"{path}: format {version} is newer than this program's, {events.FORMAT}")


def verdict(manifest: Mapping[str, Any]) -> Verdict:
    if (validity := manifest.get("validity")) is None:
        return "simulated" if manifest.get("cpus") is None else "not judged"
    match validity.get("valid"):
        case None:
            return "not judged"
        case valid:
            return "valid" if valid else "not valid"
