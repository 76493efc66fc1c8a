"""MQTT 3.1.1 by paho, and the queue of received messages. Callbacks only pass messages on to a sink."""

from __future__ import annotations

import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import paho.mqtt.client as paho

from agents.config import KEEPALIVE, BrokerAccess
from agents.disturbances import retry
from agents.links import packets
from agents.mqtt import chunks, streaming
from agents.mqtt.chunks import Messages
from agents.mqtt.topics import Topics
from agents.timing.nanoseconds import Nanoseconds

# MQTT 3.1.1 by paho. Callbacks only pass messages on to a sink.
#
# Only this module and `agents.mqtt.streaming` import paho. This module works around these properties of
# paho:
#
# - `connect` blocks. If nothing listens at the address, it raises OSError, but a refused login is
# reported
#   by a callback. Here both raise ConnectionFailedError.
# - paho reconnects by itself but does not subscribe again. So `on_connect` subscribes, unless the broker
#   has kept the session. Then the client's status is published again, because the broker has published
#   the last will.
# - After a reconnect, paho sends unacknowledged messages again only when the broker has answered. New
#   messages could overtake these messages, so new messages are held until the broker has answered the
#   subscription. Recovery relies on this order (docs/concepts/recovery.md).
# - An exception in a callback would end paho's thread silently. So the callbacks raise no exceptions.

_MAX_IN_FLIGHT = 64
"""Messages that were sent to the broker and are not acknowledged yet."""


class ConnectionFailedError(Exception):
    """The text says why the broker cannot be reached or refuses the login."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    topic: str
    payload: bytes | bytearray
    at: Nanoseconds
    """Host's monotonic time at which the whole message had arrived in the kernel."""


class _Patience:
    """Timeout that starts again whenever `moved` changes, unless that is None."""

    def __init__(self, timeout: float, moved: Callable[[], int] | None) -> None:
        self._timeout, self._moved = timeout, moved
        self._last, self._began = 0, time.monotonic()

    def is_over(self) -> bool:
        if self._moved is not None and (now := self._moved()) != self._last:
            self._last, self._began = now, time.monotonic()
        return time.monotonic() >= self._began + self._timeout


