"""The aggregator process: MQTT, clock and disk around `AggregatorCore`.

    python -m agents.aggregator.main CONFIG

Updates are handled in batches. All updates that have arrived are applied, then their inputs are written
to the log in the background, and then replies and acknowledgements are sent. So everything that a client
learns is already on the disk, and many updates share one fsync (docs/concepts/durability.md).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from agents import config, disturbances, events, process, shards, user_code
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.core import Setup
from agents.aggregator.durable import DurableCore
from agents.aggregator.evaluation import Evaluation, Evaluator
from agents.aggregator.inputs import LastEvaluation, RunPhase, Settings
from agents.aggregator.messages import FloodGuard, Message, PendingMessages
from agents.aggregator.recording import RecordingError
from agents.aggregator.storage import SnapshotError
from agents.config import AggregatorConfig
from agents.device_actions import Crash, Join, Restart, to_json
from agents.disk import files
from agents.disturbances import LATE_SECONDS, LONGEST_SECONDS, PATIENCE_SECONDS, HangingFile, Watchdog
from agents.models.flat import first_model
from agents.mqtt import topics
from agents.mqtt.transport import Connection, ConnectionFailedError, Inbox, ReceivedMessage
from agents.rules import RULES
from agents.rules.client_half import elements
from agents.rules.interface import Rule
from agents.shards import Parts
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.timing.clock import DeviceClock
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.wire import messages, payloads

_CHECKPOINT_EVERY = 30 * SECOND
_INBOX_BYTES = 64 * 2**20
"""Maximum total size in bytes of the messages that wait to be handled."""
_MAX_OVERHEAD_BYTES = 2**17
"""Maximum number of bytes that an update has in addition to its values and indices."""
_EVALUATION_SECONDS = 20.0
"""Host seconds after which own code in an evaluation is reported. This is less than a finished run waits
for its last evaluation."""
_DISK_SECONDS = 60.0
"""Host seconds after which a late run ends if the disk does not answer. Other runs wait as long as for
the main thread."""
_WATCH_EVERY_S = 1.0
"""Host seconds between two checks of the run's progress."""
_READY, _OVER, _OFFLINE = (
    messages.encode(messages.Status(topics.AGGREGATOR, state)) for state in ("ready", "over", "offline")
)


@dataclass(frozen=True, slots=True)
class _ConnectionRestored:
    """The connection to the broker was lost at `since`, on the host's monotonic clock, and is now
    restored."""

    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class _WriteEnded:
    """The write that `Aggregator._commit` began has ended."""


_Other = Future[Evaluation] | messages.StopOrder | _ConnectionRestored | _WriteEnded
_Input = ReceivedMessage | _Other


def main() -> None:
    cfg = config.load(AggregatorConfig, Path(sys.argv[1]))
    if cfg.evaluation_cpus:  # the container has both sets of CPUs
        os.sched_setaffinity(0, cfg.cpus)
    process.keep_freed_memory()
    user_code.use_folder(cfg.code)
    code = 1
    try:
        aggregator = Aggregator(cfg)
        gc.collect()
        gc.freeze()  # otherwise the collection of torch's objects sometimes delays updates by 60 ms
        aggregator.run()
        code = 0
    except (ConnectionFailedError, RecordingError, SnapshotError) as error:
        sys.stderr.write(f"aggregator: {error}\n")
    except Exception as error:  # noqa: BLE001  # Python itself would wait for an evaluation
        if user_code.is_caused_by_user_code(error, cfg.task.name):
            code = user_code.FAILED
            sys.stderr.write(f"{user_code.user_traceback(error)}\n")
        elif isinstance(error, OSError) and error.errno in files.NO_SPACE:
            code = files.FULL_DISK
            sys.stderr.write(f"aggregator: {error.filename}: {error.strerror}\n")
        else:
            traceback.print_exc()
    process.exit_now(code)


