"""Availability: when the devices of a group have a network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology import seeds
from testbed.topology.fields import Duration, Model, PositiveSeconds, Seconds

State = Literal["on", "off"]


def _pair(value: Any) -> Any:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError("expected a time and what holds from then on such as [10s, off]")
    return value


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected how long one pass of the trace takes such as 30s")
    return value


Moment = Annotated[tuple[Seconds, State], BeforeValidator(_pair)]


class Availability(Model):
    """On and off in turns, by distributions or by a trace. While off, it runs and no packet passes."""

    on: Duration | None = Field(default=None, description="How long it is on, drawn anew each time")
    off: Duration | None = Field(default=None, description="How long it is off, drawn anew each time")
    start: State | None = Field(
        default=None,
        description="Where not given it is drawn: on with probability mean on / (mean on + mean off)",
    )
    trace: tuple[Moment, ...] | None = Field(
        default=None, description="Times and what holds from then on, the first at 0s"
    )
    loop: Annotated[PositiveSeconds, BeforeValidator(_not_a_flag)] | None = Field(
        default=None, description="How long one pass of the trace takes; it then begins again"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        drawn = [name for name in ("on", "off", "start") if getattr(self, name) is not None]
        if self.trace is not None:
            if drawn:
                raise ValueError(f"{drawn[0]} does not go with trace: remove one of the two")
            _check_trace(self.trace, self.loop)
        elif self.loop is not None:
            raise ValueError("loop goes with trace: remove it, or give a trace")
        elif self.on is None or self.off is None:
            raise ValueError(
                "found neither trace nor both on and off, expected one of these such as "
                "{on: 2min, off: 30s}"
            )
        else:
            means = {"on": self.on.build().expectation, "off": self.off.build().expectation}
            if not any(means.values()):  # it would change without end at one moment
                raise ValueError("both on and off last 0 s, expected one of them above zero")
            for name, mean in means.items():
                if self.start is None and math.isinf(mean):
                    raise ValueError(
                        f"{name} has no finite mean, so no share of time that is on: add start, such "
                        "as start: on"
                    )
        return self

    def changes(self, seed: int, device: str) -> Iterator[tuple[Nanoseconds, bool]]:
        """When `device` gets and loses its network, and whether it then has it.

        It has it at first: one that starts without loses it at 0. Endless, unless it is a trace without
        loop. In a stationary process the first duration would be a remaining one; here it is a whole
        one, which makes no difference for exponential ones.
        """
        was_on = True
        for at, is_on in self._drawn(seed, device) if self.trace is None else self._traced(self.trace):
            if is_on != was_on:
                yield at, is_on
            was_on = is_on

    def _traced(self, trace: tuple[Moment, ...]) -> Iterator[tuple[Nanoseconds, bool]]:
        for number in (0,) if self.loop is None else itertools.count():
            begin = number * from_seconds(self.loop or 0.0)
            yield from ((begin + from_seconds(at), state == "on") for at, state in trace)

    def _drawn(self, seed: int, device: str) -> Iterator[tuple[Nanoseconds, bool]]:
        assert self.on is not None  # noqa: S101  (see _one_form)
        assert self.off is not None  # noqa: S101
        on, off = self.on.build(), self.off.build()
        # One generator each, so that to change one distribution leaves the other's draws alone.
        samplers = {
            True: on.sampler(seeds.generator(seed, device, "on")),
            False: off.sampler(seeds.generator(seed, device, "off")),
        }
        is_on = self.start == "on"
        if self.start is None:
            share = on.expectation / (on.expectation + off.expectation)
            is_on = float(seeds.generator(seed, device, "availability").random()) < share
        at: Nanoseconds = 0
        while True:
            yield at, is_on
            at += from_seconds(samplers[is_on]())
            is_on = not is_on


def _check_trace(trace: tuple[Moment, ...], loop: float | None) -> None:
    times = [at for at, _ in trace]
    if not trace or times[0] != 0:
        found = f"begins at {times[0]:g} s" if trace else "has no moment"
        raise ValueError(f"trace {found}, expected its first one at 0s such as [0s, on]")
    for before, after in itertools.pairwise(times):
        if after <= before:
            raise ValueError(f"trace has {after:g} s after {before:g} s, expected rising times")
    if loop is None:
        return
    if loop <= times[-1]:
        raise ValueError(f"loop is {loop:g} s, expected above the trace's last time, {times[-1]:g} s")
    states = {state for _, state in trace}
    if len(states) == 1:
        raise ValueError(f"loop has nothing to repeat, the trace is always {states.pop()}: remove it")
