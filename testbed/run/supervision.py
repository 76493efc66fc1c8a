"""Supervision of a run: processes that end, are started again, stand still or hang, and other
disturbances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from agents import events, user_code
from agents.config import LOGGED, AccessLink
from agents.device_actions import Crash
from agents.disk import files
from agents.disturbances import (
    LATE_SECONDS,
    LONGEST_SECONDS,
    STANDSTILL_SECONDS,
    UNANSWERED_SECONDS,
    Ongoing,
    cut,
)
from agents.mqtt.topics import AGGREGATOR
from agents.texts import quantity
from agents.wire.messages import DisruptOrder, Disturbance, Failure, Message, Status, UsageSample
from testbed.broker import BROKER
from testbed.errors import free_space
from testbed.run.inputs import Act, ControllerPhase, ProcessesWatched, StartAgain
from testbed.run.part import ControlledRun, ControllerPart

_LASTING_INTERVAL_SECONDS = 10.0
"""Seconds between two records of a disturbance that lasts."""
_TRACEBACK_LINES = 40
"""Log lines to show if the user's own code raised an exception."""
_LOSSY = 0.05
"""Packet loss (as a share) above which a connection may by chance be silent for some seconds."""
_MAX_RESTARTS = 3
"""Restarts of broker and aggregator in a run."""


