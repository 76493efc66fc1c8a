"""The client process: MQTT, clock and torch around `ClientCore`.

python -m agents.client.main CONFIG
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import SeedSequence

from agents import config, durations, shards, topics, wire
from agents.client import core
from agents.config import ClientConfig
from agents.tasks import TASKS
from agents.transport import Connection, ConnectionFailedError, Event, Received, Reconnected

if TYPE_CHECKING:
    from agents.client.training import Trainer

_TRAINING, _THINKING = 1, 2


def main() -> None:
    cfg = config.load(ClientConfig, Path(sys.argv[1]))
    try:
        client = Client(cfg)
    except ConnectionFailedError as error:
        sys.exit(f"client {cfg.client}: {error}")
    client.run()


class Client:
    """Connects first, so that everyone sees the client joining while torch is being imported."""

    def __init__(self, cfg: ClientConfig) -> None:
        self._config = cfg
        self._topics = topics.Topics(cfg.run)
        self._status = self._topics.status(cfg.client)
        self._stopped = threading.Event()
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thinking_until: float | None = None
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        subscriptions = [self._topics.model(cfg.client), self._topics.request(cfg.client)]
        will = (self._status, b"offline")
        self._connection = Connection(cfg.broker, subscriptions, self._sink, will=will)
        self._connection.open()
        self._say(b"joining")
        shard = shards.load(Path(cfg.shard))
        self._trainer = _trainer(cfg, shard)
        identity = core.Identity(cfg.run, cfg.client, cfg.kind, len(shard))
        rng = self._rng(_THINKING)
        self._core = core.ClientCore(
            identity, lambda: 0.0 if cfg.think is None else durations.draw(cfg.think, rng)
        )
        self._say(b"ready")

    def run(self) -> None:
        """Serve until the aggregator or SIGTERM says stop."""
        while not self._stopped.is_set():
            self._execute(self._next_actions())
        self._connection.close(last=(self._status, b"offline"))

    def _next_actions(self) -> core.Actions:
        """What comes next: all that has arrived goes before the end of a thinking time, so that of
        several models that came during training only the newest is trained."""
        until = self._thinking_until
        try:
            event = self._inbox.get(timeout=until and max(0.0, until - time.monotonic()))
        except queue.Empty:
            self._thinking_until = None
            return self._core.thought(time.monotonic())
        match event:
            case Received(_, payload, at):
                return self._core.model(wire.decode_model(payload), at)
            case Reconnected():
                self._say(b"ready")  # the last will has said `offline` meanwhile
        return []

    def _execute(self, actions: core.Actions) -> None:
        for action in actions:
            match action:
                case core.Train(model, sequence):
                    self._train(model, sequence)
                case core.Think(seconds):
                    self._thinking_until = time.monotonic() + seconds
                case core.SendUpdate(update):
                    self._connection.publish(
                        self._topics.update(self._config.client), wire.encode(update)
                    )

    def _train(self, model: wire.ModelMessage, sequence: int) -> None:
        started = time.monotonic()
        result = self._trainer.train(
            model.vector, self._config.kind, self._rng(_TRAINING, sequence), self._stopped.is_set
        )
        if result is None:
            return  # stopped in mid-training
        trained = core.Trained(result.vector, result.steps, result.loss, started, time.monotonic())
        self._execute(self._core.trained(trained))

    def _rng(self, *purpose: int) -> np.random.Generator:
        """The same for the same run seed, client and purpose, whatever happened before."""
        client = zlib.crc32(self._config.client.encode())
        return np.random.default_rng(SeedSequence(self._config.seed, spawn_key=(client, *purpose)))

    def _sink(self, event: Event) -> None:
        """In paho's thread: a stop must be seen in mid-training, when nobody reads the inbox."""
        if isinstance(event, Received) and event.topic == self._topics.request(self._config.client):
            self._stop()
        else:
            self._inbox.put(event)

    def _stop(self) -> None:
        self._stopped.set()
        self._inbox.put(None)  # wakes `run`

    def _say(self, state: bytes) -> None:
        self._connection.publish(self._status, state, retain=True)


def _trainer(cfg: ClientConfig, shard: shards.Shard) -> Trainer:
    """Import torch, build the model, and train once to nowhere: start-up costs come before `ready`."""
    import torch

    from agents.client.training import Trainer

    torch.set_num_threads(cfg.threads)
    trainer = Trainer(TASKS[cfg.task.name](**cfg.task.params), shard, cfg.local)
    trainer.warm_up()
    return trainer


if __name__ == "__main__":
    main()
