"""What the aggregator's core wants sent, as messages on their topics.

They wait here until the inputs that they follow from are on the disk (docs/concepts/durability.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from agents.aggregator import actions as act
from agents.mqtt import chunks
from agents.mqtt.topics import Topics
from agents.mqtt.transport import Connection
from agents.rules.interface import Request, Server
from agents.wire import messages, payloads

Requested = Request | act.AskForReport | act.AskForUnacknowledged | act.AskForShares | act.Acknowledge
"""Actions that are messages on a client's topic of requests."""
_Request = messages.Request | messages.ReportRequest | messages.UnmaskRequest | messages.Acknowledgement


class Outbox:
    def __init__(self, names: Topics, clients: Iterable[str], schema: str, server: Server) -> None:
        """`schema` is the hash of the model's schema."""
        self._run, self._broadcast = names.run, names.broadcast
        self._topics = {client: (names.model(client), names.request(client)) for client in clients}
        """By client: topics of its models and of its requests."""
        self._schema = schema
        self._server = server
        self.waiting: list[tuple[str, bytes | chunks.Messages]] = []
        """Topic and payload of each message, in order."""
        self._body: tuple[int, chunks.Body] | None = None
        """The newest version that was sent, and its body, which all dispatches of it share."""

    def add_model(self, action: act.Dispatch | act.Broadcast) -> None:
        """Add the model as it is now: it is copied, as the rule changes it in place."""
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
        if self._body is None or self._body[0] != action.version:
            self._body = None  # not two at once
            self._body = action.version, chunks.cut([bytes(view) for view in views])
        topic = self._broadcast if isinstance(action, act.Broadcast) else self._topics[action.client][0]
        self.waiting.append((topic, chunks.chunk_messages(head, self._body[1])))

    def add(self, action: Requested) -> None:
        """Add a request or an acknowledgement."""
        match action:
            case act.Acknowledge(client, number):
                request: _Request = messages.Acknowledgement(client, number)
            case Request(client, what):
                request = messages.Request(client, what)
            case act.AskForReport(client, about):
                request = messages.ReportRequest(client, about)
            case act.AskForUnacknowledged(client):
                request = messages.ReportRequest(client, 0)
            case act.AskForShares(client, number, updates):
                request = messages.UnmaskRequest(client, number, updates)
        self.waiting.append((self._topics[client][1], messages.encode(request)))

    def stop(self, client: str) -> None:
        """Add the message that ends `client`."""
        stop = messages.encode(messages.Request(client, "stop"))
        self.waiting.append((self._topics[client][1], stop))

    def send(self, connection: Connection) -> None:
        """Publish all messages that wait, in order."""
        for topic, payload in self.waiting:
            connection.publish(topic, payload)
        self.waiting.clear()
