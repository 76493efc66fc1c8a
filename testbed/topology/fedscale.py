"""FedScale's traces of devices (Lai et al., ICML 2022) as device groups of a topology.

Two files, each a pickled dictionary by client, as benchmark/dataset/data/device_info/README.md of
github.com/SymbioticLab/FedScale describes them; JSON of the same is read too:

- `client_device_capacity`: `{'computation': FP32, 'communication': FP32}`, the milliseconds that a
  sample takes in inference and the kbit/s (of 1024 bits) of its link, by
  fedscale/cloud/internal/client_metadata.py, which takes three times as long for training.
- `client_behave_trace`: `{'duration': INT, 'inactive': [INT], 'finish_time': INT, 'active': [INT],
  'model': STRING}`. At t seconds, modulo finish_time, a client is there where active[i] <= t <=
  inactive[i].

A pickle may hold any program. Here it is read as data: one that names a class or function is refused.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from testbed.topology import units

KBIT = 1024
"""Bits."""
_TRAINING = 3.0
"""Of a sample's inference, in FedScale."""


@dataclass(frozen=True, slots=True)
class FedScaleClient:
    """What the traces say of one."""

    number: str
    computation: float
    """Milliseconds of a sample in inference."""
    communication: float
    """kbit/s."""
    active: tuple[tuple[float, float], ...] = ()
    """Seconds from when to when it is there, in each pass."""
    pass_s: float = 0.0
    """How long a pass takes; 0: it is always there."""


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists, dictionaries, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, and may hold numbers, texts and lists alone"
        )


def read(data: bytes) -> dict[str, Any]:
    """The entries of one of the files, by client. Raises ValueError that says what is wrong with it."""
    try:
        if data.lstrip()[:1] == b"{":
            found = json.loads(data)
        else:
            found = _PlainUnpickler(io.BytesIO(data)).load()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # whatever a damaged pickle comes to
        raise ValueError(f"is neither a pickle of plain data nor JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError("holds no dictionary by client, as FedScale's traces do")
    return {str(key): value for key, value in found.items()}


def clients(
    capacity: Mapping[str, Any], behaviour: Mapping[str, Any] | None, count: int, seed: int
) -> list[FedScaleClient]:
    """`count` of them, drawn by `seed` of the capacities; each with one of the behaviours, drawn
    likewise, as FedScale has far fewer of these. Raises ValueError that names what cannot be used."""
    names = sorted(capacity)
    if count > len(names):
        raise ValueError(f"has {len(names):,} clients, and {count:,} are wanted")
    rng = np.random.default_rng(seed)
    chosen = [names[index] for index in sorted(rng.choice(len(names), count, replace=False))]
    behaviours: Sequence[str] = sorted(behaviour or ())
    drawn = (
        [behaviours[index] for index in rng.integers(len(behaviours), size=count)] if behaviours else []
    )
    found = []
    for number, name in enumerate(chosen):
        computation = _above_0(capacity[name], name, "computation")
        communication = _above_0(capacity[name], name, "communication")
        spans: tuple[tuple[float, float], ...] = ()
        length = 0.0
        if behaviour is not None:
            spans, length = _spans(behaviour[drawn[number]], drawn[number])
        found.append(FedScaleClient(name, computation, communication, spans, length))
    return found


def _above_0(entry: Any, name: str, key: str) -> float:
    value = entry.get(key) if isinstance(entry, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"of client {name} {key} is {value!r:.40}, expected a number above 0")
    return float(value)


def _spans(entry: Any, name: str) -> tuple[tuple[tuple[float, float], ...], float]:
    length = _above_0(entry, name, "finish_time")
    begins, ends = entry.get("active"), entry.get("inactive")
    numbers = isinstance(begins, list | tuple) and isinstance(ends, list | tuple)
    if not numbers or not all(isinstance(one, int | float) for one in (*begins, *ends)):
        raise ValueError(f"of client {name} active or inactive is no list of times")
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(zip(begins, ends, strict=False)):
        begin, end = max(0.0, float(begin)), min(float(end), length)
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged), length


def devices(
    chosen: Sequence[FedScaleClient],
    *,
    cpu: float | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    begin: float = 0.0,
    length: float | None = None,
    speed_up: float = 1.0,
) -> list[dict[str, Any]]:
    """Device groups, one for each, as a topology has them.

    With `cpu` they have CPU shares: the fastest this one, the others less by their computation. With
    `steps` they have timing, as FedScale computes it, for so many of `batch_size`. Availability is the
    part of `length` seconds from `begin` on (all of a pass, where not given), in a time that goes
    `speed_up` times as fast; one that is never there in it is off all the time.
    """
    fastest = min(client.computation for client in chosen)
    groups = []
    for number, client in enumerate(chosen, 1):
        rate = units.format_rate(1000 * max(1, round(client.communication * KBIT / 1000)))
        group: dict[str, Any] = {"name": f"client-{number}"}
        if cpu is not None:
            group["cpu"] = float(f"{cpu * fastest / client.computation:.4g}")
        if steps is not None:
            seconds = _TRAINING * client.computation * batch_size * steps / 1000
            group["timing"] = _seconds(seconds)
        group["link"] = {"up": rate, "down": rate}
        if client.pass_s:
            group |= _availability(client, begin, length, speed_up)
        groups.append(group)
    return groups


def _availability(
    client: FedScaleClient, begin: float, length: float | None, speed_up: float
) -> dict[str, Any]:
    """Of one whose times are known: on and off in the part that is asked for."""
    whole = length is None
    length = client.pass_s if length is None else length
    moments: list[tuple[float, str]] = []

    def add(at: float, state: str) -> None:
        if moments and moments[-1][0] == at:
            moments.pop()
        if not moments or moments[-1][1] != state:
            moments.append((at, state))

    add(0.0, "off")
    first = math.floor(begin / client.pass_s)
    for number in range(first, math.ceil((begin + length) / client.pass_s)):
        for on, off in client.active:
            start = max(0.0, number * client.pass_s + on - begin)
            end = min(length, number * client.pass_s + off - begin)
            if end > start:
                add(start, "on")
                add(end, "off")
    if moments and moments[-1][0] >= length:
        moments.pop()  # what comes then is the next pass, or not asked for
    states = {state for _, state in moments}
    if states == {"on"}:
        return {}
    trace = [[_seconds(at / speed_up), state] for at, state in moments]
    found: dict[str, Any] = {"trace": trace}
    if whole and len(states) > 1:
        found["loop"] = _seconds(length / speed_up)
    return {"availability": found}


def _seconds(value: float) -> str:
    return units.format_duration(float(f"{value:.6g}"))