class Supervision(ControllerPart):
    def __init__(self, run: ControlledRun) -> None:
        super().__init__(run)
        self._real = {device.name for device in run.plan.real_devices}
        self._restarts = 0
        self._exits: list[str] = []
        """Sentences on the devices that the last check found ended while the run clock went."""
        self._stopped_since: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, at which each process was found to be stopped by
        somebody else."""
        self._hanging: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, since which own code has been known to hang, by
        sentence."""
        self._disturbances = Ongoing()
        self._lasting: dict[str, float] = {}
        """Start of each disturbance that is not over, in seconds on the monotonic clock, by reason."""
        self._record_lasting_at = -math.inf
        self._heard: dict[str, float] = {}
        """Time in seconds, on the monotonic clock, of the last telemetry of each device."""
        self.cpu_seconds: dict[str, float] = {}
        """Device -> CPU seconds in its last sample."""

    def message(self, message: Message, at: float) -> bool:
        run = self._run
        match message:
            case UsageSample(device=device):
                self.cpu_seconds[device] = message.cpu
                self._heard[device] = at
                run.write(message)
            case Disturbance(device, _, _, reason):
                if reason != cut(device) or not self._is_cut(device):  # otherwise it is as ordered
                    self.disturbed(message)
            case Failure(component, reason):
                if component == AGGREGATOR:  # which may never record it
                    run.show(f"the aggregator: {reason}")
                run.record_failure(f"{component}: {reason}")
            case Status(component, "ready") if component == AGGREGATOR and run.postponed is not None:
                run.orders[:0] = run.postponed
                run.postponed = None
            case _:
                return False
        return True

    def record(self, record: events.Record, at: float) -> None:
        if isinstance(record, events.Acted) and record.source == AGGREGATOR:
            # Messages sent to the aggregator during the flood could be lost.
            self._run.postpone_orders()
            self._run.do(Act(record.device, Crash(), source=None))
            self._run.record_failure(
                f"{record.device} sent far more than allowed, and its client was ended"
            )

    # Processes that end

    def check_exits(self, codes: Mapping[str, int], at: float) -> None:
        """A device may end; if nobody ordered that, the run is not valid. If broker or aggregator ends
        while the run clock is running, the process is restarted. A run has at most `_MAX_RESTARTS`
        restarts. If the process cannot be restarted, the run ends."""
        run = self._run
        self._record_exits()
        for name, code in codes.items():
            if name in run.exit_codes:
                continue
            if code == user_code.FAILED:
                what = f"{run.user_code_on(name)} failed on {name}, so the run ends."
                run.fail(what, name, _TRACEBACK_LINES)
            if code == files.FULL_DISK and name == AGGREGATOR:
                self._fail_full_disk()
            is_server = name not in run.devices and name != AGGREGATOR
            if is_server or (name == AGGREGATOR and code != 0):
                if self._can_restart(name):
                    self._restarts += 1
                    run.postpone_orders()
                    run.do(StartAgain(name, code))
                    continue
                often = f", after {quantity(self._restarts, 'restart')}" if self._restarts else ""
                run.fail(f"the {name} ended with exit code {code}{often}.{killed_hint({code})}", name)
            run.exit_codes[name] = code
            if not run.was_over:
                run.ended_early.add(name)
            if name in run.devices and run.ended is None:
                if code != 0:
                    run.show(f"{name} ended with exit code {code}; see its log.{killed_hint({code})}")
                if run.epoch is not None:
                    when = f"at {run.device_time(at):.1f} s with exit code {code}"
                    self._exits.append(f"{run.title(name)} ended {when}")

    def _record_exits(self) -> None:
        """Record as failures the devices that the check before found ended, unless the run is over by
        now: at the end of a run, devices may be seen to end before the aggregator's last message."""
        exits, self._exits = self._exits, []
        if self._run.ended is None and not self._run.is_over:
            for ended in exits:
                self._run.record_failure(f"{ended}, without an order")

    def _fail_full_disk(self) -> None:
        directory = self._run.spec.directory
        resume = f", then go on: testbed up --resume {directory.run}"
        self._run.fail(
            f"the aggregator could not write to {directory.path}{free_space(directory.path)}: make room "
            "there or raise the limit of the shell (ulimit -f)"
            f"{resume if self._keeps_all else ''}; or run it again in a folder on another disk "
            "(--runs).",
            AGGREGATOR,
        )

    @property
    def _keeps_all(self) -> bool:
        return self._run.spec.topology.durability in LOGGED

    def _can_restart(self, name: str) -> bool:
        """Whether the run can continue after a restart of broker or aggregator. An aggregator without an
        input log would not know its last messages to the clients."""
        run = self._run
        if not run.has_started or run.epoch is None or run.is_over:
            return False
        can_resume = name == BROKER or (name == AGGREGATOR and self._keeps_all)
        return can_resume and self._restarts < _MAX_RESTARTS

    def restarted(self, name: str, code: int, at: float) -> None:
        when = f"at {self._run.device_time(at):.1f} s"
        what = f"the {name} ended with exit code {code} {when} and was started again"
        if not self._keeps_all:
            what += "; updates in flight may be lost"
        self._run.record_failure(what)
        self._run.show(what)

    # Processes that do not answer

    def watched(self) -> Iterator[str]:
        """Yield the components that may report that own code hangs in them."""
        run = self._run
        for name in (run.devices.keys() | {AGGREGATOR}) & run.status.keys() - run.exit_codes.keys():
            if not run.state(name).is_held:
                yield name

    def watch(self, seen: ProcessesWatched) -> None:
        run, now, known = self._run, seen.at, self._stopped_since
        self._stopped_since = {name: known.get(name, now) for name in seen.stopped}
        lasting = {
            f"{run.title(name)} stood still": since
            for name, since in self._stopped_since.items()
            if now - since >= STANDSTILL_SECONDS
        }
        hanging = [f"{name}: {what}" for name, what in seen.hanging.items()]
        self._hanging = {what: self._hanging.get(what, now) for what in hanging}
        silent = {
            f"nothing was heard of {name}": since
            for name, since in self._heard.items()
            if name in self._real and now - since >= UNANSWERED_SECONDS and name not in run.exit_codes
        }
        for reason, since, is_over in self._disturbances.update(lasting | silent | self._hanging):
            if reason in lasting:
                run.show(f"{reason} for {now - since:.0f} s: somebody has stopped it")
            elif reason in self._hanging:
                run.show(reason)
            self._note_disturbance(now, since, reason, is_over=is_over)
        self._end_if_aggregator_hangs(now)

    def _end_if_aggregator_hangs(self, now: float) -> None:
        """End the run if the aggregator's code holds Python's interpreter lock, and the run is late.
        Otherwise the aggregator itself gives up."""
        run = self._run
        after = run.spec.topology.stop.build().after
        late = math.inf if after is None else run.host_time(after + LATE_SECONDS)
        for what, since in self._hanging.items():
            if what.startswith(f"{AGGREGATOR}:") and (now > late or now - since > LONGEST_SECONDS):
                run.failures.append(what)
                who = run.user_code_on(AGGREGATOR)
                run.fail(f"{who} failed on {what} for {now - since:.0f} s: the run ends.")

    # Disturbances

    def _is_cut(self, device: str) -> bool:
        """Whether an order has cut the device's link, or the link loses so many packets that the device
        may be silent for long."""
        state, planned = self._run.state(device), self._run.devices[device].link
        link = (planned or AccessLink()).with_changes(state.link)
        return state.is_held or link.is_outage or link.loss > _LOSSY

    def disturbed(self, found: Disturbance) -> None:
        self._note_disturbance(found.at, found.since, found.disturbance, is_over=found.is_over)

    def _note_disturbance(self, at: float, since: float, reason: str, *, is_over: bool) -> None:
        """Record a disturbance. One that is not over is recorded again until it is, at the latest with
        the end of the run."""
        if is_over:
            self._lasting.pop(reason, None)
        else:
            self._lasting[reason] = since
        self.record_disruption(at, since, reason)

    def tick(self, at: float) -> None:
        if at >= self._record_lasting_at:
            self._record_lasting_at = at + _LASTING_INTERVAL_SECONDS
            self._record_lasting(at)

    def finish(self, ended: events.RunEnded) -> None:
        if self._run.epoch is not None and self._run.phase is ControllerPhase.ENDED:
            self._record_lasting(self._run.host_time(ended.at))

    def _record_lasting(self, at: float) -> None:
        """Record what lasts at `at`, in seconds on the monotonic clock."""
        for reason, since in self._lasting.items():
            self.record_disruption(at, since, reason)

    def record_disruption(self, at: float, since: float, reason: str) -> None:
        """Record a disruption from `since` to `at`, in seconds on the monotonic clock. Keep it for the
        verdict, too: the order does not arrive if broker or aggregator stands still until the end."""
        run = self._run
        run.order(AGGREGATOR, DisruptOrder(at, since, reason))
        if run.epoch is not None:
            begin, end = run.device_time(since), run.device_time(at)
            run.disruptions.append(events.Disrupted(end, max(0.0, begin), reason))

    def problems(self) -> Iterator[str]:
        if not 0 <= self._restarts <= _MAX_RESTARTS:
            yield f"{self._restarts} restarts"
        if strange := self._run.ended_early - self._run.exit_codes.keys():
            yield f"{sorted(strange)} have not ended"
        if strange := self._hanging.keys() - self._lasting.keys():
            yield f"{sorted(strange)} hang, and do not last"


def killed_hint(codes: set[int]) -> str:
    """The kernel kills processes (exit code 137 or -9) when memory runs out."""
    return " Killed: perhaps it needs more memory." if codes & {137, -9} else ""
