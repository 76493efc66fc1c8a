"""MQTT 3.1.1 through paho, and nothing else of it: callbacks only pass messages on, to a queue's put.

Beside `agents.mqtt.streaming` this is the only module that imports paho. Its quirks, met here:

- `connect` blocks and raises OSError where nobody listens, while a refused login is a callback: both
  become ConnectionFailedError.
- paho reconnects by itself but does not subscribe again: `on_connect` does, unless the broker has kept
  our session. It also publishes our status again, as the broker has published the last will meanwhile.
- After a reconnect paho sends again what was not acknowledged, but only once the broker has answered;
  what is published before that would overtake it. So it is held until the broker has answered what we
  send after that. Recovery relies on the order (docs/concepts/recovery.md).
- A callback that raises would end paho's thread silently: ours do nothing that can raise.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import paho.mqtt.client as paho

from agents.config import KEEPALIVE, Broker
from agents.links import packet_times
from agents.mqtt import chunks, streaming
from agents.mqtt.chunks import Messages
from agents.mqtt.retry import retry
from agents.mqtt.topics import Topics
from agents.timing.nanoseconds import Nanoseconds

_MAX_IN_FLIGHT = 64
"""Messages under way to the broker."""


class ConnectionFailedError(Exception):
    """The broker cannot be reached, or refuses us."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message; `at` is the host's monotonic time when all of it had arrived, as the kernel saw it."""

    topic: str
    payload: bytes | bytearray
    at: Nanoseconds


class _Patience:
    """A timeout in seconds, which begins again whenever `moved` has another value."""

    def __init__(self, timeout: float, moved: Callable[[], int] | None) -> None:
        self._timeout, self._moved = timeout, moved
        self._last, self._began = 0, time.monotonic()

    def is_over(self) -> bool:
        if self._moved is not None and (now := self._moved()) != self._last:
            self._last, self._began = now, time.monotonic()
        return time.monotonic() >= self._began + self._timeout


class Connection:
    """One MQTT connection. Messages go to `sink`, called in paho's thread: while that waits, nothing is
    read from the connection, and nothing sent."""

    def __init__(
        self,
        broker: Broker,
        subscriptions: Sequence[str],
        sink: Callable[[Received], None],
        *,
        will: tuple[str, bytes] | None = None,
        keepalive: float = KEEPALIVE,
        keeps_session: bool = False,
        largest: Mapping[str, int] = MappingProxyType({}),
        reconnected: Callable[[Nanoseconds], None] | None = None,
    ) -> None:
        """`will`: topic and payload of our last retained message. `close` publishes it, or the broker,
        where we end without that or are silent for one and a half times `keepalive` seconds. A transfer
        that progresses is no silence.

        `keeps_session`: the broker keeps for us what is published while we are away. `largest`: bytes of
        what is put together of chunks, at most, by kind of topic (`model`, `share`, …); what is larger,
        or of another kind, is dropped. `reconnected` is called like `sink`, with the host's monotonic
        time of the loss, once a connection that was lost is there again.
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
        """Whether the broker, as far as we know, has our subscriptions."""
        self._order = threading.Lock()
        self._held: list[tuple[str, bytes | str, bool]] | None = None
        """What is published before all that is older has been sent again; None: nothing is held."""
        self._lost: Nanoseconds | None = None
        """When the connection was lost; None while it is there, and before it was."""
        self._paho = streaming.Client(
            chunks.Joiner(lambda topic: largest.get(Topics.kind_in(topic), 0)),
            self._on_payload,
            client_id=broker.username,  # as no other's: the broker ends a session for one of its id
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
        self._paho.on_socket_open = _prompt

    def open(self, timeout: float = 30.0) -> None:
        """Connect and subscribe; `timeout` in seconds. Raises ConnectionFailedError."""
        deadline = time.monotonic() + timeout
        host, port = self._broker.host, self._broker.port
        try:
            retry(lambda: self._paho.connect(host, port, self._keepalive), timeout)
        except OSError as error:
            raise ConnectionFailedError(f"no broker at {host}:{port}: {error}") from error
        self._paho.loop_start()
        answered = self._answered.wait(max(1.0, deadline - time.monotonic()))
        if not answered or self._refusal is not None:
            self.close()
            reason = self._refusal or "no answer"
            raise ConnectionFailedError(f"the broker refused {self._broker.username}: {reason}")

    def moved(self, port: int) -> None:
        """The broker, to which the connection is lost, is to be found at `port` from now on."""
        self._paho.connect_async(self._broker.host, port, self._keepalive)

    def subscribe_again(self) -> None:
        """Have the broker send the retained messages once more; then our status is published again."""
        self._subscribed = False  # where the connection is lost just now, the next one does it
        self._paho.subscribe(self._subscriptions)

    def publish(
        self, topic: str, payload: bytes | bytearray | str | Messages, *, retain: bool = False
    ) -> None:
        """Hand over a payload, in one piece or as the messages that carry it, with QoS 1; it is sent in
        order, also after a reconnect. Of a large one, which goes in chunks, none can be retained."""
        if isinstance(payload, str):
            payload = payload.encode()
        with self._order:
            for chunk in chunks.split(payload) if isinstance(payload, bytes | bytearray) else payload:
                if self._held is None:
                    self._paho.publish(topic, chunk, qos=1, retain=retain)
                else:
                    self._held.append((topic, chunk, retain))

    def publish_status(self, topic: str, payload: bytes) -> None:
        """Publish a retained message, now and after each reconnect."""
        self._status = topic, payload
        self.publish(topic, payload, retain=True)

    def publish_lossy(self, topic: str, payload: bytes | str) -> None:
        """Hand over a message of QoS 0: telemetry, which is not worth a retransmission."""
        with self._order:
            self._paho.publish(topic, payload, qos=0)

    def close(self, timeout: float = 2.0, *, patient: bool = False) -> None:
        """Publish the last will, after what was published before, and disconnect in order. Where that
        takes more than `timeout` seconds (if `patient`: where nothing gets through for as long as the
        keep-alive), the connection is dropped, upon which the broker publishes the will."""
        patience = _Patience(timeout, None)
        if patient:
            patience = _Patience(max(timeout, self._keepalive), lambda: self._paho.moved)
        if self._will is None or not self._paho.is_connected() or self._told(self._will, patience):
            self._paho.disconnect()
        elif (left := self._paho.socket()) is not None:
            with suppress(OSError):
                cast(socket.socket, left).shutdown(socket.SHUT_RDWR)
        self._paho.loop_stop()
        with self._order:
            self._paho.close_sockets()

    def _told(self, will: tuple[str, bytes], patience: _Patience) -> bool:
        """Publish `will`; whether the broker has it."""
        while self._held is not None:  # the connection is new, and something may have to go first
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

    def _in_order_again(self) -> None:
        """All that was published before the connection was lost has been sent again."""
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
        # A new process subscribes in any case: that brings it the retained messages.
        self._subscribed &= flags.session_present
        if self._subscriptions:  # where the broker has them, one for its answer alone
            client.subscribe(self._subscriptions[:1] if self._subscribed else self._subscriptions)
        else:
            self._in_order_again()

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
        self._in_order_again()  # now, as our status may bring an answer

    def _on_payload(self, topic: str, payload: bytes | bytearray, at: Nanoseconds) -> None:
        self._sink(Received(topic, payload, at))


def _prompt(_client: paho.Client, _data: Any, sock: Any) -> None:
    """Small messages (status, acknowledgements) do not wait for Nagle's algorithm; and it is known when
    one arrived, however late it is read."""
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            packet_times.timestamp(sock)
