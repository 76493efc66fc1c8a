"""Recorded scenarios: what happens when, and the exact model of each version. One file per rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_conformance.adapter import Client, ClientUpdate, Kind, Setting, Vector

FORMAT = 1
"""Format of the files. A change that an older version of the kit would misread raises it."""
FOLDER = Path(__file__).parent / "scenarios"
KINDS: tuple[Kind, ...] = ("delta", "model", "gradient", "residual")


class ConformanceError(Exception):
    """The input or a file of scenarios is wrong: the message names the place and the fix."""


@dataclass(frozen=True)
class ModelSent:
    at: float
    client: str
    version: int


@dataclass(frozen=True)
class UpdateReceived:
    at: float
    update: ClientUpdate


@dataclass(frozen=True)
class ClientJoined:
    at: float
    client: str


@dataclass(frozen=True)
class ClientLeft:
    at: float
    client: str
    memory: Vector | None
    """Shape (d,)."""


@dataclass(frozen=True)
class NewVersion:
    at: float
    version: int
    model: Vector
    """Shape (d,)."""
    equation: str
    """Step from the previous version, with the weights of this scenario."""


ScenarioEvent = ModelSent | UpdateReceived | ClientJoined | ClientLeft | NewVersion


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    setting: Setting
    events: Sequence[ScenarioEvent]


@dataclass(frozen=True)
class RuleFile:
    rule: str
    paper: str
    equation: str
    relative: float
    """Relative difference of a value that counts as equal."""
    absolute: float
    """Absolute difference of a value that counts as equal."""
    scenarios: Sequence[Scenario]


def rule_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(rule: str) -> RuleFile:
    """Raises ConformanceError if the rule is unknown."""
    if rule not in rule_names():
        raise ConformanceError(f"--rule {rule}: unknown rule, expected all, {', '.join(rule_names())}")
    return read(FOLDER / f"{rule}.yaml")


def read(path: Path) -> RuleFile:
    """Raises ConformanceError, which names the place, if the file cannot be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']}, this version reads format {FORMAT}")
        tolerance = content["tolerance"]
        return RuleFile(
            content["rule"],
            content["paper"],
            content["equation"],
            float(tolerance["relative"]),
            float(tolerance["absolute"]),
            [_scenario(content["rule"], one) for one in content["scenarios"]],
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConformanceError(
            f"{path} cannot be read as scenarios: {problem}. Install edge-fl-conformance again"
        ) from error


def _vector(values: Any) -> Vector:
    return np.array(values, dtype=np.float64)


def _scenario(rule: str, content: Mapping[str, Any]) -> Scenario:
    clients = {name: Client(**one) for name, one in content["clients"].items()}
    setting = Setting(
        rule,
        content["parameters"],
        clients,
        content["present"],
        _vector(content["model"]),
        content.get("draws", []),
        content.get("intervals", []),
    )
    reader = _EventReader(setting)
    events = [reader.read(event) for event in content["events"]]
    return Scenario(content["name"], content["about"], setting, events)


class _EventReader:
    def __init__(self, setting: Setting) -> None:
        self._clients = setting.clients
        self._models = [setting.model]
        self._sends: list[ModelSent] = []

    def read(self, event: Mapping[str, Any]) -> ScenarioEvent:
        at = float(event["at"])
        if "send" in event:
            self._sends.append(ModelSent(at, event["send"], event["version"]))
            return self._sends[-1]
        if "receive" in event:
            return UpdateReceived(at, self._update(at, event))
        if "join" in event:
            return ClientJoined(at, event["join"])
        if "leave" in event:
            memory = event.get("memory")
            return ClientLeft(at, event["leave"], None if memory is None else _vector(memory))
        made = NewVersion(at, event["version"], _vector(event["model"]), event["equation"])
        if made.version != len(self._models):
            raise ValueError(f"version {made.version} at {at:g} s, expected version {len(self._models)}")
        self._models.append(made.model)
        return made

    def _update(self, at: float, event: Mapping[str, Any]) -> ClientUpdate:
        client, dispatch = event["receive"], event["dispatch"]
        sent = self._sends[dispatch - 1]
        if sent.client != client:
            raise ValueError(
                f"{client} answers dispatch {dispatch} at {at:g} s, which went to {sent.client}"
            )
        kind = next(kind for kind in KINDS if kind in event)
        base, vector = self._models[sent.version], _vector(event[kind])
        effective_steps = float(event.get("effective_steps", 1))
        trained: Vector | None = None
        if "trained" in event:
            trained = _vector(event["trained"])
        elif kind == "delta":
            trained = base + effective_steps * vector
        elif kind == "model":
            trained = vector
        return ClientUpdate(
            client=client,
            at=at,
            dispatch=dispatch,
            base_version=sent.version,
            base=base,
            kind=kind,
            vector=vector,
            trained=trained,
            samples=self._clients[client].samples,
            steps=event.get("steps", 1),
            effective_steps=effective_steps,
            sent=sent.at,
            uploaded=float(event.get("uploaded", at)),
        )
