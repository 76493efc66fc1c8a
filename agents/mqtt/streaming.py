"""paho's client, but large messages go straight from the socket to where they stay, and from there back.

paho copies what it receives as it comes, to put it together, and three times to take the packet apart;
and what it sends, and of that all that is left whenever the socket has taken some. For models of
megabytes that is most of what a message costs a process. By paho's public interface alone (`on_message`
and `publish`) an update of 2.2 MB each way took 1.33 times the CPU time of all processes (1.17 to 1.48,
three turns of `benchmarks.endtoend` with `durability: none` on a busy host), a client's process had
10 MB more, and there was no way to learn when a message arrived in the kernel, or to take a transfer for
a sign of life.

Beside `agents.mqtt.transport` this is the only module that knows paho, and the only one that knows its
inside: `_in_packet`, the packet that is being read, and the methods that are replaced here
(paho-mqtt 2.1 and 2.2; tests hold it).
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MessageType, MQTTErrorCode

from agents.config import PROGRESS_BYTES
from agents.links import packet_times
from agents.mqtt import chunks
from agents.timing.nanoseconds import Nanoseconds

_LARGE = 2**15
"""Bytes of a packet from which on it is handled here."""
_BEGINNING = 1024
"""Bytes of it that are read first: topic, identifier and the head of a chunk. As many are sent first."""
_AT_ONCE = 2**14
"""Bytes of it that wake paho's thread: on a slow link each packet would (docs/concepts/cpu.md)."""
_TWO_BYTES = struct.Struct("!H")
_FLAGS, _QOS_1 = 0x0B, 0x02
"""Bits of a message's first byte: repeated, retained and QoS 1; and the latter."""

Sink = Callable[[str, bytes | bytearray, Nanoseconds], None]


@dataclass(slots=True)
class _Arriving:
    """A large packet."""

    packet: Any
    """paho's own record of it: a new one for each packet and each connection."""
    left: int
    """Bytes to come."""
    place: memoryview
    """Where to put what comes next."""
    topic: str | None = None
    """Known once its beginning is there."""
    identifier: int | None = None
    """Of QoS 1."""
    payload: bytearray | None = None
    """All of it, where it is no chunk."""
    share: int | None = None
    """Bytes of a chunk that is wanted."""