class Connection:
    """`sink` gets each message, in paho's thread. While it waits, nothing is read from the connection or
    written to it."""

    def __init__(
        self,
        broker: BrokerAccess,
        subscriptions: Sequence[str],
        sink: Callable[[ReceivedMessage], None],
        *,
        will: tuple[str, bytes] | None = None,
        keepalive: float = KEEPALIVE,
        keeps_session: bool = False,
        largest: Mapping[str, int] = MappingProxyType({}),
        reconnected: Callable[[Nanoseconds], None] | None = None,
    ) -> None:
        """Prepare a connection; `open` opens it.

        `will`: topic and payload of the last will, a retained message, which `close` publishes, or the
        broker, if this process dies or is silent for 1.5 times `keepalive` seconds. A transfer that
        makes progress is no silence.

        `keeps_session`: the broker keeps messages for this client while it is disconnected. `largest`:
        maximum bytes of a payload that is joined from chunks, by kind of topic (`model`, `share`, …).
        Larger ones, and chunks on topics of other kinds, are dropped. `reconnected` is called in paho's
        thread after each reconnect, with the host's monotonic time at which the connection was lost.
        """
        self._broker = broker
        self._subscriptions = [(topic, 1) for topic in subscriptions]
        self._sink = sink
        self._answered = threading.Event()
        self._refusal: str | None = None
        self._will = will
        self._status: tuple[str, bytes] | None = None
        self._keepalive = round(keepalive)
        self._reconnected = reconnected
        self._subscribed = False
        """Confirmed by the broker."""
        self._order = threading.Lock()
        self._held: list[tuple[str, bytes | str, bool]] | None = None
        """Held until all older messages have been sent again; None if messages need not be held."""
        self._lost: Nanoseconds | None = None
        """Host's monotonic time at which the connection was lost; None while connected, and before the
        first connection."""
        self._paho = streaming.StreamingClient(
            chunks.Joiner(lambda topic: largest.get(Topics.split(topic)[0], 0)),
            self._on_payload,
            client_id=broker.username,  # must be unique: the broker ends an older session with this id
            clean_session=not keeps_session,
            protocol=paho.MQTTv311,
            transport="unix" if broker.host.startswith("/") else "tcp",
        )
        if broker.certificate is not None:
            self._paho.tls_set_context(ssl.create_default_context(cadata=broker.certificate))
        self._paho.username_pw_set(broker.username, broker.password)
        self._paho.max_inflight_messages_set(_MAX_IN_FLIGHT)
        self._paho.reconnect_delay_set(min_delay=1, max_delay=2)
        if will is not None:
            self._paho.will_set(will[0], will[1], qos=1, retain=True)
        self._paho.on_pre_connect = self._on_pre_connect
        self._paho.on_connect = self._on_connect
        self._paho.on_disconnect = self._on_disconnect
        self._paho.on_subscribe = self._on_subscribe
        self._paho.on_socket_open = _set_socket_options

    def open(self, timeout: float = 30.0) -> None:
        """`timeout`: seconds within which the broker must answer. Raises ConnectionFailedError."""
        deadline = time.monotonic() + timeout
        host, port = self._broker.host, self._broker.port
        try:
            retry(lambda: self._paho.connect(host, port, self._keepalive), timeout, self._is_late)
        except OSError as error:
            self.close()
            raise ConnectionFailedError(f"cannot reach the broker at {host}:{port}: {error}") from error
        self._paho.loop_start()
        answered = self._answered.wait(max(1.0, deadline - time.monotonic()))
        if not answered or self._refusal is not None:
            self.close()
            reason = self._refusal or "no answer"
            raise ConnectionFailedError(f"the broker did not accept {self._broker.username}: {reason}")

    def _is_late(self, error: OSError) -> None:
        to = f"{self._broker.host}:{self._broker.port}"
        sys.stderr.write(f"{self._broker.username}: no connection to the broker at {to} yet: {error}\n")

    def moved(self, port: int) -> None:
        """The broker has moved. Call this while the connection is lost."""
        self._paho.connect_async(self._broker.host, port, self._keepalive)

    def subscribe_again(self) -> None:
        """Have the broker send all retained messages again, then publish the client's status."""
        self._subscribed = False  # if the connection is lost now, the reconnect subscribes
        self._paho.subscribe(self._subscriptions)

    def publish(
        self, topic: str, payload: bytes | bytearray | str | Messages, *, retain: bool = False
    ) -> None:
        """QoS 1. The order of messages is kept, even after a reconnect. A large payload is sent in
        chunks and cannot be retained."""
        if isinstance(payload, str):
            payload = payload.encode()
        with self._order:
            for chunk in chunks.split(payload) if isinstance(payload, bytes | bytearray) else payload:
                if self._held is None:
                    self._paho.publish(topic, chunk, qos=1, retain=retain)
                else:
                    self._held.append((topic, chunk, retain))

    def publish_status(self, topic: str, payload: bytes) -> None:
        """Retained; now and after each reconnect."""
        self._status = topic, payload
        self.publish(topic, payload, retain=True)

    def publish_lossy(self, topic: str, payload: bytes | str) -> None:
        """QoS 0, for telemetry: a lost message is not sent again."""
        with self._order:
            self._paho.publish(topic, payload, qos=0)

    def close(self, timeout: float = 2.0, *, patient: bool = False) -> None:
        """Publish the last will after all earlier messages, and disconnect.

        After `timeout` seconds, drop the connection; the broker then publishes the last will. If
        `patient`, only after a time without progress: the longer one of `timeout` and the keep-alive.
        """
        patience = _Patience(timeout, None)
        if patient:
            patience = _Patience(max(timeout, self._keepalive), lambda: self._paho.moved)
        if (
            self._will is None
            or not self._paho.is_connected()
            or self._publish_will(self._will, patience)
        ):
            self._paho.disconnect()
        elif (left := self._paho.socket()) is not None:
            with suppress(OSError):
                cast(socket.socket, left).shutdown(socket.SHUT_RDWR)
        self._paho.loop_stop()
        with self._order:
            self._paho.close_sockets()

    def _publish_will(self, will: tuple[str, bytes], patience: _Patience) -> bool:
        """Return whether the broker has acknowledged it."""
        while self._held is not None:  # after a reconnect, held messages are sent first
            if patience.is_over():
                return False
            time.sleep(0.01)
        last = self._paho.publish(*will, qos=1, retain=True)
        with suppress(RuntimeError):  # the connection has just been lost
            while not last.is_published() and not patience.is_over():
                last.wait_for_publish(0.05)
            return last.is_published()
        return False

    def _on_pre_connect(self, _client: paho.Client, _data: Any) -> None:
        with self._order:
            self._held = self._held or []

    def _send_held(self) -> None:
        """All older messages have been sent again after the reconnect."""
        with self._order:
            held, self._held = self._held or [], None
            if self._status is not None:
                self._paho.publish(*self._status, qos=1, retain=True)
            for topic, payload, retain in held:
                self._paho.publish(topic, payload, qos=1, retain=retain)
        self._answered.set()
        lost, self._lost = self._lost, None
        if lost is not None and self._reconnected is not None:
            self._reconnected(lost)

    def _on_connect(
        self, client: paho.Client, _data: Any, flags: Any, reason: Any, _properties: Any
    ) -> None:
        if reason.is_failure:
            self._refusal = str(reason)
            self._answered.set()
            return
        # A new process always subscribes, to receive the retained messages.
        self._subscribed &= flags.session_present
        if self._subscriptions:  # if the broker has kept them, one is repeated to get an answer
            client.subscribe(self._subscriptions[:1] if self._subscribed else self._subscriptions)
        else:
            self._send_held()

    def _on_disconnect(
        self, _client: paho.Client, _data: Any, _flags: Any, _reason: Any, _properties: Any
    ) -> None:
        if self._lost is None:
            self._lost = time.monotonic_ns()

    def _on_subscribe(
        self, _client: paho.Client, _data: Any, _mid: int, reasons: Any, _properties: Any
    ) -> None:
        if any(reason.is_failure for reason in reasons):
            self._refusal = "a subscription is not allowed"
        self._subscribed = True
        self._send_held()  # after the subscription: the status may cause an answer

    def _on_payload(self, topic: str, payload: bytes | bytearray, at: Nanoseconds) -> None:
        self._sink(ReceivedMessage(topic, payload, at))


