"""Messages of the core, with their topics, until the inputs that caused them are on the disk
(docs/concepts/durability.md)."""

from __future__ import annotations

from collections.abc import Iterable

from agents.aggregator import actions as act
from agents.mqtt import chunks
from agents.mqtt.topics import Topics
from agents.rules.interface import RequestUpdate, Server, Vectors
from agents.wire import messages, payloads

Requested = (
    RequestUpdate | act.AskForReport | act.AskForUnacknowledged | act.AskForShares | act.Acknowledge
)
"""Sent on a client's request topic."""
Message = tuple[str, bytes | chunks.Messages]
_Request = messages.Request | messages.ReportRequest | messages.UnmaskRequest | messages.Acknowledgement


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
        match action:
            case act.Acknowledge(client, number):
                request: _Request = messages.Acknowledgement(client, number)
            case RequestUpdate(client, what):
                request = messages.Request(client, what)
            case act.AskForReport(client, about):
                request = messages.ReportRequest(client, about)
            case act.AskForUnacknowledged(client):
                request = messages.ReportRequest(client, 0)
            case act.AskForShares(client, number, updates):
                request = messages.UnmaskRequest(client, number, updates)
        self.waiting.append((self._topics[client][1], messages.encode(request)))

    def stop(self, client: str) -> None:
        stop = messages.encode(messages.Request(client, "stop"))
        self.waiting.append((self._topics[client][1], stop))

    def take(self) -> list[Message]:
        taken, self.waiting = self.waiting, []
        return taken
