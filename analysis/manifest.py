"""The manifest of a run, read and checked: whoever has one may rely on the types below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents import events
from agents.disk import files

_MAX_BYTES = 64 * 2**20

Verdict = Literal["valid", "not valid", "not judged", "simulated"]
"""Of a run: `not judged` where something that was requested could not be checked, `simulated` in virtual
time, where no host is involved."""

_Number = Annotated[float, Field(ge=-1e18, le=1e18)]
_Positive = Annotated[float, Field(gt=0, le=1e18)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Unix = Annotated[float, Field(ge=0, le=2.5e11)]
"""Seconds that the calendar knows."""


class _Entries(BaseModel):
    """Every entry may be missing, as in a run that has just begun, and there may be others."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Device(_Entries):
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


class _Controller(_Entries):
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: _Unix


class _Validity(_Entries):
    valid: bool | None = None
    reasons: list[str] = []
    unjudged: list[str] = []


class _Host(_Entries):
    name: str = ""


class _Manifest(_Entries):
    format: int = events.FORMAT
    run: str = ""
    created: _Unix | None = None
    controller: _Controller | None = None
    outcome: str | None = None
    error: str | None = None
    runtime: str | None = None
    rule: str | None = None
    task: str | None = None
    seed: int = 0
    dilation: _Positive = 1.0
    host: _Host = _Host()
    cpus: dict[str, Any] | None = None
    devices: dict[str, _Device] = {}
    shaper: str | None = None
    monotonic_zero: _Number = 0.0
    label: str | None = None
    repeats: _Count | None = None
    timings: dict[str, _Number] = {}
    validity: _Validity | None = None


def read(path: Path) -> dict[str, Any]:
    """The entries of the file `path`.

    Raises OSError (FileNotFoundError where there is none); ValueError, which names the file and the
    entry, for what is no manifest, or one of a newer version.
    """
    try:
        manifest = files.from_json(files.read(path, _MAX_BYTES))
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: no manifest: {where or 'all of it'}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: no manifest: {error}") from error
    check_format(path, manifest.get("format", 0))
    return dict(manifest)


def check_format(path: Path, version: int) -> None:
    """Raises ValueError, which names `path`, for the format of a newer version."""
    if version > events.FORMAT:
        raise ValueError(f"{path}: format {version} is newer than this program's, {events.FORMAT}")


def verdict(manifest: Mapping[str, Any]) -> Verdict:
    """Whether the run can be believed."""
    if (validity := manifest.get("validity")) is None:
        return "simulated" if manifest.get("cpus") is None else "not judged"
    match validity.get("valid"):
        case None:
            return "not judged"
        case valid:
            return "valid" if valid else "not valid"
