"""Messages of the aggregator: those that its core sends, with their topics, and protection against
floods of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agents.aggregator import actions as act
from agents.mqtt import chunks
from agents.mqtt.rate_limit import RateLimit
from agents.mqtt.topics import Topics
from agents.rules.interface import RequestUpdate, Server, Vectors
from agents.wire import messages, payloads

Requested = RequestUpdate | messages.ReportRequest | messages.UnmaskRequest | messages.Acknowledgement
"""Sent on a client's request topic."""
Message = tuple[str, bytes | chunks.Messages]


class PendingMessages:
    """`schema`: hash of the model's schema."""

    def __init__(self, names: Topics, clients: Iterable[str], schema: str, server: Server) -> None:
        self._run, self._broadcast = names.run, names.broadcast
        self._topics = {client: (names.model(client), names.request(client)) for client in clients}
        """Topics of each client's models and requests."""
        self._schema = schema
        self._server = server
        self.waiting: list[Message] = []
        """Messages in order."""
        self._copied: tuple[int, list[bytes]] | None = None
        """Newest version that was sent, and copies of its parameters and buffers."""
        self._body: tuple[Vectors | None, chunks.Body] | None = None
        """The rule's own vectors, and the message body, of the last dispatch of the version in
        `_copied`: dispatches with the same vectors share the body."""

    def add_model(self, action: act.Dispatch | act.BroadcastModel) -> None:
        """The model is copied, because the rule changes it in place; its own vectors are not, because
        nothing changes them any more."""
        message = payloads.ModelMessage(
            run=self._run,
            version=action.version,
            dispatch=action.number,
            schema=self._schema,
            vector=self._server.w,
            buffers=self._server.buffers,
            **action.to_client,
        )
        head, *views = payloads.lay_out(message)
        own = message.vectors or None
        after = 1 + len(message.vectors)
        if self._copied is None or self._copied[0] != action.version:
            self._copied = self._body = None  # frees the old copies before the new ones are made
            self._copied = action.version, [bytes(v) for v in (views[0], *views[after:])]
        if self._body is None or self._body[0] is not own:
            first, *buffers = self._copied[1]
            self._body = own, chunks.cut([first, *views[1:after], *buffers])
        topic = (
            self._broadcast if isinstance(action, act.BroadcastModel) else self._topics[action.client][0]
        )
        self.waiting.append((topic, chunks.chunk_messages(head, self._body[1])))

    def add(self, action: Requested) -> None:
        request = (
            messages.Request(action.client, action.what) if isinstance(action, RequestUpdate) else action
        )
        self.waiting.append((self._topics[action.client][1], messages.encode(request)))

    def stop(self, client: str) -> None:
        stop = messages.encode(messages.Request(client, "stop"))
        self.waiting.append((self._topics[client][1], stop))

    def take(self) -> list[Message]:
        taken, self.waiting = self.waiting, []
        return taken


# Protection of the aggregator against clients that flood it with messages. No I/O and no clock.
#
# The broker delivers all messages to the aggregator in one queue, so a flood delays all other clients.
# Excess messages are refused before they are decoded. If a client continues, it is shut out, and the
# controller ends its process.

_MESSAGE_RATE = 100, 10.0
"""For messages other than the answers that a client owes: maximum at once, and per host second."""
_FLOOD_MESSAGES = 1000
"""Excess messages after which a client counts as flooding."""
_MAX_ASKED = 256
"""Answers that a client may owe; some never come."""
_TRICKLE_MESSAGES = 10
"""A flood is over when shut-out clients have sent fewer messages between two checks. Above 1 because a
restarting client sends a few status messages."""


class FloodGuard:
    def __init__(self) -> None:
        self._rate_limit = RateLimit(*_MESSAGE_RATE)
        self._asked: Counter[str] = Counter()
        """Answers that each client owes."""
        self._shut_out: set[str] = set()
        self._since_look = 0
        self._refused = 0
        """Messages of shut-out clients in the present flood."""
        self._flooded = False

    def expect_answer(self, client: str) -> None:
        """The answer will not count towards the flood limit."""
        if self._asked[client] < _MAX_ASKED:
            self._asked[client] += 1

    def passes(self, sender: str, at: float, *, is_answer: bool = False) -> bool:
        """`at`: the host's clock in seconds."""
        if sender in self._shut_out:
            self._since_look += 1
            self._refused += 1
            return False
        if is_answer and self._asked[sender]:
            self._asked[sender] -= 1
            return True
        return self._rate_limit.admits(sender, at)

    def is_flooding(self, sender: str) -> bool:
        """False once the sender is shut out."""
        return sender not in self._shut_out and self._rate_limit.refused[sender] >= _FLOOD_MESSAGES

    def shut_out(self, sender: str) -> None:
        self._shut_out.add(sender)
        self._flooded = True

    def readmit(self, sender: str) -> bool:
        """The sender's process was restarted. Return whether it was shut out."""
        if sender not in self._shut_out:
            return False
        self._shut_out.remove(sender)
        self._rate_limit.forget(sender)
        del self._asked[sender]
        return True

    def end_of_flood(self) -> int | None:
        """Messages refused during a flood that has ended since the last call, as shut-out clients have
        sent almost none; else None."""
        few, self._since_look = self._since_look < _TRICKLE_MESSAGES, 0
        if not (self._flooded and few):
            return None
        refused, self._refused, self._flooded = self._refused, 0, False
        return refused
