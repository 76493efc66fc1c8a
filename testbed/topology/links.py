"""Links of devices and server: rates, delays and traces, durations of transfers, and when devices are
connected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agents import config, random_generators
from agents.pipeline.compression import METHODS
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology.fields import (
    Count,
    Duration,
    FilePath,
    Model,
    Name,
    OneOf,
    PositiveSeconds,
    Rate,
    Seconds,
    Share,
    Variant,
    optional,
)


class ServerLink(Model):
    """Access link of the server. Needs up, down, or both."""

    up: Rate | None = optional("Rate at which the server sends. Default: unlimited")
    down: Rate | None = optional("Rate at which the server receives. Default: unlimited")

    @model_validator(mode="after")
    def _has_value(self) -> Self:
        if all(value is None for _, value in self):
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(f"found none of {names}, expected a rate such as up: 5mbit")
        return self

    def plain(self) -> config.AccessLink:
        return config.AccessLink(self.up, self.down)


class LinkTrace(Model):
    """Changes of a link over time, from files. Needs either csv, or up and down. Paths are relative to
    the topology file."""

    up: FilePath | None = optional("mahimahi trace file with the rate of the uplink. It repeats")
    down: FilePath | None = optional("mahimahi trace file with the rate of the downlink. It repeats")
    csv: FilePath | None = optional(
        "CSV file with a column time (s) and any of up, down (bit/s), rtt (s) and loss (0 to 1)"
    )
    loop: bool = optional("Whether csv repeats. false: the values of its last row stay", default=True)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.csv is None) == (self.up is None and self.down is None):
            raise ValueError("expected either csv, or up and down, such as {csv: train.csv}")
        return self


class CompressionSettings(Variant):
    """Compression of a device's updates."""

    tag: ClassVar[str] = "kind"
    kind: str


class LinkKeys(Model):
    """Access link of a device, or a class of such links."""

    down: Rate | None = optional("Rate from the server to the device. Default: unlimited")
    up: Rate | None = optional("Rate from the device to the server. Default: unlimited")
    rtt: Seconds | None = optional(
        "Round-trip time that the link adds, half in each direction. Default: none"
    )
    jitter: Seconds | None = optional(
        "Maximum deviation of the delay in each direction. Deviations are uniform. Default: none"
    )
    loss: Share | None = optional("Share of packets lost, in each direction. Default: none")


class LinkSettings(LinkKeys, ServerLink):
    """Access link of each device of the group."""

    kind: Annotated[
        Name | None,
        Field(
            alias="class",
            description="Link class (see testbed profiles). Other keys of link override its values",
        ),
    ] = None
    trace: LinkTrace | None = None
    compression: Annotated[CompressionSettings, OneOf(METHODS)] | None = optional(
        "Compression of the updates that the device sends. Default: none, float32 values"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.jitter or 0.0) > (self.rtt or 0.0) / 2 and self.kind is None:
            raise ValueError("jitter exceeds the delay of one direction, rtt/2: lower it, or raise rtt")
        return self

    @property
    def shaping_keys(self) -> list[str]:
        keys = (name for name in type(self).model_fields if name != "compression")
        return [name for name in keys if getattr(self, name) is not None]

    def plain(self) -> config.AccessLink:
        return config.AccessLink(
            self.up, self.down, self.rtt or 0.0, self.jitter or 0.0, self.loss or 0.0
        )


class TransferSettings(Model):
    """Durations of transfers, in place of a link. In virtual time only. Needs download, upload, or
    both."""

    download: Duration | None = optional(
        "Time from the server's sending of a model to its arrival. Default: 0s"
    )
    upload: Duration | None = optional("Time from the sending of an update to its arrival. Default: 0s")
    model_bytes: Count | None = optional(
        "Size of the model that `download` refers to, in bytes. The duration changes in proportion if a "
        "model has another size. Default: the size has no influence"
    )
    update_bytes: Count | None = optional(
        "Size of the update that `upload` refers to, in bytes. The duration changes in proportion if an "
        "update has another size. Default: the size has no influence"
    )

    @model_validator(mode="after")
    def _has_duration(self) -> Self:
        if self.download is None and self.upload is None:
            raise ValueError("found neither download nor upload, expected one such as upload: 200ms")
        return self


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
