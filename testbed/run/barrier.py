"""The start barrier: all devices are ready, have the requested limits, and links as requested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Never

from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.texts import quantity
from agents.wire.messages import (
    AddressedOrder,
    LimitsRead,
    LimitsRequest,
    LinkProbe,
    MeasureOrder,
    Message,
    Status,
)
from testbed.fidelity import host_load, requested
from testbed.fidelity.figures import RATES, differences
from testbed.fidelity.validity import FAILED_LINK_PERCENT, link_doubt
from testbed.run.inputs import ApplyLimit, BeginRun, ControllerPhase, LinksRead, MeasureAgain, ReadLinks
from testbed.run.part import ControlledRun, ControllerPart
from testbed.run.supervision import killed_hint
from testbed.segments.measured import segment_doubt

_ASKING_INTERVAL_SECONDS, _LIMITS_TIMEOUT_SECONDS = 0.5, 3.0
"""Seconds between two requests to read the limits of a device's container, and seconds after which wrong
limits are an error."""


class Barrier(ControllerPart):
    def __init__(self, run: ControlledRun) -> None:
        super().__init__(run)
        self._awaited = run.devices.keys() - run.plan.absent
        """Devices that must be ready before the run clock starts."""
        self._deadline = 0.0
        self._most_ready = 0
        self._requested_limits = {
            one.device: one.cpu[0].limits for one in requested.devices(run.spec, ())
        }
        """Planned limits of each emulated device's container; None if no control group limits it."""
        self._limited: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which each device's limits were applied."""
        self._limits: dict[str, LimitsRead] = {}
        """Limits of each device's container, as last read from the kernel."""
        self._asked: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which the init of each device was last asked to
        read the limits."""
        self._measured: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, of the last measurement of each device's link that
        the device made."""
        self._measurements = 0
        """Times that links were measured."""
        self._wrong: LinksRead | None = None
        """Links that are to be measured again."""
        self._until = 0.0
        """End of the pause before, in seconds on the monotonic clock."""

    def wait(self, at: float) -> None:
        """Begin to wait for the devices."""
        self._run.phase = ControllerPhase.WAITING
        self._deadline = at + self._run.spec.topology.start.timeout

    def message(self, message: Message, at: float) -> bool:
        run = self._run
        match message:
            case LinkProbe(device, measured):
                # Otherwise it is a retained message, sent again.
                if device in run.unmeasured and measured > self._measured.get(device, -math.inf):
                    run.unmeasured.discard(device)
                    self._measured[device] = measured
                    run.write(message)
                    if run.status.get(device) == "ready":
                        run.do(ApplyLimit(device))
            case LimitsRead(device):
                self._limits[device] = message
                run.write(message)
            case Status(device, "ready") if device in run.devices:
                if device not in run.unmeasured or run.has_started:
                    run.do(ApplyLimit(device))
            case _:
                return False
        return True

    def limit_applied(self, device: str, at: float) -> None:
        self._limited[device] = at

    def tick(self, at: float) -> None:
        if self._run.phase is ControllerPhase.WAITING:
            self._look(at)
        elif self._run.phase is ControllerPhase.PAUSED and at >= self._until and self._wrong is not None:
            ended = self._run.exit_codes
            self._run.do(MeasureAgain([name for name in self._wrong.wrong if name not in ended]))

    def _look(self, at: float) -> None:
        """Go on if all living devices are ready. At the timeout, a quorum of ready devices suffices.
        Each device gets its CPU limit as soon as the device is ready. The kernel's files must then show
        that limit. The run fails if too few devices are ready at the timeout, or at once if too many
        have ended."""
        run, start = self._run, self._run.spec.topology.start
        needed = max(1, math.ceil(start.quorum * len(self._awaited)))
        living = self._awaited - run.exit_codes.keys()
        ready = {name for name in living - run.unmeasured if run.status.get(name) == "ready"}
        ready -= self._await_limits(ready, at)
        if len(ready) > self._most_ready:
            self._most_ready = len(ready)
            run.show(f"Ready: {len(ready)} of {quantity(len(self._awaited), 'device')}")
        late = at >= self._deadline
        # Absent devices measure their links now, too.
        measured = run.unmeasured <= run.exit_codes.keys()
        if run.status.get(AGGREGATOR) == "ready" and len(ready) >= needed:
            if late or (ready == living and measured):
                for name in sorted(living & run.unmeasured):  # a limit would slow down measuring
                    if run.status.get(name) == "ready":
                        run.do(ApplyLimit(name))
                self._pass(at)
        elif len(living) < needed or AGGREGATOR in run.exit_codes:
            names = sorted(run.exit_codes)
            hint = killed_hint(set(run.exit_codes.values()))
            run.fail(f"{', '.join(names)} ended before the run clock could start.{hint}", names[0])
        elif late:
            self._fail_late(ready)

    def _fail_late(self, ready: set[str]) -> Never:
        missing = ", ".join(sorted(self._awaited - ready)) or AGGREGATOR
        self._run.fail(
            f"{len(ready)} of {quantity(len(self._awaited), 'device')} ready after start.timeout = "
            f"{self._run.spec.topology.start.timeout:g} s; not ready: {missing}. See "
            f"{self._run.spec.directory.logs}, or give the fleet more time (start.timeout) or a quorum "
            "(start.quorum)."
        )

    def _await_limits(self, ready: set[str], at: float) -> set[str]:
        """Return the devices of `ready` whose limits are not confirmed yet. Ask these devices to read
        their limits. The run fails if the engine has set other limits."""
        waiting = set()
        for name in sorted(ready):
            wrong = self._wrong_limits(name)
            if not wrong:
                continue
            waiting.add(name)
            read = self._limits.get(name)
            if read is not None and read.at > self._limited[name] + _LIMITS_TIMEOUT_SECONDS:
                self._run.fail(
                    f"the engine has set other limits for {name}'s container: {'; '.join(wrong)}. The "
                    "run does not start, because its devices would not be those of the topology. See "
                    "`testbed doctor`."
                )
            if at >= self._asked.get(name, 0.0) + _ASKING_INTERVAL_SECONDS:
                self._asked[name] = at
                self._run.publish(name, LimitsRequest(name))
        return waiting

    def _wrong_limits(self, device: str) -> list[str]:
        """Return one text per limit that is not as requested, or one if the limits have not been read
        yet. The list is empty if no control group limits the device."""
        if (wanted := self._requested_limits.get(device)) is None:
            return []
        if (read := self._limits.get(device)) is None:
            return ["they have not been read yet"]
        return list(differences(wanted, read.limits))

    def _pass(self, at: float) -> None:
        """All devices are ready. Segments are measured after the links of devices."""
        run, wrong = self._run, self._wrong
        self._wrong = None
        if wrong is not None and wrong.wrong_segments:
            run.unmeasured |= set(wrong.wrong_segments)
            run.publish(ROUTER, MeasureOrder(wrong.wrong_segments))
            self.wait(at)
        else:
            run.phase = ControllerPhase.CHECKING
            run.do(ReadLinks(is_first=self._measurements == 0))

    def links_read(self, read: LinksRead) -> None:
        """Start the run clock, or measure again, while a host is busier than its plan, what was measured
        wrong. The run fails if a rate deviates so much that it must not start."""
        run = self._run
        self._measurements += 1
        count = len(read.wrong) + len(read.wrong_segments)
        seconds = host_load.pause(self._measurements, read.work) if count else None
        busy = "; ".join(one.text for one in read.work)
        if seconds is None:
            if count:
                self._refuse(read, f"in {quantity(self._measurements, 'measurement')} ({busy})")
            run.do(BeginRun(link_doubt(read.found) or segment_doubt(read.rates)))
            return
        why = "the host is busy" if any(one.is_busy for one in read.work) else "a host may be busy"
        again = f"{quantity(count, 'link')} again: {why} ({busy})"
        run.show(f"Measuring {again}")
        run.note(f"measured {again}")
        run.phase = ControllerPhase.PAUSED
        self._wrong, self._until = read, read.at + seconds

    def _refuse(self, read: LinksRead, measured: str) -> None:
        """`measured`: how often links were measured, and how busy hosts were."""
        why = link_doubt(read.found, FAILED_LINK_PERCENT, RATES)
        why = why or segment_doubt(read.rates, FAILED_LINK_PERCENT)
        if why is not None:
            self._run.fail(
                f"{why}, as measured before the run clock started, {measured}. Request a link that this "
                "host can emulate, or try again when the host is less busy."
            )

    def measuring_again(self, orders: Sequence[AddressedOrder], at: float) -> None:
        """`orders`: for devices that measure their own link."""
        for device, order in orders:
            self._run.unmeasured.add(device)
            self._limits.pop(device, None)  # read again when the limits are set again
            self._run.publish(device, order)
        self.wait(at)

    def problems(self) -> Iterator[str]:
        run = self._run
        names = run.devices.keys() | run.plan.segments.keys()
        if strange := (run.unmeasured | self._limited.keys() | self._limits.keys()) - names:
            yield f"{sorted(strange)} are not of the run"
        if (run.phase is ControllerPhase.PAUSED) and self._wrong is None:
            yield "nothing is to be measured again"
