"""One run from start to end: start what the runtime has, hold the barrier, follow, take all down.

The controller is the emulator's hand. It takes no part in FL: once the run clock goes, the aggregator
and the clients need nothing from it.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from agents import events
from agents.topics import AGGREGATOR, Topics
from agents.transport import Connection, ConnectionFailedError, Event, Received
from testbed.configs import RunSpec
from testbed.errors import HostError, RunFailedError
from testbed.live import Follower
from testbed.runtimes import Runtime
from testbed.signals import interrupting, uninterrupted

_TICK = 0.1
_SUPERVISE_EVERY = 1.0
_GOODBYE = 4.0
"""Seconds that the aggregator has to close its books when a run is interrupted."""


class View(Protocol):
    """Who watches: the terminal."""

    def progress(self, message: str) -> None: ...
    def record(self, record: events.Record) -> None: ...
    def refresh(self, now: float) -> None: ...


@dataclass(slots=True)
class Timings:
    """What start-up and tear-down cost, in seconds of wall time."""

    launch: float = 0.0
    """Until every process or container was started."""
    ready: float = 0.0
    """From there until every client was ready."""
    down: float = 0.0
    """Until everything was gone."""

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in dataclasses.asdict(self).items()}


class Controller:
    def __init__(self, spec: RunSpec, runtime: Runtime, view: View) -> None:
        self._spec = spec
        self._runtime = runtime
        self._view = view
        self._topics = Topics(spec.directory.run)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._devices = {device.name for device in spec.plan.devices}
        self._status: dict[str, str] = {}
        self._gone: set[str] = set()
        self._follower = Follower(spec.directory.events)
        self._follower.read()  # what a resumed run has behind it is no news
        self._ended: events.RunEnded | None = None
        self.timings = Timings()

    def run(self) -> events.RunEnded:
        """Run to the end, and leave nothing behind: also after an error or Ctrl-C.

        Raises RunFailedError or HostError; KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP.
        """
        with interrupting():
            try:
                return self._run()
            finally:
                with uninterrupted():
                    self._take_down()

    def _run(self) -> events.RunEnded:
        count = len(self._devices)
        self._view.progress(
            f"Starting broker, aggregator and {count} devices ({self._spec.plan.runtime})"
        )
        begin = time.monotonic()
        broker = self._runtime.start()
        self.timings.launch = time.monotonic() - begin
        subscriptions = [self._topics.status("+"), self._topics.telemetry("+")]
        connection = Connection(broker, subscriptions, self._inbox.put)
        try:
            connection.open()
        except ConnectionFailedError as error:
            raise HostError(f"{error}{self._log_tail('broker')}") from error
        try:
            self._hold_barrier()
            self.timings.ready = time.monotonic() - begin - self.timings.launch
            self._view.progress(
                f"Started in {self.timings.launch:.1f} s, ready after {self.timings.ready:.1f} s more; "
                "the run clock starts"
            )
            self._command(connection, "start")
            return self._follow()
        except KeyboardInterrupt:
            self._view.progress("Stopping: the aggregator closes its books")
            self._command(connection, "stop")
            self._await_aggregator(_GOODBYE)
            raise
        finally:
            connection.close()

    def _command(self, connection: Connection, what: str) -> None:
        connection.publish(self._topics.control(AGGREGATOR), json.dumps({"do": what}))

    def _hold_barrier(self) -> None:
        """Wait until all are ready, or a quorum when the time is over; each is limited when it is."""
        start = self._spec.topology.start
        deadline = time.monotonic() + start.timeout
        reported = 0
        for _ in self._ticks():
            ready = self._devices & self._in_state("ready")
            if len(ready) > reported:
                reported = len(ready)
                self._view.progress(f"Ready: {reported} of {len(self._devices)} devices")
            if self._status.get(AGGREGATOR) != "ready" and time.monotonic() < deadline:
                continue
            if len(ready) == len(self._devices):
                return
            if time.monotonic() >= deadline:
                needed = start.quorum * len(self._devices)
                if ready and len(ready) >= needed and self._status.get(AGGREGATOR) == "ready":
                    return
                self._fail_barrier(ready)

    def _fail_barrier(self, ready: set[str]) -> None:
        start = self._spec.topology.start
        missing = ", ".join(sorted(self._devices - ready)) or AGGREGATOR
        raise RunFailedError(
            f"{len(ready)} of {len(self._devices)} devices were ready after start.timeout = "
            f"{start.timeout:g} s; not ready: {missing}. See {self._spec.directory.logs}, "
            "or give the fleet more time (start.timeout) or a quorum (start.quorum)."
        )

    def _follow(self) -> events.RunEnded:
        for _ in self._ticks():
            self._read_records()
            self._view.refresh(time.monotonic())
            if AGGREGATOR in self._gone:
                break
        self._read_records()
        if self._ended is None:
            raise RunFailedError(f"the aggregator ended before the run did.{self._log_tail(AGGREGATOR)}")
        if self._ended.reason == "no clients left":
            raise RunFailedError(f"no clients left. See {self._spec.directory.logs}.")
        return self._ended

    def _ticks(self) -> Iterator[None]:
        """Yield some times a second; in between, serve the inbox and look after the processes."""
        supervise = 0.0
        with self._spec.directory.telemetry.open("a", encoding="utf-8") as telemetry:
            while True:
                while not self._inbox.empty():
                    self._received(self._inbox.get(), telemetry.write)
                if time.monotonic() >= supervise:
                    supervise = time.monotonic() + _SUPERVISE_EVERY
                    for sample in self._runtime.telemetry():
                        telemetry.write(json.dumps(sample) + "\n")
                    telemetry.flush()
                    self._look_after()
                yield
                time.sleep(_TICK)

    def _received(self, event: Event, write_telemetry: Callable[[str], object]) -> None:
        if not isinstance(event, Received):
            return
        name = self._topics.name_in(event.topic)
        text = event.payload.decode(errors="replace")
        if event.topic == self._topics.telemetry(name):
            write_telemetry(text + "\n")
            return
        self._status[name] = text
        if text == "ready" and name in self._devices:
            self._runtime.limit(name)

    def _look_after(self) -> None:
        """A device that ends is part of the experiment's story; broker or aggregator end it."""
        for name, code in self._runtime.ended().items():
            if name in self._gone:
                continue
            self._gone.add(name)
            if name == "broker" or (name == AGGREGATOR and code != 0):
                raise RunFailedError(f"the {name} ended with exit code {code}.{self._log_tail(name)}")
            if name in self._devices and self._ended is None and code != 0:
                self._view.progress(f"{name} ended with exit code {code}; see its log")

    def _read_records(self) -> None:
        for record in self._follower.read():
            self._view.record(record)
            if isinstance(record, events.RunEnded):
                self._ended = record

    def _in_state(self, state: str) -> set[str]:
        return {name for name, current in self._status.items() if current == state}

    def _await_aggregator(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and AGGREGATOR not in self._runtime.ended():
            time.sleep(_TICK)

    def _log_tail(self, name: str, lines: int = 12) -> str:
        """The end of a process's log, for an error message; stopping first saves the logs."""
        self._runtime.stop()
        path = self._spec.directory.logs / f"{name}.log"
        try:
            tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return ""
        return "\n".join(["", f"The end of {path}:", *(f"    {line}" for line in tail)])

    def _take_down(self) -> None:
        begin = time.monotonic()
        self._runtime.stop()
        self._spec.directory.remove_work()
        self.timings.down = time.monotonic() - begin