class Aggregator:
    """The aggregator process: connection, durable core, evaluator and outbox."""

    def __init__(self, cfg: AggregatorConfig) -> None:
        torch.set_num_threads(cfg.threads)
        self._clock = DeviceClock(cfg.dilation)
        task = user_code.build(cfg.task, TASKS, Task)
        rule = user_code.build(cfg.rule, RULES, Rule)
        w, buffers, self._schema = first_model(task, cfg.seed, cfg.start)
        directory = self._directory = Path(cfg.run_directory)
        planned = cfg.settings
        settings = Settings.complete(
            planned,
            schema=self._schema,
            side=rule.client_side,
            checkpoint_every=_CHECKPOINT_EVERY,
            last_evaluation=LastEvaluation(
                timeout=None if planned.evaluate_after else cfg.last_evaluation_timeout_s,
                dilation=cfg.dilation,
            ),
        )
        self._durable = DurableCore(
            directory,
            Setup(settings, cfg.rule, cfg.seed, cfg.chooser),
            w,
            leg=cfg.leg,
            durability=cfg.durability,
            buffers=buffers,
        )
        self._core, self._server = self._durable.core, self._durable.server
        self._watched = time.monotonic()
        self._epoch = self._core.epoch
        self._clients = [*planned.importance, *planned.idle]
        self._topics = topics.Topics(planned.run)
        self._inbox: Inbox[_Other] = Inbox(_INBOX_BYTES)
        test_set = shards.load(Path(cfg.test_set))
        self._evaluator = Evaluator(
            task,
            test_set,
            self._inbox.put,
            kept=self._durable.load_kept_model,
            until_released=planned.evaluate_after,
            cpus=cfg.evaluation_cpus,
            start=cfg.start,
            watchdog=Watchdog(
                self._report_hang,
                patience=lambda: LONGEST_SECONDS if planned.evaluate_after else _EVALUATION_SECONDS,
                own_code_only=True,
            ).start(),
            parts=Parts(
                cfg.evaluate_classes,
                None if cfg.device_set is None else shards.load(Path(cfg.device_set)),
                cfg.device_samples,
            ),
        )
        for version in self._durable.evaluating:
            self._evaluator.submit_kept(version)
        if self._core.ended is not None:
            self._evaluator.release()
        answer = self._core.largest_answer
        names, status = self._topics, self._topics.status(topics.AGGREGATOR)
        subscriptions = [
            names.update("+"),
            names.status("+"),
            names.report("+"),
            *([] if answer is None else [names.sums("+")]),
            names.control(topics.AGGREGATOR),
        ]
        self._connection = Connection(
            cfg.broker,
            subscriptions,
            self._inbox.receive,
            will=(status, _OFFLINE),
            keeps_session=True,
            largest=_largest(
                w.size + elements(rule.client_side.update_vectors, w.size), buffers.nbytes, answer
            ),
            reconnected=lambda since: self._inbox.put(_ConnectionRestored(since)),
        )
        self._connection.open()
        self._connection.publish_status(status, _READY)
        self._pending = PendingMessages(names, self._clients, self._schema, self._server)
        self._writing: Future[None] | None = None
        """The write of inputs to the disk; None if none is under way."""
        self._written: list[Message] = []
        """Messages that are sent when the write has ended."""
        self._write_began = self._slow_write = 0.0
        """Time in seconds, on the monotonic clock, at which the last write began; and the last one that
        was reported to be slow."""
        self._standstills = disturbances.Standstills()
        self._stop_after = None if planned.stop.after is None else from_seconds(planned.stop.after)
        self._has_deferred = False
        """Whether the core has requested `InstantOver`."""
        self._finished: str | None = "before" if self._core.phase is RunPhase.FINISHED else None
        self._refusals = messages.Refusals(lambda what: sys.stderr.write(f"aggregator: {what}\n"))
        self._flood_guard = FloodGuard()
        self._overdue: dict[str, Nanoseconds] = {}
        """For each client that was overdue at the last check, the device time at which its model was
        sent."""

    def run(self) -> None:
        """Run until the core finishes the run. The records are saved even after an error."""
        signal.signal(signal.SIGTERM, lambda *_: self._inbox.put(messages.StopOrder()))
        self._standstills.watch()
        try:
            self._serve()
        finally:
            self._durable.close()
        self._inbox.close()
        self._connection.close()

    def _serve(self) -> None:
        """Pass inputs to the core, and send the core's messages."""
        if self._epoch is not None:  # the aggregator was restarted within the run
            self._handle(inputs.Restarted(self._now(), self._durable.at))
        hanging = HangingFile(Path(self._directory, "state", "aggregator"))
        watchdog = Watchdog(
            *(self._report_hang, self._give_up, self._patience),
            over=hanging.clear,
            locked=hanging.descriptor,
        ).start()
        while self._finished is None:
            events_now = self._wait(self._core.next_timer)
            watchdog.begin()
            for since, at in self._standstills.pop():  # before the run may end
                self._disrupted(since, at, "the aggregator stood still")
            for event in events_now:
                self._receive(event)
                self._commit()
            now, timer = self._now(), self._core.next_timer
            if timer is not None and timer <= now:  # before the instant ends, as in virtual time
                self._handle(inputs.TimersDue(now))
            if self._has_deferred:
                self._has_deferred = False
                self._handle(inputs.InstantOver(now))
            if time.monotonic() >= self._watched + _WATCH_EVERY_S:
                self._watched = time.monotonic()
                self._watch(now)
            self._commit()
            watchdog.end()
        self._durable.sync()
        self._send([] if self._writing is None else self._written)
        self._send(self._pending.take())

    def _report_hang(self, what: str) -> None:
        """Report what the main thread does not return from. Called in the watchdog's thread."""
        failure = messages.Failure(topics.AGGREGATOR, what)
        self._connection.publish(self._topics.failure(topics.AGGREGATOR), messages.encode(failure))

    def _patience(self) -> float:
        """Return the seconds after which the run ends if the main thread does not return: fewer if the
        run should have ended."""
        after = self._stop_after
        late = None if after is None else after + from_seconds(LATE_SECONDS)
        is_late = late is not None and self._epoch is not None and self._now() > late
        return PATIENCE_SECONDS if is_late else LONGEST_SECONDS

    def _give_up(self, what: str) -> None:
        sys.stderr.write(f"aggregator: {what}: the run ends\n")
        process.exit_now(user_code.FAILED)

    def _commit(self) -> None:
        """Write all inputs so far to the disk, and then send what they caused. While the disk is busy,
        more inputs are handled: they share the next write."""
        if self._writing is not None:
            if not self._writing.done():
                self._check_disk()
                return
            self._writing = None
            self._durable.finish_sync()
            self._send(self._written)
        caused = self._pending.take()
        self._writing, self._write_began = self._durable.start_sync(), time.monotonic()
        if self._writing is None:
            self._send(caused)
        else:
            self._written = caused
            self._writing.add_done_callback(lambda _: self._inbox.put(_WriteEnded()))

    def _check_disk(self) -> None:
        """Report a disk that does not answer, and end the process if it does not for long."""
        lasted = time.monotonic() - self._write_began
        if lasted >= PATIENCE_SECONDS and self._slow_write != self._write_began:
            self._slow_write = self._write_began
            self._report_hang(f"the disk of the run's directory has not answered for {lasted:.0f} s")
        if lasted >= max(self._patience(), _DISK_SECONDS):
            sys.stderr.write(f"aggregator: the disk has not answered for {lasted:.0f} s\n")
            process.exit_now(files.FULL_DISK)

    def _send(self, caused: Iterable[Message]) -> None:
        for topic, payload in caused:
            self._connection.publish(topic, payload)

    def _watch(self, now: Nanoseconds) -> None:
        """Check whether the run makes progress, and whether a flood is over."""
        if (since := self._core.silent_since(now)) is not None:
            self._handle(inputs.Stalled(now, since))
        overdue = self._core.overdue(now)
        for client in overdue.keys() - self._overdue.keys():
            self._note(
                f"{client} has not answered the model sent at {to_seconds(overdue[client]):.1f} s: it "
                "takes far longer than in its earlier rounds, and may hang"
            )
        self._overdue = overdue
        if (refused := self._flood_guard.end_of_flood()) is not None:
            self._note(f"a flood of messages is over: {refused:,} of them were refused")
            self._connection.subscribe_again()  # status messages and updates may have been lost

    def _now(self) -> Nanoseconds:
        """Return the device time. While the run clock stands still, return the time of the last
        input."""
        return self._durable.at if self._epoch is None else self._clock.now() - self._epoch

    def _run_clock(self) -> Nanoseconds:
        """Return the device time, but at most the time of the run's end, so that no record has a later
        time."""
        ends = (self._core.ended, self._stop_after)
        return min([self._now(), *(end for end in ends if end is not None)])

    def _wait(self, timer: Nanoseconds | None) -> list[_Input]:
        """Wait until an input arrives, `timer` is due, or the next check of the run is due. Return
        all inputs that have arrived."""
        timeout = _WATCH_EVERY_S
        if timer is not None:
            timeout = min(timeout, self._clock.takes(max(0, timer - self._now())))
        return self._inbox.drain(timeout)

    def _receive(self, event: _Input) -> None:
        match event:
            case ReceivedMessage(topic, payload, arrived):
                self._receive_message(topic, payload, arrived)
            case Future():
                done = event.result()
                for result in done.inputs(self._now()):
                    self._handle(result)
            case _ConnectionRestored(since):
                if self._epoch is not None:
                    lost = self._clock.at(since) - self._epoch
                    self._handle(inputs.Reconnected(self._now(), lost))
            case _WriteEnded():
                pass  # `_commit` comes next
            case messages.StopOrder():  # SIGTERM
                self._carry_out(event)

    def _receive_message(self, topic: str, payload: bytes | bytearray, arrived: Nanoseconds) -> None:
        kind, sender = self._topics.split(topic)
        if sender != topics.AGGREGATOR and not self._flood_guard.passes(
            sender, time.monotonic(), is_answer=kind in ("update", "sums")
        ):
            self._refuse(topic, sender)
            return
        at = self._now()
        if kind == "update":
            arrived = at if self._epoch is None else self._clock.at(arrived) - self._epoch
            try:
                message = payloads.decode_update(payload)
            except payloads.WireError as error:
                self._handle(inputs.Unreadable(at, sender, str(error)))
                return
            self._handle(inputs.UpdateArrived(at, sender, len(payload), arrived, message), payload)
        elif kind == "sums":
            self._handle(inputs.Answered(at, sender, payload))
        else:
            self._receive_control_message(at, topic, payload)

    def _receive_control_message(self, at: Nanoseconds, topic: str, payload: bytes | bytearray) -> None:
        try:
            match messages.decode(self._topics, topic, payload):
                case messages.Status(client, state):
                    self._handle(inputs.StatusChanged(at, client, state))
                case messages.Report(client, dispatch, about):
                    self._handle(inputs.Reported(at, client, dispatch, about))
                case order if isinstance(order, messages.AggregatorOrder):
                    self._carry_out(order)
                case _:
                    raise messages.MessageError("unexpected message for the aggregator")
        except messages.MessageError as error:
            self._refusals.add(topic, error)

    def _refuse(self, topic: str, sender: str) -> None:
        """Refuse an excess message. If `sender` floods, shut out `sender`: pass the status `offline` to
        the core, and write a record. The controller ends the client's process when it reads the
        record."""
        self._refusals.add(topic, messages.MessageError("too many messages"))
        goes_on = self._epoch is not None and self._core.ended is None
        if goes_on and sender in self._clients and self._flood_guard.is_flooding(sender):
            self._flood_guard.shut_out(sender)
            at = self._now()
            crash = to_json(Crash())
            self._record(events.Acted(to_seconds(at), sender, topics.AGGREGATOR, 0.0, crash))
            self._handle(inputs.StatusChanged(at, sender, "offline"))

    def _carry_out(self, order: messages.AggregatorOrder) -> None:
        match order:
            case messages.StartOrder():
                if self._epoch is None:
                    self._start()
            case messages.StopOrder():
                if self._epoch is None:
                    self._finished = "interrupted"
                self._handle(inputs.EndRequested(self._now(), "interrupted"))
            case messages.LogOrder(at, device, source, lateness, details):
                ended = self._core.ended
                if self._finished is None and (ended is None or at <= to_seconds(ended)):
                    acted = events.Acted(at, device, source, lateness, details)
                    self._record(acted)
                    if isinstance(acted.action, Restart | Join) and self._flood_guard.readmit(device):
                        self._connection.subscribe_again()  # the status `ready` may have been refused
            case messages.NoteOrder(message):
                if self._finished is None:
                    self._note(message)
            case messages.DisruptOrder(at, since, reason):
                self._disrupted(since, at, reason)
            case of_feature:
                if self._finished is None:
                    self._record(of_feature.record())

    def _disrupted(self, since: float, at: float, reason: str) -> None:
        """Record a disruption of the run from `since` to `at`, in seconds of the host's monotonic
        clock."""
        if self._epoch is None or self._finished is not None:
            return
        begin, end = (self._clock.at(from_seconds(one)) - self._epoch for one in (since, at))
        last = self._run_clock()
        if end > 0 and begin < last:
            record = events.Disrupted(to_seconds(min(end, last)), to_seconds(max(begin, 0)), reason)
            self._record(record)

    def _start(self) -> None:
        """Start the run clock."""
        at = self._durable.at
        self._epoch = self._clock.now() - at
        self._handle(inputs.Started(at, time.time(), self._epoch))

    def _note(self, message: str) -> None:
        """Record a note for people who read the run's events."""
        self._record(events.Note(to_seconds(self._run_clock()), message))

    def _record(self, record: events.Record) -> None:
        """Pass a record from the shell to the core, which writes it."""
        self._handle(inputs.Written.from_record(record))

    def _handle(self, event: inputs.Input, payload: bytes | bytearray | None = None) -> None:
        """Pass `event` to the core and carry out its actions. `payload`: the bytes from which the event
        was decoded; None if the event was not decoded from bytes."""
        for action in self._durable.handle(event, payload):
            match action:
                case act.Log() | act.Save():
                    pass  # done by the durable core
                case act.EndInstant():
                    self._has_deferred = True
                case act.Evaluate(version):
                    self._evaluator.submit(version, self._server.w, self._server.buffers)
                case act.StopClients():
                    self._evaluator.release()
                    self._connection.publish_status(self._topics.status(topics.AGGREGATOR), _OVER)
                    for name in self._clients:
                        self._pending.stop(name)
                case act.Finish(reason):
                    self._finished = reason
                case act.Dispatch(client):
                    self._flood_guard.expect_answer(client)
                    self._pending.add_model(action)
                case act.BroadcastModel():
                    for client in self._server.clients:
                        self._flood_guard.expect_answer(client)
                    self._pending.add_model(action)
                case messages.UnmaskRequest(client):
                    self._flood_guard.expect_answer(client)
                    self._pending.add(action)
                case _:
                    self._pending.add(action)


def _largest(numbers: int, buffers: int, answer: int | None) -> dict[str, int]:
    """Return the maximum size in bytes of payloads from clients, by kind of topic. `numbers`: number of
    float32 numbers in an update. `buffers`: size of the model's buffers in bytes. `answer`: maximum size
    in bytes of an answer to `UnmaskRequest`; None if the run asks for none."""
    largest = {"update": 2 * 4 * numbers + buffers + _MAX_OVERHEAD_BYTES}
    return largest if answer is None else {**largest, "sums": answer}


if __name__ == "__main__":
    main()
