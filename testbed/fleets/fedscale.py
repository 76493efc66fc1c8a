"""FedScale's traces of devices (Lai et al., ICML 2022) as device groups of a topology.

There are two files. Each is a pickled dictionary whose keys are the clients. The files are described in
benchmark/dataset/data/device_info/README.md of github.com/SymbioticLab/FedScale. The module also reads
files with the same content in JSON.

- `client_device_capacity`: `{'computation': FP32, 'communication': FP32}`. `computation` is the
  inference time per sample in milliseconds. `communication` is the rate of the link in kbit/s (1 kbit is
  1024 bits). According to fedscale/cloud/internal/client_metadata.py, training a sample takes three
  times as long as inference.
- `client_behave_trace`: `{'duration': INT, 'inactive': [INT], 'finish_time': INT, 'active': [INT],
  'model': STRING}`. At t seconds, modulo finish_time, a client is available if active[i] <= t <=
  inactive[i] for some i.

Loading a pickle may execute any code. This module reads a pickle only as data, and refuses a pickle that
names a class or function.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from agents.texts import make_printable
from testbed.topology import units
from testbed.topology.units import read_number

KBIT = 1024
_TRAINING = 3.0
"""Ratio of the training time per sample to the inference time per sample in FedScale."""
_LONGEST_NAME = 100
_LONGEST = 1e12
"""Seconds."""
_MOST_PASSES = 100_000


@dataclass(frozen=True, slots=True)
class FedScaleClient:
    number: str
    """Key in the capacity file."""
    computation: float
    """Inference time per sample, in milliseconds."""
    communication: float
    """Rate of the link in kbit/s (1 kbit is 1024 bits)."""
    active: tuple[tuple[float, float], ...] = ()
    """Begin and end of the spans in which the client is available, in seconds from the start of the
    trace or of a repetition."""
    pass_s: float = 0.0
    """Seconds after which the trace repeats; 0 if the client is always available."""


class _PlainUnpickler(pickle.Unpickler):
    """Accepts only numbers, texts, lists and dictionaries."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"found {module}.{name}, expected only numbers, texts, lists and dictionaries"
        )


def read(data: bytes) -> dict[str, Any]:
    """Return the entries of one of the files, by client. Raises ValueError with a message on what is
    wrong."""
    try:
        if data.lstrip()[:1] == b"{":
            found = json.loads(data)
        else:
            found = _PlainUnpickler(io.BytesIO(data)).load()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"is neither a pickle of plain data nor JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError("is not a dictionary with an entry per client, as in FedScale's traces")
    return {make_printable(str(key), _LONGEST_NAME): value for key, value in found.items()}


class Clients:
    def __init__(self, capacity: Mapping[str, Any], behaviour: Mapping[str, Any] | None) -> None:
        """`capacity`, `behaviour`: entries of the two files, by client. If `behaviour` is None, all
        clients are always available."""
        self._capacity, self._behaviour = capacity, behaviour
        self._names, self._behaviours = sorted(capacity), sorted(behaviour or ())

    @cached_property
    def fastest(self) -> float:
        """Least inference time per sample, in milliseconds. Raises ValueError that names an unusable
        entry."""
        return min(_above_0(self._capacity[name], name, "computation") for name in self._names)

    def draw(self, rng: np.random.Generator, behaviour_rng: np.random.Generator) -> FedScaleClient:
        """Draw client and behaviour independently: the files describe different clients. Raises
        ValueError that names an unusable entry."""
        name = self._names[rng.integers(len(self._names))]
        behaviour = ""
        if self._behaviours:
            behaviour = self._behaviours[behaviour_rng.integers(len(self._behaviours))]
        return self._client(name, behaviour)

    def draw_distinct(self, count: int, seed: int) -> list[FedScaleClient]:
        """Draw `count` clients without replacement, by `seed`.

        Behaviours are drawn with replacement, because FedScale has far fewer behaviours than clients.
        Raises ValueError that names an unusable entry, or if there are fewer clients."""
        if count > len(self._names):
            raise ValueError(
                f"has {len(self._names):,} clients, fewer than the {count:,} that are needed"
            )
        rng = np.random.default_rng(seed)
        chosen = [
            self._names[index] for index in sorted(rng.choice(len(self._names), count, replace=False))
        ]
        behaviours = [""] * count
        if self._behaviours:
            behaviours = [
                self._behaviours[index] for index in rng.integers(len(self._behaviours), size=count)
            ]
        return [self._client(*pair) for pair in zip(chosen, behaviours, strict=True)]

    def _client(self, name: str, behaviour: str) -> FedScaleClient:
        computation = _above_0(self._capacity[name], name, "computation")
        communication = _above_0(self._capacity[name], name, "communication")
        spans: tuple[tuple[float, float], ...] = ()
        length = 0.0
        if self._behaviour is not None:
            spans, length = _spans(self._behaviour[behaviour], behaviour)
        return FedScaleClient(name, computation, communication, spans, length)


