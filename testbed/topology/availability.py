"""Availability: when the devices of a group are connected to the network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from agents import random_generators
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology.fields import Duration, Model, PositiveSeconds, Seconds, optional

State = Literal["on", "off"]


def _pair(value: Any) -> Any:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError("expected a time and a state, on or off, such as [10s, off]")
    return value


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected the duration of one pass of the trace such as 30s")
    return value


Moment = Annotated[tuple[Seconds, State], BeforeValidator(_pair)]


class Availability(Model):
    """When a device is connected: on and off alternate, by distributions or by a trace. While the device
    is off, it keeps running, but no packet passes."""

    on: Duration | None = optional("Duration of a connected period, drawn each time")
    off: Duration | None = optional("Duration of a disconnected period, drawn each time")
    start: State | None = optional(
        "State at the start of the run. Default: drawn, on with probability mean on / (mean on + mean "
        "off)"
    )
    trace: tuple[Moment, ...] | None = optional(
        "List of [time, state]; a state holds until the next time. The first time is 0s"
    )
    loop: Annotated[PositiveSeconds, BeforeValidator(_not_a_flag)] | None = optional(
        "Duration of one pass of the trace, after which it repeats. Default: the last state holds until "
        "the end"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        drawn = [name for name in ("on", "off", "start") if getattr(self, name) is not None]
        if self.trace is not None:
            if drawn:
                raise ValueError(f"{drawn[0]} cannot be combined with trace: remove one of the two")
            _check_trace(self.trace, self.loop)
        elif self.loop is not None:
            raise ValueError("loop needs trace: add trace, or remove loop")
        elif self.on is None or self.off is None:
            raise ValueError(
                "found neither trace nor both on and off, expected either of them such as "
                "{on: 2min, off: 30s}"
            )
        else:
            means = {"on": self.on.build().expectation, "off": self.off.build().expectation}
            if not any(means.values()):  # the state would change endlessly at one moment
                raise ValueError("both on and off last 0 s, expected at least one above 0 s")
            for name, mean in means.items():
                if self.start is None and math.isinf(mean):
                    raise ValueError(
                        f"{name} has no finite mean, from which the first state could be drawn: add "
                        "start, such as start: on"
                    )
        return self

    def changes(self, seed: int, device: str) -> Iterator[tuple[Nanoseconds, bool]]:
        """Yield each time at which `device` connects or disconnects, and whether it is then connected.

        Every device counts as connected before time 0, so that a device that starts disconnected yields
        `(0, False)` first. The iterator is endless unless there is a trace without `loop`.

        The first state lasts for a full duration from the distribution. In a stationary process, the
        first state would last only for the remainder of a duration. For exponential durations, the
        remainder has the same distribution as a full duration.
        """
        was_on = True
        for at, is_on in (
            self._random_changes(seed, device) if self.trace is None else self._trace_changes(self.trace)
        ):
            if is_on != was_on:
                yield at, is_on
            was_on = is_on

    def _trace_changes(self, trace: tuple[Moment, ...]) -> Iterator[tuple[Nanoseconds, bool]]:
        for number in (0,) if self.loop is None else itertools.count():
            begin = number * from_seconds(self.loop or 0.0)
            yield from ((begin + from_seconds(at), state == "on") for at, state in trace)

    def _random_changes(self, seed: int, device: str) -> Iterator[tuple[Nanoseconds, bool]]:
        assert self.on is not None  # noqa: S101  (see _one_form)
        assert self.off is not None  # noqa: S101
        on, off = self.on.build(), self.off.build()
        # Two generators, so that changing one distribution does not change the other's draws.
        samplers = {
            True: on.sampler(random_generators.generator(seed, device, "on")),
            False: off.sampler(random_generators.generator(seed, device, "off")),
        }
        is_on = self.start == "on"
        if self.start is None:
            share = on.expectation / (on.expectation + off.expectation)
            is_on = float(random_generators.generator(seed, device, "availability").random()) < share
        at: Nanoseconds = 0
        while True:
            yield at, is_on
            at += from_seconds(samplers[is_on]())
            is_on = not is_on


def _check_trace(trace: tuple[Moment, ...], loop: float | None) -> None:
    times = [at for at, _ in trace]
    if not trace or times[0] != 0:
        found = f"begins at {times[0]:g} s" if trace else "has no entry"
        raise ValueError(f"trace {found}, expected its first time to be 0s such as [0s, on]")
    for before, after in itertools.pairwise(times):
        if after <= before:
            raise ValueError(f"trace has {after:g} s after {before:g} s, expected increasing times")
    if loop is None:
        return
    if loop <= times[-1]:
        raise ValueError(
            f"loop is {loop:g} s, expected more than the last time of the trace, {times[-1]:g} s"
        )
    states = {state for _, state in trace}
    if len(states) == 1:
        raise ValueError(f"loop has nothing to repeat: the trace is always {states.pop()}. Remove loop")
