"""paho's client, changed so that large messages are received and sent without being copied.

paho copies a received packet several times to assemble and parse it. It copies the unsent rest of a
packet whenever the socket has accepted a part of the packet. For models of megabytes, these copies take
most of a message's CPU time. With only paho's public interface (`on_message`, `publish`), a round with
2.2 MB in each direction took 1.33 times the CPU time, over all processes (1.17 to 1.48, three runs of
`benchmarks.endtoend` with `durability: none` on a busy host). A client's process needed 10 MB more
memory. Neither the arrival time in the kernel nor the progress of a transfer was known.

Only this module and `agents.mqtt.transport` import paho, and only this module uses paho's internals:
`_in_packet`, which is the packet that is being read, and the overridden methods. Tests check these
internals for paho-mqtt 2.1 and 2.2.
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
from agents.links import packets
from agents.mqtt import chunks
from agents.timing.nanoseconds import Nanoseconds

_LARGE = 2**15
"""Minimum length in bytes of a packet that is handled here instead of by paho."""
_BEGINNING = 1024
"""Bytes of a large packet that are read first, with the topic, the identifier and the head of a chunk,
and payload bytes that are sent with a packet's head."""
_AT_ONCE = 2**14
"""Received bytes of a large packet after which paho's thread wakes up. Otherwise each IP packet of a
slow link would wake it (docs/concepts/cpu.md)."""
_TWO_BYTES = struct.Struct("!H")
_FLAGS, _QOS_1 = 0x0B, 0x02
"""Bits of a message's first byte: all flags (repeated, retained, QoS 1), and only QoS 1."""

Sink = Callable[[str, bytes | bytearray, Nanoseconds], None]


@dataclass(slots=True)
class _Arriving:
    packet: Any
    """paho's own record, a new one for each packet and connection."""
    left: int
    """Bytes that have not arrived yet."""
    place: memoryview
    """Memory for the next bytes."""
    topic: str | None = None
    """None until the beginning of the packet has arrived."""
    identifier: int | None = None
    """None if the QoS is not 1."""
    payload: bytearray | None = None
    """None for a chunk."""
    share: int | None = None
    """Payload bytes in a chunk that the joiner accepts; None for any other message."""


class StreamingClient(paho.Client):
    """`joiner` joins chunks to payloads. `sink` is called in paho's thread with the topic, the payload,
    and the host's monotonic time at which the whole payload had arrived. `options` are passed to
    paho."""

    def __init__(self, joiner: chunks.Joiner, sink: Sink, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, **options)
        self._joiner, self._sink = joiner, sink
        self._arriving: _Arriving | None = None
        self._arrived_at: Nanoseconds = 0
        """Host's monotonic time at which the data that is being read had arrived."""
        self._left_to_paho: object = None
        """paho's record of the last large packet that was left to paho: its topic is longer than any of
        the testbed."""
        self._moved = 0
        """`moved` when the last ping was sent."""
        self.on_message = self._on_small

    def loop_stop(self) -> MQTTErrorCode:
        """paho's own method fails if the thread ends by itself at the same time."""
        thread, self._thread_terminate = self._thread, True
        if thread is not None:
            thread.join()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def close_sockets(self) -> None:
        """With the pair of sockets that wakes paho's thread, which paho itself closes only when the
        client is deleted. Call this after `loop_stop`, and publish nothing meanwhile."""
        self._reset_sockets()

    @property
    def moved(self) -> int:
        """Bytes that the other side has acknowledged or sent; 0 if the kernel does not report that."""
        sock = self._sock
        return 0 if sock is None else packets.bytes_moved(cast(Any, sock))

    def _send_pingreq(self) -> MQTTErrorCode:
        self._moved = self.moved
        return super()._send_pingreq()

    def _check_keepalive(self) -> None:
        """The progress of a transfer counts as a sign of life: a ping and its answer have to wait for
        its end."""
        overdue = self._ping_t and time.monotonic() - self._ping_t >= self._keepalive
        if overdue and self.moved - self._moved >= PROGRESS_BYTES:
            self._ping_t = 0.0  # the next ping is sent, as the broker expects
        super()._check_keepalive()

    def _on_small(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        self._pass_on(message.topic, self._joiner.add(message.topic, bytes(message.payload)))

    def _pass_on(self, topic: str, payload: bytes | bytearray | None) -> None:
        if payload is not None:
            self._sink(topic, payload, self._arrived_at)

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._is_large(bufsize):
            raise BlockingIOError  # returns to `_packet_read`
        return super()._sock_recv(bufsize)

    def _is_large(self, left: int) -> bool:
        """The arriving packet is to be handled here. `left`: bytes that have not arrived yet."""
        packet = self._in_packet
        is_message = packet["command"] & ~_FLAGS == MessageType.PUBLISH
        return left >= _LARGE and is_message and packet is not self._left_to_paho

    def _packet_read(self) -> MQTTErrorCode:
        sock = self._sock
        self._arrived_at = time.monotonic_ns() if sock is None else packets.arrival_time(cast(Any, sock))
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
        except (OSError, AttributeError):  # AttributeError: the socket was closed meanwhile
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        finally:
            with self._msgtime_mutex:
                self._last_bytes_received = time.monotonic()

    def _read_on(self, arriving: _Arriving) -> MQTTErrorCode:
        """Handle the packet if it is complete. Raises OSError if further bytes have not arrived yet."""
        sock: socket.socket = cast(Any, self._sock)
        while arriving.left:
            try:
                count = sock.recv_into(arriving.place)
            except BlockingIOError:  # not raised by TLS, where the size in the socket is unknown
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
        """Parse the beginning, and choose where the rest is written."""
        beginning: bytearray = cast(Any, arriving.place.obj)
        (length,) = _TWO_BYTES.unpack_from(beginning)
        at = _TWO_BYTES.size + length
        if at + _TWO_BYTES.size + chunks.HEAD.size > len(beginning):  # a foreign topic, which is longer
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
        self._arriving = None
        self._in_packet = {  # as paho does after each packet
            "command": 0, "have_remaining": 0, "remaining_count": [], "remaining_mult": 1,
            "remaining_length": 0, "packet": bytearray(), "to_process": 0, "pos": 0,
        }  # fmt: skip
        if arriving.topic is not None:
            payload = arriving.payload
            if arriving.share is not None:
                payload = self._joiner.filled(arriving.topic, arriving.share)
            self._pass_on(arriving.topic, payload)
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
        pieces = filter(len, (packet, share[_BEGINNING:]))  # slicing a view copies nothing
        self._out_packet.extend(  # both at once, because other threads send too
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
    """`sock` becomes readable only when `count` bytes have arrived or the connection is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
