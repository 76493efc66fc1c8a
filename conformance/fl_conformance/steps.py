"""Leads an adapter through a scenario, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fl_conformance.adapter import Adapter, ClientUpdate, Setting, Vector
from fl_conformance.scenario import (
    ClientJoined,
    ClientLeft,
    ModelSent,
    NewVersion,
    Scenario,
    UpdateReceived,
)


@dataclass(frozen=True)
class Tolerance:
    """Values that are no farther apart count as equal."""

    relative: float
    absolute: float

    def equal(self, found: Vector, expected: Vector) -> bool:
        return bool(np.all(np.abs(found - expected) <= self.absolute + self.relative * np.abs(expected)))


@dataclass(frozen=True)
class Check:
    """A comparison of the adapter's model with the recorded one."""

    event: int
    """Index of the event in the scenario after which the model is compared."""
    at: float
    client: str | None
    """Client that is sent the model; None if the model is read."""
    version: int
    """Version that the model must be."""
    expected: Vector
    """Recorded model, shape (d,)."""


def checks(scenario: Scenario) -> list[Check]:
    return [step for step in _walk(scenario) if isinstance(step, Check)]


def observe(adapter: Adapter, scenario: Scenario) -> Iterator[Vector | str]:
    """Yield the name of each call before it is made, and after a call of `model` a copy of the model."""
    yield "start"
    adapter.start(_copied(scenario.setting))
    for step in _walk(scenario):
        match step:
            case UpdateReceived(at, update):
                yield f"receive of the update of {update.client} at {at:g} s"
                adapter.receive(_copied_update(update))
            case ClientJoined(at, client):
                yield f"join of {client} at {at:g} s"
                adapter.join(client, at)
            case ClientLeft(at, client, memory):
                yield f"leave of {client} at {at:g} s"
                adapter.leave(client, at, None if memory is None else memory.copy())
            case Check():
                yield f"model at {step.at:g} s"
                found = adapter.model(step.at, step.client)
                yield checked(found, len(scenario.setting.model))


def checked(found: ArrayLike, length: int) -> Vector:
    """Copy in float64. Raises ValueError if `found` is not a finite vector with `length` elements."""
    try:
        if np.asarray(found).dtype.kind not in "fiuO":  # NumPy would drop imaginary parts and read texts
            raise TypeError
        vector = np.array(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model returned {type(found).__name__}, expected a vector of numbers"
        ) from error
    if vector.shape != (length,):
        raise ValueError(f"model returned the shape {vector.shape}, expected ({length},)")
    if not np.isfinite(vector).all():
        raise ValueError(f"model returned {vector.tolist()}, expected finite numbers")
    return vector


def _walk(scenario: Scenario) -> Iterator[UpdateReceived | ClientJoined | ClientLeft | Check]:
    """Yield the events in which an adapter is called, and the checks between them."""
    models = [scenario.setting.model]
    for index, event in enumerate(scenario.events):
        following = scenario.events[index + 1 : index + 2]
        match event:
            case ModelSent(at, client, version):
                yield Check(index, at, client, version, models[version])
            case NewVersion(at, version, model):
                models.append(model)
                yield Check(index, at, None, version, model)
            case _:
                yield event
        is_last = not following or following[0].at > event.at
        if is_last and not isinstance(event, NewVersion):
            yield Check(index, event.at, None, len(models) - 1, models[-1])


def _copied(setting: Setting) -> Setting:
    return Setting(
        setting.rule,
        dict(setting.parameters),
        dict(setting.clients),
        list(setting.present),
        setting.model.copy(),
        [list(drawn) for drawn in setting.draws],
        list(setting.intervals),
    )


def _copied_update(update: ClientUpdate) -> ClientUpdate:
    """An adapter may change the vectors."""
    vectors = {
        name: value.copy() for name, value in vars(update).items() if isinstance(value, np.ndarray)
    }
    return ClientUpdate(**{**vars(update), **vectors})