class Client(paho.Client):
    """`joiner` puts chunks together. Payloads, of large messages and small, go to `sink` with their
    topic and the host's monotonic time when all of it had arrived; it is called in paho's thread.
    `options` are paho's own."""

    def __init__(self, joiner: chunks.Joiner, sink: Sink, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, **options)
        self._joiner, self._sink = joiner, sink
        self._arriving: _Arriving | None = None
        self._arrived_at: Nanoseconds = 0
        """When all that is being read had arrived."""
        self._left_to_paho: object = None
        """Its record of a large packet that is none of ours."""
        self._moved = 0
        """Bytes that the connection had moved when the last ping was sent."""
        self.on_message = self._on_small

    def loop_stop(self) -> MQTTErrorCode:
        """As paho's, which fails where its thread ends by itself just then."""
        thread, self._thread_terminate = self._thread, True
        if thread is not None:
            thread.join()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def close_sockets(self) -> None:
        """Once the loop has stopped: the two that wake it, too. paho closes these only when it is
        deleted, and the garbage collector may delete them first. Nothing may be published meanwhile."""
        self._reset_sockets()

    @property
    def moved(self) -> int:
        """Bytes that the other side has acknowledged, and sent, on this connection; 0 where the kernel
        does not say."""
        sock = self._sock
        return 0 if sock is None else packet_times.moved(cast(Any, sock))

    def _send_pingreq(self) -> MQTTErrorCode:
        self._moved = self.moved
        return super()._send_pingreq()

    def _check_keepalive(self) -> None:
        """Do as paho does, but take a transfer that progresses for a sign of life: a ping waits behind
        what is under way, and so does its answer."""
        overdue = self._ping_t and time.monotonic() - self._ping_t >= self._keepalive
        if overdue and self.moved - self._moved >= PROGRESS_BYTES:
            self._ping_t = 0.0  # so the next one is sent, as the broker expects
        super()._check_keepalive()

    def _on_small(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        self._take(message.topic, self._joiner.add(message.topic, bytes(message.payload)))

    def _take(self, topic: str, payload: bytes | bytearray | None) -> None:
        if payload is not None:
            self._sink(topic, payload, self._arrived_at)

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._is_large(bufsize):
            raise BlockingIOError  # to get back to `_packet_read`
        return super()._sock_recv(bufsize)

    def _is_large(self, left: int) -> bool:
        """Whether the packet that arrives is a message that has so many bytes `left`, and is ours."""
        packet = self._in_packet
        is_message = packet["command"] & ~_FLAGS == MessageType.PUBLISH
        return left >= _LARGE and is_message and packet is not self._left_to_paho

    def _packet_read(self) -> MQTTErrorCode:
        sock = self._sock
        self._arrived_at = (
            time.monotonic_ns() if sock is None else packet_times.of_waiting(cast(Any, sock))
        )
        code = super()._packet_read()
        packet = self._in_packet
        if code != MQTTErrorCode.MQTT_ERR_AGAIN or not self._is_large(packet["to_process"]):
            return code
        if self._arriving is None or self._arriving.packet is not packet:
            self._arriving = _Arriving(packet, packet["to_process"], memoryview(bytearray(_BEGINNING)))
        try:
            return self._read_on(self._arriving)
        except (BlockingIOError, ssl.SSLWantReadError):
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except ssl.SSLWantWriteError:
            self._call_socket_register_write()
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except (OSError, AttributeError):  # the latter: it was closed meanwhile
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        finally:
            with self._msgtime_mutex:
                self._last_bytes_received = time.monotonic()

    def _read_on(self, arriving: _Arriving) -> MQTTErrorCode:
        """Read what there is of the packet. Raises OSError where there is no more."""
        sock: socket.socket = cast(Any, self._sock)
        while arriving.left:
            try:
                count = sock.recv_into(arriving.place)
            except BlockingIOError:  # not of TLS, which alone knows how many bytes are to come
                _wake_at(sock, min(arriving.left, _AT_ONCE))
                raise
            if not count:
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
            arriving.left -= count
            arriving.place = arriving.place[count:]
            if arriving.topic is None and not arriving.place:
                self._begin(arriving)
                if arriving.topic is None:
                    _wake_at(sock, 1)
                    return MQTTErrorCode.MQTT_ERR_AGAIN
        _wake_at(sock, 1)
        return self._arrived(arriving)

    def _begin(self, arriving: _Arriving) -> None:
        """The beginning of the packet is there: find out what it is, and where the rest goes."""
        beginning: bytearray = cast(Any, arriving.place.obj)
        (length,) = _TWO_BYTES.unpack_from(beginning)
        at = _TWO_BYTES.size + length
        if at + _TWO_BYTES.size + chunks.HEAD.size > len(beginning):  # a topic as none of ours
            self._left_to_paho = arriving.packet
            arriving.packet["packet"] += beginning
            arriving.packet["to_process"] = arriving.left
            return
        topic = beginning[_TWO_BYTES.size : at].decode(errors="replace")
        if arriving.packet["command"] & _QOS_1:
            (arriving.identifier,) = _TWO_BYTES.unpack_from(beginning, at)
            at += _TWO_BYTES.size
        if chunks.is_chunk(beginning[at:]):
            head, at = bytes(beginning[at : at + chunks.HEAD.size]), at + chunks.HEAD.size
            share = len(beginning) - at + arriving.left
            place = self._joiner.place(topic, head, share)
            arriving.share = None if place is None else share
            place = memoryview(bytearray(share)) if place is None else place
        else:
            arriving.payload = bytearray(len(beginning) - at + arriving.left)
            place = memoryview(arriving.payload)
        there = len(beginning) - at
        place[:there] = memoryview(beginning)[at:]
        arriving.topic, arriving.place = topic, place[there:]

    def _arrived(self, arriving: _Arriving) -> MQTTErrorCode:
        """All of the packet is there."""
        self._arriving = None
        self._in_packet = {  # as paho does after each
            "command": 0, "have_remaining": 0, "remaining_count": [], "remaining_mult": 1,
            "remaining_length": 0, "packet": bytearray(), "to_process": 0, "pos": 0,
        }  # fmt: skip
        if arriving.topic is not None:
            payload = arriving.payload
            if arriving.share is not None:
                payload = self._joiner.filled(arriving.topic, arriving.share)
            self._take(arriving.topic, payload)
        if arriving.identifier is None:
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        return self._send_puback(arriving.identifier)

    def _send_publish(
        self,
        mid: int,
        topic: bytes,
        payload: bytes | bytearray = b"",
        qos: int = 0,
        retain: bool = False,  # noqa: FBT001, FBT002
        dup: bool = False,  # noqa: FBT001, FBT002
        info: paho.MQTTMessageInfo | None = None,
        properties: Any = None,
    ) -> MQTTErrorCode:
        share = payload.share if isinstance(payload, chunks.Chunk) else memoryview(payload)
        head = payload if isinstance(payload, chunks.Chunk) else b""
        if self._sock is None or qos != 1 or (not head and len(share) < _LARGE):
            return super()._send_publish(mid, topic, payload, qos, retain, dup, info, properties)
        packet = bytearray([MessageType.PUBLISH | dup << 3 | _QOS_1 | retain])
        left = 2 * _TWO_BYTES.size + len(topic) + len(head) + len(share)
        self._pack_remaining_length(packet, left)
        packet += _TWO_BYTES.pack(len(topic)) + topic + _TWO_BYTES.pack(mid)
        packet += head + share[:_BEGINNING]
        pieces = filter(len, (packet, share[_BEGINNING:]))  # of a view, what is left is no copy
        self._out_packet.extend(  # both at once: other threads send, too
            [
                {"command": MessageType.PUBLISH, "mid": mid, "qos": qos, "pos": 0, "info": None,
                 "to_process": len(piece), "packet": cast(Any, piece)}
                for piece in pieces
            ]
        )  # fmt: skip
        with suppress(BlockingIOError):
            cast(Any, self._sockpairW).send(b"0")  # wakes paho's thread
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def _wake_at(sock: socket.socket, count: int) -> None:
    """Let `sock` be readable once `count` bytes are there, or the connection is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
