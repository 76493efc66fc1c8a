"""Broker of a run on hosts without Mosquitto: amqtt in a separate process.

Run as `python -m testbed.broker.embedded CONFIG.json`; it serves until it is killed. The broker enforces
the same accounts and rights as Mosquitto, but has a fraction of Mosquitto's throughput. It limits the
size of a packet, but not the messages queued for a connection.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed import broker
from testbed.broker import Account, is_password, read_embedded

broker.use_amqtt_folder()

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.errors import NoDataError
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler
from amqtt.utils import gen_client_id

_LOG = logging.getLogger(__name__)
_OF_A_CONNECTION = (
    *("will_flag", "will_message", "will_topic", "will_qos", "will_retain"),
    *("username", "password", "keep_alive", "clean_session"),
)
"""Fields that a kept session takes from a new connection of the same client."""


class _BoundedReader(StreamReaderAdapter):  # type: ignore[misc]  # amqtt is not typed
    """Ends like a closed connection if a packet has more than `most` bytes."""

    def __init__(self, reader: asyncio.StreamReader, most: int) -> None:
        super().__init__(reader)
        self._most, self._ended = most, False

    async def read(self, n: int = -1) -> bytes:
        self._ended = self._ended or n > self._most
        if self._ended:
            raise NoDataError("No data: a packet that is too large")
        data: bytes = await super().read(n)
        return data


class _ClientHandler(BrokerProtocolHandler):  # type: ignore[misc]  # amqtt is not typed
    """Closes the connection of a client that is silent for longer than its keep-alive. amqtt's own
    handler would wait forever."""

    def handle_read_timeout(self) -> None:
        self._given_up = asyncio.ensure_future(self.handle_connection_closed())

    async def handle_publish(self, packet: Any) -> None:
        """Handle a message. One of a QoS that does not exist closes the connection; amqtt's own handler
        would fail in a task that nobody awaits."""
        await (self.handle_connection_closed() if packet.qos > 2 else super().handle_publish(packet))


class RunBroker(Broker):  # type: ignore[misc]  # amqtt is not typed
    """amqtt with the accounts of a run instead of plugins.

    amqtt calls plugins in tasks. If another client connects or leaves meanwhile, amqtt's loop over the
    subscriptions fails ("dictionary changed size"), and the remaining subscribers miss the message.
    amqtt also does not check rights for last wills and retained messages. Therefore this class overrides
    amqtt's methods. If a later version of amqtt no longer calls these methods, amqtt's own
    `_authenticate` refuses every client, because there is no plugin.
    """

    def __init__(
        self, listeners: Mapping[str, Any], packet: int, accounts: Mapping[str, Account]
    ) -> None:
        """`listeners`: in amqtt's format. `packet`: maximum bytes. `accounts`: with password hashes
        instead of passwords."""
        self._packet, self._accounts = packet, accounts
        super().__init__({"listeners": dict(listeners), "plugins": {}})

    async def _initialize_client_session(
        self, reader: Any, writer: Any, _address: str, _port: int
    ) -> tuple[BrokerProtocolHandler, Any]:
        """The session has the name of the login. amqtt itself would use the client id that the client
        sends, and would end or hand over the session of that id before it checks the password."""
        handler, session = await _ClientHandler.init_from_connect(reader, writer, self.plugins_manager)
        session.keep_alive = round(1.5 * session.keep_alive)
        known = self._is_known(session)
        session.client_id = session.username if known else gen_client_id()
        session.parent = 0
        if session.clean_session or not known:
            session.clean_session = True
            await self._delete_session(session.client_id)
        elif session.client_id in self._sessions:
            kept, _ = self._sessions[session.client_id]
            for name in _OF_A_CONNECTION:
                setattr(kept, name, getattr(session, name))
            kept.parent = 1
            return handler, kept
        return handler, session

    def _is_known(self, session: Any) -> bool:
        account = self._accounts.get(session.username or "")
        return account is not None and is_password(session.password or "", account.password)

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        bounded = _BoundedReader(reader, self._packet)
        try:
            await self.external_connected(bounded, StreamWriterAdapter(writer), listener_name)
        except ConnectionError:  # a refused client may close the connection first
            pass
        finally:
            writer.close()  # amqtt leaves it open after a CONNECT that it cannot read

    async def _authenticate(self, session: Any, _: Any) -> bool:
        if not self._is_known(session):
            session.username = "?"
            return _refuse(session, "log in")
        if session.will_flag and not self._accounts[session.username].may_publish(session.will_topic):
            return _refuse(session, "leave a will on", session.will_topic)
        return True

    async def _topic_filtering(self, session: Any, topic: str, action: Action) -> bool:
        account = self._accounts.get(session.username or "")
        if account is None:
            return False
        if action is Action.PUBLISH:
            return account.may_publish(topic) or _refuse(session, "publish", topic)
        if action is Action.SUBSCRIBE:
            return account.may_read(topic) or _refuse(session, "read", topic)
        return account.may_read(topic)

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Any
    ) -> None:
        """Send retained messages only to the session that subscribed. amqtt calls this method at a
        SUBSCRIBE, but also at each login, for every subscription of *every* session."""
        subscribers = self._subscriptions.get(subscription[0], [])
        if any(subscriber is session for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)


def _refuse(session: Any, what: str, topic: str = "") -> bool:
    _LOG.warning("Refused: %.80r may not %s %.200r", session.username, what, topic)
    return False


async def serve(listeners: Mapping[str, Any], packet: int, accounts: Mapping[str, Account]) -> None:
    """Run until the task is cancelled."""
    await RunBroker(listeners, packet, accounts).start()
    print("listening", flush=True)  # noqa: T201  # stdout is the log
    await asyncio.Event().wait()


def worth_logging(record: logging.LogRecord) -> bool:
    """Port probes, and late acknowledgements of slow devices, are no faults."""
    late = record.exc_info is not None and isinstance(record.exc_info[1], TimeoutError)
    return not (late or any(phrase in record.getMessage() for phrase in ("No data", "PUBACK")))


def main(config: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger().handlers[0].addFilter(worth_logging)
    asyncio.run(serve(*read_embedded(Path(config))))


if __name__ == "__main__":
    main(sys.argv[1])
