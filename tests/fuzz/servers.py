"""Servers on sockets: the page, the metrics for Prometheus, and the embedded MQTT broker."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from testbed import simulate
from testbed.broker import BrokerLimits, accounts
from testbed.dashboard import serving
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.watching import prometheus
from tests.fuzz.harness import MEMORY, Read
from tests.fuzz.mutations import change_text, damage, replace_value
from tests.fuzz.run_directories import TOPOLOGY
from tests.test_dashboard import fetched, page_token
from tests.testbed.test_broker import running

_SECONDS = 60.0
"""For an answer."""
_REQUEST = """\
GET {} HTTP/1.1\r
Host: {}\r
Origin: http://{}\r
Accept: */*\r
Connection: close\r
{}\r
"""
_UPGRADE = """\
Upgrade: websocket\r
Connection: Upgrade\r
Sec-WebSocket-Version: 13\r
Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r
Sec-WebSocket-Protocol: bokeh, {}\r
"""
_PATHS = (
    "/", "/?sort=x", "/run?run=RUN&theme=dark", "/run?run=..", "/run?run=%00", "/run?run=RUN&run=x",
    "/run/metadata", "/run/autoload.js", "/logs?run=RUN", "/logs?run=RUN&component=aggregator",
    "/logs?component=%00", "/logs?run=%ed%a0%80", "/metrics", "/static/js/bokeh.min.js", "/static/%00",
    "/static/%2e%2e/%2e%2e/etc/passwd", "/static/../../../outside/secret", "/%ff%fe", "/run%0d%0a", "//",
    "*", "/" + "a" * 70_000, "/run/ws?run=RUN",
)  # fmt: skip
_SYNC = json.dumps({"msgid": "1", "msgtype": "PULL-DOC-REQ"}), "{}", "{}"
_PATCH = (
    json.dumps({"msgid": "2", "msgtype": "PATCH-DOC"}), "{}",
    json.dumps({"events": [{"kind": "ModelChanged", "model": {"id": "p1"}, "attr": "x", "new": 1}]}),
)  # fmt: skip


@contextmanager
def http(folder: Path) -> Iterator[Read]:
    run = RunDirectory(simulate(TOPOLOGY, runs=folder / "runs").path)
    log, urls = folder / "page.log", list[str]()
    with ExitStack() as stack:
        page = stack.enter_context(serving.serve_page([], 0, urls.append, runs=folder / "runs", log=log))
        own = urlsplit(urls[0].rpartition(" ")[2]).netloc
        metrics = urlsplit(stack.enter_context(prometheus.serve_metrics(run, 0))).netloc
        token = page_token(f"http://{own}/run?theme=dark&run={run.run}")

        def read(draw: random.Random) -> object:
            server = draw.choice([own, own, own, metrics])
            is_socket = server == own and draw.random() < 0.3
            path = "/run/ws" if is_socket else draw.choice(_PATHS).replace("RUN", run.run)
            request = _REQUEST.format(path, server, server, "")
            if is_socket:
                request = _REQUEST.replace("Connection: close\r\n", "").format(
                    path, server, server, _UPGRADE.format(token)
                )
            data = request.encode()
            if draw.random() < (0.2 if is_socket else 0.8):
                text = draw.choice(["GET", "POST", "HEAD", "PUT", "x"]) + request[3:]
                data = change_text(text, draw).replace(b"\n", draw.choice([b"\n", b"\r\n"]))
                data += draw.choice([b"", b"x" * 10, b"5\r\nabcde\r\n0\r\n\r\n"])
            frames = _frames(draw) if is_socket else b""
            answer = _ask(server, data, frames)
            assert "Traceback" not in (said := _new_text(log)), said[-3000:]
            assert psutil.Process(page.pid).memory_info().rss < MEMORY
            if draw.random() < 0.05:  # others are still served
                assert fetched(f"http://{own}/")[0] == 200
            status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
            if answer and status is None and not answer.startswith(b"<!DOCTYPE"):  # HTTP/0.9
                raise ValueError(f"the server answered {answer[:200]!r}")
            code = int(status[1]) if status else 400
            if code >= 500 and code != 505:
                raise ValueError(f"the server answered {answer[:200]!r}")
            if code >= 400:
                raise BadInputError(f"HTTP {code}")
            return code

        yield read


def _new_text(log: Path) -> str:
    """Return what a program has logged since the last call, and forget it."""
    said = log.read_text(errors="replace").lstrip("\0")  # it may write on where it was
    log.write_bytes(b"")
    return said


def _frames(draw: random.Random) -> bytes:
    """Frames of a websocket with Bokeh's messages, some of them damaged."""
    parts = list(draw.choice([_SYNC, _PATCH]))
    if draw.random() < 0.7:
        number = draw.randrange(3)
        parts[number] = json.dumps(replace_value(json.loads(parts[number]), draw))
    made = b""
    for part in parts:
        data = part.encode()
        size = (
            bytes([0x80 | len(data)])
            if len(data) < 126
            else b"\xfe" + struct.pack(">H", min(len(data), 65535))
        )
        opcode = draw.choice([0x81] * 12 + [0x82, 0x01, 0x88, 0x8A, 0x8F, 0xF1])
        made += bytes([opcode]) + size + b"\0\0\0\0" + data[:65535]
    return damage(made, draw) if draw.random() < 0.3 else made


def _ask(server: str, data: bytes, frames: bytes = b"") -> bytes:
    """Send the bytes, and the frames when the server says that it is ready for them. Return all that
    comes back until the server closes the connection."""
    host, _, port = server.partition(":")
    found = b""
    with socket.create_connection((host, int(port)), _SECONDS) as sock:
        try:
            sock.sendall(data)
            with suppress(TimeoutError):  # no websocket
                sock.settimeout(1.0 if frames else _SECONDS)
                while frames and b"ACK" not in found and (chunk := sock.recv(2**16)):
                    found += chunk
            sock.settimeout(_SECONDS)
            sock.sendall(frames)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(2**16):
                found += chunk
        except TimeoutError:
            raise
        except OSError:  # it refuses the rest
            pass
    return found


@contextmanager
def mqtt(folder: Path) -> Iterator[Read]:
    made = accounts("r", ["a", "b"])
    limits = BrokerLimits(packet=100_000, queue=1_000_000)
    with running("embedded", folder, made, limits) as logins:
        access = logins("init/a")
        server = f"{access.host}:{access.port}"
        (broker,) = psutil.Process().children()

        def read(draw: random.Random) -> object:
            login = draw.random() < 0.9
            connect = _connect(access.username, access.password if login else "x", draw)
            topic = draw.choice(
                [
                    "testbed/r/telemetry/a",
                    "testbed/r/control/a",
                    "#",
                    "+/+",
                    "$SYS/x",
                    "",
                    "\0",
                    "a" * 70_000,
                ]
            )
            packets = [connect, *(_packet(topic, draw) for _ in range(draw.randrange(4)))]
            if draw.random() < 0.6:
                at = draw.randrange(len(packets))
                packets[at] = damage(packets[at], draw)
            answer = _ask(server, b"".join(packets))
            assert not re.search("Traceback|Error", said := _new_text(folder / "log")), said[-3000:]
            assert broker.memory_info().rss < MEMORY
            if draw.random() < 0.1:  # others are still served
                assert _ask(server, _connect(access.username, access.password)).startswith(
                    b"\x20\x02\x00\x00"
                )
            if not answer.startswith(b"\x20\x02\x00\x00"):
                raise BadInputError("MQTT refused the connection")
            return len(answer)

        yield read


def _text(text: str) -> bytes:
    data = text.encode()[:65535]
    return struct.pack(">H", len(data)) + data


def _framed(kind: int, body: bytes) -> bytes:
    length, left = b"", len(body)
    while True:
        left, digit = divmod(left, 128)
        length += bytes([digit | (0x80 if left else 0)])
        if not left:
            return bytes([kind]) + length + body


def _connect(user: str, password: str, draw: random.Random | None = None) -> bytes:
    body = _text("MQTT") + b"\x04\xc2\x00\x3c" + _text("c")
    if draw is not None and draw.random() < 0.3:  # with a will
        body = (
            _text("MQTT")
            + b"\x04\xe6\x00\x3c"
            + _text("c")
            + _text(draw.choice(["testbed/r/status/b", "", "#"]))
            + _text("x")
        )
    return _framed(0x10, body + _text(user) + _text(password))


def _packet(topic: str, draw: random.Random) -> bytes:
    number = struct.pack(">H", draw.choice([0, 1, 2, 65535]))
    payload = draw.choice([b"", b"x", b"{}", b"\xff" * 99_000, b"y" * 200_000])
    return draw.choice(
        [
            _framed(0x32 | draw.choice([0, 1, 8, 4]), _text(topic) + number + payload),
            _framed(0x30, _text(topic) + payload),
            _framed(0x82, number + _text(topic) + bytes([draw.choice([0, 1, 2, 3])])),
            _framed(0xA2, number + _text(topic)),
            _framed(draw.choice([0x40, 0x50, 0x62, 0x70]), number),
            _framed(draw.choice([0xC0, 0xE0, 0xF0, 0x00, 0x20, 0x90]), draw.choice([b"", b"x"])),
            _connect("a", "b"),
        ]
    )
