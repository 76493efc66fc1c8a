"""A client of secure aggregation that means harm to the others and to the model, as a process.

    python -m tests.evil_peer CONFIG SECONDS

It has the login and the settings of the client whose configuration CONFIG is, and takes part in the run
as that does. Beside, for so many seconds, it sends what no client sends: messages whose lengths it only
announces, made-up shares, and messages on words of its own; and it answers every request for a sum of
shares with random words.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import numpy as np

from agents import config
from agents.config import ClientConfig
from agents.mqtt import chunks
from agents.mqtt.inbox import take
from agents.mqtt.topics import Topics
from agents.mqtt.transport import Connection, ReceivedMessage
from agents.pipeline.interface import PeerError
from agents.pipeline.secure import secure_messages as secure_wire
from agents.pipeline.secure.field import FIELD
from agents.pipeline.secure.party import Party
from agents.pipeline.secure.step import SecureAggregation
from agents.wire import messages, payloads
from agents.wire.payloads import UpdateMessage


class EvilPeer:
    def __init__(self, cfg: ClientConfig) -> None:
        (params,) = [step.params for step in cfg.setup.steps if step.name == "secure"]
        run, self._name, self._secure = cfg.setup.run, cfg.setup.client, SecureAggregation(**params)
        self._names = Topics(run)
        self._party = Party(run, self._name, self._secure, cfg.parameters)
        self._liar = Party(run, self._name, self._secure, cfg.parameters)
        """Makes up shares, with the keys of the other one."""
        self._liar._channels, self._liar._keys = self._party._channels, self._party._keys
        self._inbox: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
        names = self._names
        subscriptions = [
            *(names.model(self._name), names.request(self._name)),
            *(names.key("+"), names.share(self._name, "+")),
        ]
        self._connection = Connection(cfg.broker, subscriptions, self._inbox.put)
        self._rng = np.random.default_rng(0)
        self._sequence, self._samples = 0, 0
        self._made_up = 10**6

    def run(self, samples: int, seconds: float) -> None:
        self._samples = samples
        self._connection.open()
        self._connection.publish(self._names.key(self._name), self._party.public, retain=True)
        for state in (b"joining", b"ready"):
            self._connection.publish(self._names.status(self._name), state, retain=True)
        until, others = time.monotonic() + seconds, [*self._secure.clients]
        others.remove(self._name)
        while time.monotonic() < until:
            try:
                self._handle(take(self._inbox, 0.02))
            except queue.Empty:
                for other in others:
                    self._attack(other)
        self._connection.publish(self._names.status(self._name), b"offline", retain=True)
        self._connection.close()

    def _attack(self, other: str) -> None:
        topic = self._names.share(other, self._name)
        for size in (2**31, 2**30):
            head = chunks.HEAD.pack(b"testbed\xff", self._made_up, 0, 4096, size)
            self._connection.publish(topic, head)
        word = self._names.share(f"word-{self._made_up}", self._name)
        self._connection.publish(word, bytes(10**5), retain=True)
        for _ in range(5):
            self._made_up += 1
            for name, share in self._liar.prepare(self._made_up):
                self._connection.publish(self._names.share(name, self._name), share)

    def _handle(self, message: ReceivedMessage) -> None:
        kind, name = self._names.split(message.topic)
        try:
            if kind == "key":
                self._party.add_peer(name, bytes(message.payload))
            elif kind == "model":
                self._update(payloads.decode_model(message.payload))
            elif kind == "request":
                self._answer(messages.decode(self._names, message.topic, message.payload))
        except PeerError:
            pass

    def _update(self, model: payloads.ModelMessage) -> None:
        """Send a valid update of zeros."""
        now = time.monotonic_ns()
        for name, share in self._party.prepare(model.dispatch):
            self._connection.publish(self._names.share(name, self._name), share)
        self._sequence += 1
        zeros = np.zeros(model.vector.size, np.float32)
        update = UpdateMessage(
            run=self._names.run,
            client=self._name,
            sequence=self._sequence,
            dispatch=model.dispatch,
            base_version=model.version,
            schema=model.schema,
            kind="delta",
            samples=self._samples,
            steps=1,
            effective_steps=1.0,
            loss=1.0,
            downloaded=now,
            train_start=now,
            train_end=now,
            sent=now,
            vector=np.zeros(0, np.float32),
            encoded=self._party.masked(model.dispatch, zeros, self._rng).encoded,
        )
        self._connection.publish(self._names.update(self._name), payloads.encode(update))

    def _answer(self, request: messages.Message) -> None:
        """Answer with a wrong sum of shares."""
        if isinstance(request, messages.UnmaskRequest):
            words = self._rng.integers(0, FIELD.p, self._party.code.length).astype(np.uint32)
            answer = secure_wire.encode_sum(request.number, words)
            self._connection.publish(self._names.sums(self._name), answer)


def main() -> None:
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    aggregator = config.load(config.AggregatorConfig, path.with_name("aggregator.json"))
    peer = EvilPeer(cfg := config.load(ClientConfig, path))
    peer.run(aggregator.samples[cfg.setup.client], seconds)


if __name__ == "__main__":
    main()