def _set_socket_options(_client: paho.Client, _data: Any, sock: Any) -> None:
    """Small messages are sent at once, without Nagle's algorithm, and the kernel records arrival
    times."""
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            packets.enable_timestamps(sock)


_OVERHEAD = 512
"""Maximum memory of a message beside its payload, in bytes."""

T = TypeVar("T")
"""Items in the queue that are not messages."""


def take(waiting: queue.SimpleQueue[T], timeout: float | None) -> T:
    """Wait up to `timeout` seconds; None for any time. Raises queue.Empty.

    Up to Python 3.12, `SimpleQueue.get` may wait for ever: if nobody waited when the last item was put,
    and the thread loses its core at the begin of the call for longer than the timeout. Processes that
    are throttled or stopped lose theirs all the time. A failed `get_nowait` prevents this.
    """
    with suppress(queue.Empty):
        return waiting.get_nowait()
    return waiting.get(timeout=timeout)


class Inbox(Generic[T]):
    """Between a connection's thread and the thread that handles messages. While the queue is full
    (`most` bytes), nothing is read from the connection: messages wait at the broker, which also limits
    their number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[ReceivedMessage | T] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        """Bytes of the waiting messages."""
        self._bounded, self._closed = False, False

    def receive(self, message: ReceivedMessage) -> None:
        """Sink of a connection: wait while the queue is full, but not before the first `drain`, when the
        connection is still being opened, and the broker's answer may come after other messages."""
        with self._room:
            self._room.wait_for(lambda: self._waiting < self._most or not self._bounded)
            self._waiting += _size(message)
        if not self._closed:
            self._queue.put(message)

    def put(self, thing: T) -> None:
        """Add an item that is not a message, without waiting. May be called from a signal handler."""
        self._queue.put(thing)

    def drain(self, timeout: float) -> list[ReceivedMessage | T]:
        """All items; wait up to `timeout` seconds for one. Those that arrive during the call may stay in
        the queue."""
        self._bounded = not self._closed
        try:
            taken = [take(self._queue, timeout)]
        except queue.Empty:
            return []
        taken += [self._queue.get() for _ in range(self._queue.qsize())]
        with self._room:
            self._waiting -= sum(_size(each) for each in taken if isinstance(each, ReceivedMessage))
            self._room.notify()
        return taken

    def close(self) -> None:
        """Discard further messages, so that the connection can be closed properly."""
        with self._room:
            self._bounded, self._closed = False, True
            self._room.notify()


def _size(message: ReceivedMessage) -> int:
    return _OVERHEAD + len(message.payload)
