"""The client process: MQTT, clock and torch around `ClientCore`.

python -m agents.client.main CONFIG [TURN]

TURN: file descriptor that the client closes when it is ready (`agents.device.turns`).
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents import config, process, random_generators, shards, user_code
from agents.client import core, factory, files, resources
from agents.client.files import Outbox, retry_while_disk_full
from agents.client.resources import Pace, share_in
from agents.config import FIT_KEEPALIVE, ClientConfig
from agents.device.control_group import ControlGroup
from agents.disturbances import LONGEST_SECONDS, PATIENCE_SECONDS, HangingFile, Watchdog
from agents.mqtt import chunks, topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage, take
from agents.pipeline.interface import Exchange, PeerError
from agents.process import without_garbage_collection, without_meta_kernels
from agents.rules.client_half import SavedVectors
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.texts import quantity
from agents.timing.clock import DeviceClock
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire import messages, payloads

if TYPE_CHECKING:
    from agents.client.training import Trainer


def main() -> None:
    cfg = config.load(ClientConfig, Path(sys.argv[1]))
    process.keep_freed_memory()
    user_code.use_folder(cfg.code)
    try:
        client = ClientProcess(cfg)
    except ConnectionFailedError as error:
        sys.exit(f"client {cfg.setup.client}: {error}")
    for turn in sys.argv[2:]:
        os.close(int(turn))
    try:
        client.run()
    except Exception as error:
        if not user_code.is_from_user_code(error):
            raise
        sys.stderr.write(f"{user_code.user_traceback(error)}\n")
        sys.exit(user_code.FAILED)
    process.exit_now(0)


class ClientProcess:
    """Connects before it imports torch, so that the client has the state `joining` meanwhile."""

    def __init__(self, cfg: ClientConfig) -> None:
        self._config, self._setup, self._name = cfg, cfg.setup, cfg.setup.client
        self._clock = DeviceClock(cfg.dilation, cfg.clock)
        self._topics = topics.Topics(self._setup.run)
        self._stopped = threading.Event()
        self._inbox: queue.SimpleQueue[ReceivedMessage | None] = queue.SimpleQueue()
        self._thinking_until: Nanoseconds | None = None
        self._leaving = self._ready = False
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        names = self._topics
        subscriptions = [names.model(self._name), names.broadcast, names.request(self._name)]
        largest = {"model": payloads.largest_model(cfg.parameters, cfg.buffers, cfg.own_elements)}
        steps = factory.steps(self._setup, cfg.parameters)
        self._exchange = next((step.exchange for step in steps if step.exchange is not None), None)
        """Exchange of keys and shares with other clients, if a step needs it. Received ones are handled
        in paho's thread, so that they do not pile up during a training."""
        if self._exchange is not None:
            subscriptions += [names.key("+"), names.share(self._name, "+")]
            largest["share"] = self._exchange.share_size
        self._models = names.model(self._name), names.broadcast
        stop = messages.encode(messages.Request(self._name, "stop"))
        self._stop_request = names.request(self._name), stop
        self._refusals = messages.Refusals(self._warn)
        will = (names.status(self._name), messages.encode(messages.Status(self._name, "offline")))
        keepalive = self._clock.takes(from_seconds(cfg.keepalive))
        self._connection = Connection(
            cfg.broker,
            subscriptions,
            self._sink,
            will=will,
            keepalive=keepalive,
            largest=largest,
            reconnected=lambda _: self._publish_key(),  # a restarted broker has lost the key
        )
        self._outbox = None if cfg.outbox is None else Outbox(Path(cfg.outbox), self._warn)
        self._share = (
            ControlGroup.of_process().cores if cfg.share is None else partial(share_in, Path(cfg.share))
        )
        self._watchdog = self._make_watchdog()
        self._watchdog.begin()
        self._connection.open(cfg.timeout_s)
        self._resend()  # before `joining`: updates of an earlier process still count
        self._publish_state("joining")
        shard = shards.load(Path(cfg.shard))
        with user_code.exit_if_user_code_fails(cfg.task.name), resources.exit_when_out_of_memory(cfg):
            self._trainer = _trainer(cfg, shard)
        self._cut = False
        self._memory = None if cfg.memory is None else Path(cfg.memory)
        known = None if self._memory is None else _remembered(self._memory, self._name)
        self._begun = None if cfg.begun is None else Path(cfg.begun)
        begun = 0 if self._begun is None else files.read_count(self._begun)
        self._timing = factory.timing(self._setup, begun)
        self._publish_key()
        with user_code.exit_if_user_code_fails(self._setup.rule.name):
            self._core = factory.core(
                *(self._setup, len(shard), self._wait, steps, known), fits=self._trainer.fits
            )
        self._pace = Pace(self._share)
        self._busy_since = time.monotonic()
        """Monotonic time since which the client has worked without a pause."""
        self._ready = True
        self._publish_state("ready")

    def _make_watchdog(self) -> Watchdog:
        """Return the watchdog of the user's own code, which is started if there is such code. A step may
        take as long as `PATIENCE_SECONDS` of a whole core, a call of an own `fit` as `LONGEST_SECONDS`.
        """
        cfg = self._config
        if cfg.code is None or cfg.outbox is None:
            return Watchdog(self._warn)
        seconds = PATIENCE_SECONDS if cfg.keepalive < FIT_KEEPALIVE else LONGEST_SECONDS
        file = HangingFile(Path(cfg.outbox))
        return Watchdog(
            file.write,
            over=file.clear,
            patience=lambda: seconds / (self._share() or 1.0),
            own_code_only=True,
            locked=file.descriptor,
        ).start()

    def _wait(self, elapsed: Nanoseconds) -> Nanoseconds:
        """Delay before the update is sent. `elapsed`: since its training could begin."""
        return max(0, self._timing.floor - elapsed) + self._timing.thinking

    def run(self) -> None:
        """Ends by a stop request of the aggregator, or SIGTERM."""
        while not self._stopped.is_set():
            self._execute(self._next_actions())
        if self._leaving:
            self._execute(self._core.leave(self._clock.now()))
        self._connection.close(patient=self._leaving)
        if self._outbox is not None:
            self._outbox.close()

    def _next_actions(self) -> core.Actions:
        """Messages that have arrived are handled before the end of a thinking time. So if several models
        arrived during a training, the next one begins from the newest."""
        until, idle = self._thinking_until, time.monotonic()
        self._watchdog.end()
        try:
            left = None if until is None else self._clock.takes(max(0, until - self._clock.now()))
            event = take(self._inbox, left)
        except queue.Empty:
            self._thinking_until = None
            self._busy_since = time.monotonic()
            self._watchdog.begin()
            return self._core.on_thought(self._clock.now())
        self._watchdog.begin()
        self._busy_since = idle if event is None else to_seconds(event.at)
        return self._handle(event)

    def _handle(self, message: ReceivedMessage | None) -> core.Actions:
        if message is None:
            return []
        at = self._clock.at(message.at)
        if message.topic != self._topics.request(self._name):
            return self._core.on_model(payloads.decode_model(message.payload), at)
        return self._requested(message.topic, message.payload, at)

    def _requested(self, topic: str, payload: bytes | bytearray, at: Nanoseconds) -> core.Actions:
        try:
            match messages.decode(self._topics, topic, payload):
                case messages.Request(what="pull"):
                    return self._core.pull(at)
                case messages.Request(what="interrupt"):
                    return self._core.interrupt(at)
                case messages.Acknowledgement(_, dispatch):
                    if self._outbox is not None:
                        self._outbox.discard(dispatch)
                case messages.UnmaskRequest(client, number, updates) if self._exchange is not None:
                    answer = self._exchange.answer(number, updates)
                    self._connection.publish(self._topics.sums(client), answer)
                case messages.ReportRequest(client, about):
                    self._resend()
                    report = messages.encode(messages.Report(client, self._core.works_on, about))
                    self._connection.publish(self._topics.report(client), report)
                case _:
                    raise messages.MessageError("unexpected request: this client cannot answer it now")
        except messages.MessageError as error:
            self._refusals.add(topic, error)
        except PeerError as error:
            self._refusals.add(topic, messages.MessageError(str(error)))
        return []

    def _take_from_peer(self, message: ReceivedMessage, exchange: Exchange) -> None:
        """Refuse an invalid key or share."""
        kind, sender = self._topics.split(message.topic)
        try:
            if kind == "key":
                exchange.add_peer(sender, bytes(message.payload))
            else:
                exchange.receive_share(sender, message.payload)
        except PeerError as error:
            self._refusals.add(message.topic, messages.MessageError(str(error)))

    def _publish_key(self) -> None:
        if self._exchange is not None:
            self._connection.publish(self._topics.key(self._name), self._exchange.public, retain=True)

    def _prepare(self, exchange: Exchange, dispatch: int) -> None:
        """Prepare the update that will answer `dispatch`, and send the messages for the other
        clients."""
        begun = self._clock.now()
        for name, share in exchange.prepare(dispatch):
            self._connection.publish(self._topics.share(name, self._name), share)
        exchange.note_preparation_time(dispatch, self._clock.now() - begun)

    def _execute(self, actions: core.Actions) -> None:
        for action in actions:
            match action:
                case core.Train():
                    self._train(action)
                case core.CutShort():
                    self._cut = True
                case core.Think(duration):
                    self._thinking_until = self._clock.now() + duration
                case core.Remember(known) if (path := self._memory) is not None:
                    retry_while_disk_full(partial(files.save_memory, known, path), self._stopped.wait)
                case core.SendUpdate(_, message):
                    self._send(message())

    def _send(self, update: payloads.UpdateMessage) -> None:
        head, *views = payloads.lay_out(update)
        if self._outbox is not None and update.kind != payloads.FAREWELL:
            put = partial(self._outbox.put, update.dispatch, (head, *views))
            if not retry_while_disk_full(put, self._stopped.wait):
                return
        payload = chunks.chunk_messages(head, chunks.cut(views))
        self._connection.publish(self._topics.update(self._name), payload)

    def _resend(self) -> None:
        """Send all unacknowledged updates again."""
        if self._outbox is not None:
            for payload in self._outbox.payloads():
                update = chunks.split(payload)
                self._connection.publish(self._topics.update(self._name), update)

    def _train(self, wanted: core.Train) -> None:
        model, sequence = wanted.model, wanted.sequence
        self._cut = False
        self._timing.begin()
        if self._begun is not None:
            retry_while_disk_full(partial(files.count_one_more, self._begun), self._stopped.wait)
        self._log(f"round {sequence} begins, from version {model.version}")
        self._pace.begin(self._busy_since)
        if self._exchange is not None:
            self._prepare(self._exchange, model.dispatch)
        started, rng = self._clock.now(), factory.rng(self._setup, random_generators.TRAINING, sequence)
        name = self._config.task.name
        with user_code.exit_if_user_code_fails(name), resources.exit_when_out_of_memory(self._config):
            if self._core.sends_gradients:
                result = self._trainer.gradient(model.vector, rng, model.buffers)
            else:
                lr = self._setup.local.rate(model.version, model.lr)
                self._trainer.set_client(self._name, self._setup.index, wanted.memory)
                result = self._trainer.train(
                    *(model.vector, rng, lr, self._interrupted),
                    buffers=model.buffers,
                    terms=wanted.terms,
                )
        self._keep_pace()
        how = "is cut short" if self._cut or self._stopped.is_set() else "ends"
        self._log(f"round {sequence} {how}: {quantity(result.steps, 'step')}, loss {result.loss:.4g}")
        if self._stopped.is_set():
            return
        outcome = core.Outcome(result.end, result.loss, result.buffers, result.memory)
        trained = core.Trained(lambda: outcome, result.steps, started, self._clock.now())
        self._execute(self._core.on_trained(trained))

    def _warn(self, what: str) -> None:
        sys.stderr.write(f"client {self._name}: {what}\n")

    def _log(self, what: str) -> None:
        if self._config.verbose:
            sys.stderr.write(f"{time.strftime('%H:%M:%SZ', time.gmtime())} {what}\n")

    def _keep_pace(self) -> None:
        """Wait until the training has taken as long as with the device's CPU share, or must end. Handle
        messages meanwhile."""
        until = time.monotonic() + self._pace.end()
        self._watchdog.end()
        while not (self._cut or self._stopped.is_set()) and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._execute(self._handle(take(self._inbox, left)))
        self._watchdog.begin()

    def _interrupted(self) -> bool:
        """Handle messages. Return whether the training must end."""
        self._watchdog.begin()
        while not self._inbox.empty():
            self._execute(self._handle(self._inbox.get()))
        return self._cut or self._stopped.is_set()

    def _sink(self, message: ReceivedMessage) -> None:
        """Receive a message, in paho's thread. A stop request overtakes all messages that wait. Models
        are ignored until the client is ready, because the client gets a model when it joins."""
        if (message.topic, message.payload) == self._stop_request:
            self._stop()
        elif self._exchange is not None and self._topics.split(message.topic)[0] in ("key", "share"):
            self._take_from_peer(message, self._exchange)
        elif self._ready or message.topic not in self._models:
            self._inbox.put(message)

    def _leave(self) -> None:
        self._leaving = True
        self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        self._inbox.put(None)  # wakes `run`

    def _publish_state(self, state: messages.State) -> None:
        status = messages.encode(messages.Status(self._name, state))
        self._connection.publish_status(self._topics.status(self._name), status)


def _remembered(path: Path, client: str) -> SavedVectors:
    try:
        return files.load_memory(path)
    except (OSError, ValueError, payloads.WireError) as error:
        sys.exit(f"client {client}: its saved vectors in {path} cannot be read: {error}")


def _trainer(cfg: ClientConfig, shard: shards.Shard) -> Trainer:
    """Import torch, build the model, and run one training step whose result is discarded, so that these
    costs occur before the client is ready.

    All objects that exist at the end are excluded from garbage collection. A search through torch's
    170,000 objects takes 100 ms on one core: a training on a device with 0.04 cores would take 2.5 s
    longer.
    """
    lean = without_meta_kernels() if cfg.code is None else nullcontext()
    with lean, without_garbage_collection():
        import torch

        from agents.client.training import make_trainer

        if cfg.threads:
            torch.set_num_threads(cfg.threads)
        resources.prepare_gpu(cfg)
        task = user_code.build(cfg.task, TASKS, Task)
        trainer = make_trainer(task, shard, cfg.setup.local, cfg.start, cfg.device)
        trainer.warm_up()
        gc.freeze()
    return trainer


if __name__ == "__main__":
    main()