def draw_clients(
    capacity: Mapping[str, Any], behaviour: Mapping[str, Any] | None, count: int, seed: int
) -> list[FedScaleClient]:
    return Clients(capacity, behaviour).draw_distinct(count, seed)


def _above_0(entry: Any, name: str, key: str) -> float:
    value = entry.get(key) if isinstance(entry, Mapping) else None
    return read_number(value, f"{key} of client {name}", above=True)


def _spans(entry: Any, name: str) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return `FedScaleClient.active` and `FedScaleClient.pass_s`. Overlapping spans are merged."""
    length = _above_0(entry, name, "finish_time")
    begins, ends = _times(entry, name, "active"), _times(entry, name, "inactive")
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(zip(begins, ends, strict=False)):
        begin, end = max(0.0, begin), min(end, length)
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged), length


def _times(entry: Any, name: str, key: str) -> list[float]:
    found = entry.get(key)
    if not isinstance(found, list | tuple):
        raise ValueError(f"{key} of client {name} is not a list of times")
    return [
        read_number(one, f"{key} of client {name}", "s", least=-_LONGEST, most=_LONGEST) for one in found
    ]


def device_groups(
    chosen: Sequence[FedScaleClient],
    *,
    cpu: float | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    begin: float = 0.0,
    length: float | None = None,
    speed_up: float = 1.0,
) -> list[dict[str, Any]]:
    """Return one device group of a topology for each client.

    `cpu`: CPU share of the fastest client; None to set no CPU shares. The other clients get shares in
    proportion to their speed.

    `steps`: number of mini-batches of `batch_size` samples in a local training; None to set no `timing`.
    The groups get the `timing` that FedScale computes for this number.

    `begin`, `length`, `speed_up`: part of the trace that becomes the availability. The part starts at
    `begin` seconds and lasts `length` seconds; None for the whole length of the client's trace. The part
    is replayed `speed_up` times as fast. A client that is never available in the part is off during the
    whole run.
    """
    fastest = min(client.computation for client in chosen)
    return [
        {
            "name": f"client-{number}",
            **device_keys(
                client,
                cpu=None if cpu is None else cpu * fastest / client.computation,
                steps=steps,
                batch_size=batch_size,
                begin=begin,
                length=length,
                speed_up=speed_up,
            ),
        }
        for number, client in enumerate(chosen, 1)
    ]


def device_keys(
    client: FedScaleClient,
    *,
    cpu: float | None,
    steps: int | None,
    batch_size: int,
    begin: float,
    length: float | None,
    speed_up: float,
) -> dict[str, Any]:
    """For the other parameters see `device_groups`. `cpu`: cores; None to set none."""
    rate = units.format_rate(1000 * max(1, round(client.communication * KBIT / 1000)))
    keys: dict[str, Any] = {}
    if cpu is not None:
        keys["cpu"] = float(f"{cpu:.4g}")
    if steps is not None:
        seconds = _TRAINING * client.computation * batch_size * steps / 1000
        keys["timing"] = _seconds(seconds)
    keys["link"] = {"up": rate, "down": rate}
    if client.pass_s:
        keys |= _availability(client, begin, length, speed_up)
    return keys


def _availability(
    client: FedScaleClient, begin: float, length: float | None, speed_up: float
) -> dict[str, Any]:
    """Return the client's states in the requested part of the trace; empty if the client is always
    available."""
    whole = length is None
    length = client.pass_s if length is None else length
    moments: list[tuple[float, str]] = []

    def add(at: float, state: str) -> None:
        if moments and moments[-1][0] == at:
            moments.pop()
        if not moments or moments[-1][1] != state:
            moments.append((at, state))

    add(0.0, "off")
    first, last = math.floor(begin / client.pass_s), math.ceil((begin + length) / client.pass_s)
    if last - first > _MOST_PASSES:
        raise ValueError(
            f"the trace of client {client.number} lasts {client.pass_s:g} s: it would be repeated "
            f"{last - first:,} times, expected at most {_MOST_PASSES:,}"
        )
    for repeat in range(first, last):
        for on, off in client.active:
            start = max(0.0, repeat * client.pass_s + on - begin)
            end = min(length, repeat * client.pass_s + off - begin)
            if end > start:
                add(start, "on")
                add(end, "off")
    if moments and moments[-1][0] >= length:
        moments.pop()  # it belongs to the next pass, or is past the requested time
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
