"""Accounts and rights, and both brokers for real: what is allowed works, what is not does not."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from agents.config import WAYS, AccessLink, BrokerAccess
from agents.mqtt import chunks
from agents.mqtt.topics import AGGREGATOR, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from testbed import broker
from testbed.broker import (
    Account,
    BrokerLimits,
    Listeners,
    TlsIdentity,
    accounts,
    covers,
    hash_password,
    is_password,
    mosquitto_conf,
    read_embedded,
    refusals,
    write_embedded,
    write_mosquitto,
)
from testbed.broker.access import new_identity
from testbed.relay.sockets import LinkLane, Relay
from testbed.runtimes.process.runtime import free_ports
from tests.conftest import unavailable
from tests.waiting import eventually

TOPICS = Topics("r")
LARGE = os.urandom(2_000_000)
LIMITS = BrokerLimits(packet=3_000_000, queue=8_000_000)
PATIENCE = 120.0
"""Seconds until a test gives up: only a hang takes so long, even on a busy host."""


def test_topic_rights_of_a_run() -> None:
    made = accounts("r", ["a", "b"])
    assert list(made) == ["aggregator", "controller", "router", "a", "init/a", "b", "init/b"]
    a, init, aggregator = made["a"], made["init/a"], made["aggregator"]
    assert a.publish == ("testbed/r/update/a", "testbed/r/status/a", "testbed/r/report/a")
    assert a.subscribe == ("testbed/r/model/a", "testbed/r/model", "testbed/r/request/a")
    assert (init.publish, init.subscribe) == (
        ("testbed/r/telemetry/a", "testbed/r/failure/a"),
        ("testbed/r/control/a",),
    )
    assert not a.may_publish(TOPICS.update("b"))
    assert not a.may_read(TOPICS.update("+"))
    assert aggregator.may_read(TOPICS.update("+"))
    assert not aggregator.may_read("testbed/other/update/a")


def test_secure_runs_name_every_share_topic() -> None:
    made = accounts("r", ["a", "b", "c"], peers=True)
    assert made["a"].publish == (
        *(f"testbed/r/{kind}/a" for kind in ("update", "status", "report", "key", "sums")),
        "testbed/r/share/b/a",
        "testbed/r/share/c/a",
    )
    assert made["a"].subscribe[-2:] == ("testbed/r/key/+", "testbed/r/share/a/+")
    for topic in [TOPICS.share("x", "a"), TOPICS.share("a", "a"), TOPICS.share("b", "c")]:
        assert not made["a"].may_publish(topic)
    for account in made.values():
        if account.username != "controller":  # which nobody else is
            assert not any("+" in topic for topic in account.publish)


def test_passwords_are_random_and_hidden() -> None:
    once, again = (accounts("r", ["a"])["a"] for _ in range(2))
    assert once.password != again.password
    assert once.password not in repr(once)


@pytest.mark.parametrize("name", ["aggregator", "controller"])
def test_device_names_cannot_collide_with_infrastructure_logins(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        accounts("r", [name])


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/+", "a/b", True),
        ("a/+", "a/+", True),
        ("a/b", "a/+", False),
        ("a/+", "a/#", False),
        ("a/+", "a", False),
        ("a/+", "a/b/c", False),
        ("a/+", "#", False),
    ],
)
def test_topic_patterns_cover_topics(pattern: str, topic: str, expected: bool) -> None:
    assert covers(pattern, topic) is expected


def test_password_hashes_are_salted_and_checked() -> None:
    hashed = hash_password("secret")
    assert hashed != hash_password("secret")
    assert is_password("secret", hashed)
    assert not is_password("Secret", hashed)


def test_configuration_uses_the_brokers_path_of_the_folder(tmp_path: Path) -> None:
    at = Listeners("0.0.0.0", 1883)  # noqa: S104
    conf = write_mosquitto(tmp_path, accounts("r", ["a"]), at, seen_at="/testbed")
    assert conf.read_text() == mosquitto_conf(at, "/testbed", BrokerLimits())
    assert str(tmp_path) not in conf.read_text()
    assert (tmp_path / "acl").read_text().startswith("user aggregator\ntopic write ")


@pytest.mark.parametrize(("parameters", "devices"), [(1000, 4), (10_000, 100)])
def test_qos_0_flood_uses_bounded_broker_memory(parameters: int, devices: int) -> None:
    limits = BrokerLimits.for_run(parameters, devices)
    assert limits.messages * 4 * parameters < 3 * limits.queue
    conf = mosquitto_conf(Listeners("h", 1), "/testbed", limits)
    assert f"\nmax_queued_messages {limits.messages}\n" in conf
    assert f"\nmemory_limit {limits.memory}\n" in conf


@pytest.mark.parametrize(
    ("parameters", "devices", "beside", "memory"),
    [
        (7_850, 6, 3.0, 184),  # topologies/privacy/secure.yaml
        (11_200_000, 10, 0.0, 1974),
        (110_000_000, 4, 0.0, 6873),
        (100_000, 100, 0.0, 1939),
    ],
)
def test_memory_limit_exceeds_the_needs_of_a_usual_run(
    parameters: int, devices: int, beside: float, memory: int
) -> None:
    """A usual run takes a model under way to or from each device, and half of the shares that may
    be; a flood of one connection is in it, too, and what one client may have retained."""
    limits = BrokerLimits.for_run(parameters, devices, beside)
    assert limits.memory >> 20 == memory
    usual = 64 * 2**20 + 4 * parameters * devices * (1 + beside / 2)
    assert limits.memory > 1.8 * usual
    assert limits.memory > limits.queue + (devices + 6) * limits.packet
    assert limits.container > 2 * limits.memory


def test_memory_limit_grows_with_colluding_clients() -> None:
    one, four = (BrokerLimits.for_run(10**6, 20, 5.0, hostile) for hostile in (1, 4))
    assert four.memory - one.memory == 3 * 28 * (2**20 + 2**17)


@pytest.mark.parametrize("embedded", [True, False])
def test_broker_files_hold_no_password_and_are_private(tmp_path: Path, embedded: bool) -> None:
    made = accounts("r", ["a"])
    at, identity = Listeners("h", 1, tls_port=2), new_identity("h")
    if embedded:
        listeners, packet, hashed = read_embedded(write_embedded(tmp_path, made, at, identity))
        assert [each["bind"] for each in listeners.values()] == ["h:1", "h:2"]
        assert (packet, list(hashed)) == (BrokerLimits().packet, list(made))
        assert is_password(made["a"].password, hashed["a"].password)
    else:
        write_mosquitto(tmp_path, made, at, identity)
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o077 == 0
        assert not any(account.password in file.read_text() for account in made.values())


def test_broker_refusals_are_counted_by_login() -> None:
    log = """\
2026-11-22T22:36:34: New client connected from 127.0.0.1:1 as a (p2, c1, k60, u'a').
2026-11-22T22:36:34: Will message specified (1 bytes) (r1, q1).
2026-11-22T22:36:34: \ttestbed/r/status/a
2026-11-22T22:36:34: Received SUBSCRIBE from a
2026-11-22T22:36:34: \t# (QoS 0)
2026-11-22T22:36:34: \ttestbed/r/model/a (QoS 1)
2026-11-22T22:36:34: New client connected from 127.0.0.1:2 as init/a (p2, c1, k60, u'init/a').
2026-11-22T22:36:34: \ttestbed/r/status/a
2026-11-22T22:36:34: Denied PUBLISH from a (d0, q1, r0, m4, 'testbed/r/update/b', ... (2 bytes))
2026-11-22T22:36:34: Client <unknown> disconnected, not authorised.
2026-11-28T10:57:10: Client x [127.0.0.1:54760] disconnected: not authorised.
2026-11-22 22:36:34,001 WARNING Refused: 'b' may not read '#'
2026-11-22 22:36:34,001 WARNING Refused: '?' may not log in ''
"""
    assert refusals(log, accounts("r", ["a", "b"])) == {"a": 2, "init/a": 1, "b": 1, "?": 3}


# --- the brokers themselves ---------------------------------------------------------------------


class PromptClient(paho.Client):
    """paho's client, but a packet that its hundredth read completes is handled at once. paho itself
    leaves it until the next packet comes, which may be the answer to a ping a minute later."""

    def _packet_read(self) -> MQTTErrorCode:
        code, packet = super()._packet_read(), self._in_packet
        is_complete = packet["have_remaining"] and not packet["to_process"]
        return super()._packet_read() if is_complete else code


class Peer:
    """A bare paho client with one account, so that nothing but the broker says no."""

    def __init__(
        self,
        login: BrokerAccess,
        *,
        password: str | None = None,
        will: str | None = None,
        client_id: str = "",
    ) -> None:
        self.inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.refusal: str | None = None
        self._answers: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.paho = PromptClient(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv311)
        if login.certificate is not None:
            self.paho.tls_set_context(ssl.create_default_context(cadata=login.certificate))
        self.paho.username_pw_set(login.username, password or login.password)
        if will is not None:
            self.paho.will_set(will, b"offline", qos=1, retain=True)
        self.paho.on_connect = self._on_connect
        self.paho.on_subscribe = lambda *_: self._answers.put(None)
        self.paho.on_message = lambda _c, _d, m: self.inbox.put((m.topic, bytes(m.payload)))
        self.paho.connect(login.host, login.port)
        self.paho.loop_start()
        self._answers.get(timeout=PATIENCE)

    def _on_connect(self, _c: object, _d: object, _f: object, reason: object, _p: object) -> None:
        if getattr(reason, "is_failure", True):
            self.refusal = str(reason)
        self._answers.put(None)

    def subscribe(self, *topics: str) -> None:
        for topic in topics:
            self.paho.subscribe(topic, 1)
            self._answers.get(timeout=PATIENCE)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.paho.publish(topic, payload, qos=1, retain=retain).wait_for_publish(PATIENCE)

    def take(self) -> tuple[str, bytes]:
        return self.inbox.get(timeout=PATIENCE)

    def drop(self) -> None:
        """End the connection like a crash: no DISCONNECT."""
        sock = self.paho.socket()
        assert isinstance(sock, socket.socket)
        self.paho.on_disconnect = lambda *_: threading.Thread(target=self.paho.loop_stop).start()
        sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()
        self.paho._reset_sockets()  # those that wake its loop; else they wait for the garbage collector


Logins = Callable[[str], BrokerAccess]
Connect = Callable[..., Peer]


@pytest.fixture(params=["mosquitto", "embedded"])
def logins(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Logins]:
    """How each user logs in at a running broker of run `r` with the devices `a`, `b` and `init-a`."""
    made = accounts("r", ["a", "b", "init-a"])
    with running(request.param, tmp_path, made, LIMITS) as logins:
        yield logins


@contextlib.contextmanager
def running(
    kind: str, tmp_path: Path, made: Mapping[str, Account], limits: BrokerLimits
) -> Iterator[Logins]:
    """How each user of `made` logs in at a broker that runs meanwhile."""
    port, tls_port = free_ports(2)
    identity = new_identity("127.0.0.1")
    at = Listeners("127.0.0.1", port, tls_port, str(tmp_path / "socket"))
    command = broker_command(kind, tmp_path, made, at, identity, limits)
    path = tmp_path / "log"  # no pipe: one that nobody reads would stop the broker
    with (
        path.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as broker,
    ):
        try:
            for each in (port, tls_port):
                wait_until_listening(each, broker)
            yield partial(login, made, at, identity)
        finally:
            broker.terminate()
            broker.wait(PATIENCE)
    log = path.read_text()
    # Mosquitto 2.0 says "Error in epoll" where a connection has just been closed by its other end.
    assert not re.search("Traceback|(?<!OpenSSL )Error(?! in epoll)", log), log
    assert not any(account.password in log for account in made.values())


def login(made: Mapping[str, Account], at: Listeners, identity: TlsIdentity, user: str) -> BrokerAccess:
    """`a` and `b` use TLS, all others do not."""
    if user not in ("a", "b"):
        return made[user].at(at.host, at.port)
    return made[user].at(at.host, at.clients_port, identity.certificate)


@pytest.fixture
def connect(logins: Logins) -> Iterator[Connect]:
    """A function that logs in."""
    peers = []

    def connect(user: str, **options: str) -> Peer:
        peers.append(Peer(logins(user), **options))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def broker_command(
    kind: str,
    folder: Path,
    made: Mapping[str, Account],
    at: Listeners,
    identity: TlsIdentity,
    limits: BrokerLimits,
) -> list[str]:
    if kind == "embedded":
        if not broker.has_amqtt():
            unavailable("amqtt", f"it is not installed: {broker.amqtt_command()}")
        config = write_embedded(folder, made, at, identity, limits=limits)
        return [sys.executable, "-m", "testbed.broker.embedded", str(config)]
    mosquitto = broker.find_mosquitto() or ""
    if not mosquitto:
        unavailable("mosquitto", "it is not installed: apt-get install mosquitto")
    conf = write_mosquitto(folder, made, at, identity, limits=limits)
    return [mosquitto, "-c", str(conf)]


def wait_until_listening(port: int, broker: subprocess.Popen[bytes]) -> None:
    def is_listening() -> bool:
        assert broker.poll() is None, "the broker has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    eventually(is_listening)


def test_device_and_init_with_similar_names_are_distinct(logins: Logins, connect: Connect) -> None:
    inits, devices = (queue.SimpleQueue[ReceivedMessage]() for _ in range(2))
    init = Connection(logins("init/a"), [TOPICS.control("a")], inits.put)
    device = Connection(logins("init-a"), [TOPICS.request("init-a")], devices.put)
    for connection in (init, device):
        connection.open()
    connect("controller").publish(TOPICS.control("a"), b"pause")
    connect("aggregator").publish(TOPICS.request("init-a"), b"stop")
    for inbox in (inits, devices):  # who was sent away by the other comes back first
        assert isinstance(inbox.get(timeout=PATIENCE), ReceivedMessage)
    for connection in (init, device):
        connection.close()


def test_session_id_is_the_login_name(connect: Connect) -> None:
    aggregator, client = connect("aggregator", client_id="aggregator"), connect("a")
    aggregator.subscribe(TOPICS.update("+"))
    lost: list[object] = []
    aggregator.paho.on_disconnect = lambda *_: lost.append(1)
    thief = connect("b", client_id="aggregator")
    stranger = connect("b", client_id="aggregator", password="wrong")
    assert (thief.refusal, stranger.refusal) == (None, "Not authorized")
    client.publish(TOPICS.update("a"), b"for the aggregator")
    assert aggregator.take() == (TOPICS.update("a"), b"for the aggregator")
    assert lost == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paho leaves a socket
def test_client_sends_nothing_to_a_foreign_broker(logins: Logins) -> None:
    real = logins("a")
    stranger = replace(real, certificate=new_identity("127.0.0.1").certificate)
    with pytest.raises(ConnectionFailedError, match="CERTIFICATE_VERIFY_FAILED"):
        Connection(stranger, [], lambda _: None).open(timeout=0.1)


def test_a_status_is_published_again_after_a_reconnect(logins: Logins, connect: Connect) -> None:
    watcher, status = connect("controller"), TOPICS.status("init-a")
    watcher.subscribe(TOPICS.status("+"))
    client = Connection(
        logins("init-a"), [TOPICS.request("init-a")], lambda _: None, will=(status, b"offline")
    )
    client.open()
    client.publish_status(status, b"ready")
    assert watcher.take() == (status, b"ready")
    client._paho.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    assert [watcher.take(), watcher.take()] == [(status, b"offline"), (status, b"ready")]
    client.close()
    # Where the connection was cut before the broker's answer came, paho sends the status once more:
    # QoS 1 is at least once.
    after = watcher.take()
    assert (watcher.take() if after == (status, b"ready") else after) == (status, b"offline")


def test_new_subscription_gets_retained_messages_again(logins: Logins, connect: Connect) -> None:
    connect("a").publish(TOPICS.status("a"), b"ready", retain=True)
    inbox = queue.SimpleQueue[ReceivedMessage]()
    aggregator = Connection(logins("aggregator"), [TOPICS.status("+")], inbox.put, keeps_session=True)
    aggregator.open()
    assert inbox.get(timeout=PATIENCE).payload == b"ready"
    aggregator.publish_status(TOPICS.status("aggregator"), b"over")
    assert inbox.get(timeout=PATIENCE).payload == b"over"
    aggregator.subscribe_again()
    assert {inbox.get(timeout=PATIENCE).payload for _ in range(2)} == {b"ready", b"over"}
    aggregator.close()


def test_messages_for_an_absent_session_arrive_on_its_return(logins: Logins, connect: Connect) -> None:
    inbox, lost = (queue.SimpleQueue[Any]() for _ in range(2))
    begin = time.monotonic_ns()
    aggregator = Connection(
        logins("aggregator"),
        [TOPICS.update("+")],
        inbox.put,
        keeps_session=True,
        reconnected=lost.put,
    )
    aggregator.open()
    aggregator._paho.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    client = connect("a")
    time.sleep(0.1)  # until the broker has seen it, within the second before it is back
    client.publish(TOPICS.update("a"), b"one")
    assert begin < lost.get(timeout=PATIENCE) < time.monotonic_ns()
    assert inbox.get(timeout=PATIENCE).payload == b"one"
    aggregator.close()


def test_large_payloads_pass_in_both_directions(connect: Connect) -> None:
    aggregator, client = connect("aggregator"), connect("a")
    aggregator.subscribe(TOPICS.update("+"))
    client.subscribe(TOPICS.model("a"))
    for _ in range(3):
        aggregator.publish(TOPICS.model("a"), LARGE)
        assert client.take() == (TOPICS.model("a"), LARGE)
        client.publish(TOPICS.update("a"), LARGE)
        assert aggregator.take() == (TOPICS.update("a"), LARGE)


def test_payload_larger_than_a_packet_is_sent_in_chunks(logins: Logins) -> None:
    """Three and a bit of them, through a broker that takes none as large as the whole; a small one
    follows."""
    whole = LARGE * 2 + b"end"
    assert len(whole) > LIMITS.packet
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    aggregator = Connection(
        logins("aggregator"), [TOPICS.update("+")], inbox.put, largest={"update": len(whole)}
    )
    client = Connection(logins("a"), [], lambda _: None)
    aggregator.open()
    client.open()
    client.publish(TOPICS.update("a"), whole)
    client.publish(TOPICS.update("a"), b"next")
    assert [inbox.get(timeout=PATIENCE).payload for _ in range(2)] == [whole, b"next"]
    client.close()
    aggregator.close()


def test_oversized_packet_only_disconnects_its_sender(
    connect: Connect,
) -> None:
    aggregator, client, other = connect("aggregator"), connect("a"), connect("b")
    aggregator.subscribe(TOPICS.update("+"))
    gone = threading.Event()
    client.paho.on_disconnect = lambda *_: gone.set()
    client.paho.reconnect_delay_set(min_delay=60, max_delay=60)
    client.paho.publish(TOPICS.update("a"), bytes(LIMITS.packet + 1), qos=1)
    assert gone.wait(PATIENCE)
    other.publish(TOPICS.update("b"), b"own")
    assert aggregator.take() == (TOPICS.update("b"), b"own")


def test_unreadable_login_ends_its_connection(logins: Logins) -> None:
    """Otherwise each one would keep a descriptor of the broker."""
    access = logins("aggregator")
    with socket.create_connection((access.host, access.port), PATIENCE) as peer:
        peer.sendall(bytes.fromhex("101800044d40020000"))
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""


def test_message_of_a_qos_that_does_not_exist_ends_its_connection(logins: Logins) -> None:
    access = logins("init-a")
    texts = (text.encode() for text in ("c", access.username, access.password))
    body = b"\0\4MQTT\4\xc2\0\x3c" + b"".join(len(one).to_bytes(2, "big") + one for one in texts)
    with socket.create_connection((access.host, access.port), PATIENCE) as peer:
        peer.sendall(b"\x10" + bytes([len(body)]) + body)
        assert peer.recv(4) == b"\x20\2\0\0"
        peer.sendall(b"\x36\x06\0\1x\0\1y")
        assert peer.recv(1) == b""


@pytest.mark.parametrize("logins", ["mosquitto"], indirect=True)  # the embedded broker has no such limit
def test_queue_for_a_client_that_does_not_read_is_limited(connect: Connect) -> None:
    aggregator, client = connect("aggregator"), connect("a")
    aggregator.subscribe(TOPICS.update("+"))
    aggregator.paho.loop_stop()
    (broker,) = (child for child in psutil.Process().children() if child.name() == "mosquitto")
    before = broker.memory_info().rss
    for _ in range(50):  # 100 MB
        client.publish(TOPICS.update("a"), LARGE)
    assert broker.memory_info().rss - before < LIMITS.queue + 12 * LIMITS.packet


@contextlib.contextmanager
def measured(tmp_path: Path, limits: BrokerLimits) -> Iterator[tuple[Connect, Logins, psutil.Process]]:
    """A Mosquitto for the clients a to d, with secure aggregation."""
    made = accounts("r", ["a", "b", "c", "d"], peers=True)
    with running("mosquitto", tmp_path, made, limits) as logins, contextlib.ExitStack() as stack:
        (broker,) = (child for child in psutil.Process().children() if child.name() == "mosquitto")

        def connect(user: str) -> Peer:
            peer = Peer(logins(user))
            stack.callback(peer.close)
            return peer

        yield connect, logins, broker


def test_retained_messages_of_a_client_are_bounded(tmp_path: Path) -> None:
    """A message on each word that it can think of, and the largest on each topic that it may: eight are
    kept. The others' messages, large and small, get through."""
    limits = BrokerLimits.for_run(600_000, 4, 8 / 2)
    assert limits.packet > 2_000_000 / 2
    with measured(tmp_path, limits) as (connect, _, broker):
        attacker, victim, aggregator = connect("a"), connect("b"), connect("aggregator")
        before = broker.memory_info().rss
        largest = os.urandom(limits.packet - 100)
        topics = [TOPICS.share(f"word-{number}", "a") for number in range(150)]
        topics += [TOPICS.share(other, "a") for other in ("b", "c", "d")]
        topics += [f"testbed/r/{kind}/a" for kind in ("update", "status", "report", "key", "sums")]
        for topic in topics:
            attacker.publish(topic, largest, retain=True)
        attacker.close()
        assert broker.memory_info().rss - before < 8 * limits.packet + 2**23
        victim.subscribe(TOPICS.share("b", "+"))
        assert victim.take()[0] == TOPICS.share("b", "a")
        aggregator.publish(TOPICS.model("b"), largest)
        victim.subscribe(TOPICS.model("b"))
        aggregator.publish(TOPICS.model("b"), b"small")
        assert victim.take() == (TOPICS.model("b"), b"small")
        connect("c").publish(TOPICS.share("b", "c"), largest)
        assert victim.take() == (TOPICS.share("b", "c"), largest)


def test_broker_at_its_memory_limit_continues(tmp_path: Path) -> None:
    """A client that sends more than there is room for is disconnected, and reconnects; small messages
    are passed on."""
    limits = BrokerLimits(packet=1_200_000, queue=100_000_000, memory=16_000_000)
    with measured(tmp_path, limits) as (connect, _, broker):
        aggregator, client = connect("aggregator"), connect("b")
        aggregator.subscribe(TOPICS.update("+"))
        aggregator.paho.loop_stop()  # it reads no more
        gone = threading.Event()
        client.paho.on_disconnect = lambda *_: gone.set()
        for _ in range(40):
            client.paho.publish(TOPICS.update("b"), os.urandom(1_000_000), qos=1)
        assert gone.wait(PATIENCE)
        assert broker.memory_info().rss < 2 * limits.memory + 2**24
        other = connect("c")
        other.subscribe(TOPICS.model("c"))
        connect("controller").publish(TOPICS.control("c"), b"order")
        other.publish(TOPICS.status("c"), b"ready")
        assert broker.is_running()


def test_announced_length_is_not_allocated(tmp_path: Path) -> None:
    """32 bytes that announce 2 GiB, and 1 GiB, on a topic of shares of 3 MB: nothing is kept of them,
    and what others send is whole."""
    share = os.urandom(2_500_000)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with measured(tmp_path, BrokerLimits.for_run(600_000, 4, 8 / 2)) as (connect, logins, _):
        victim = Connection(
            logins("b"), [TOPICS.share("b", "+")], inbox.put, largest={"share": len(share)}
        )
        honest = Connection(logins("c"), [], lambda _: None)
        victim.open()
        honest.open()
        attacker = connect("a")
        process, before = psutil.Process(), psutil.Process().memory_info().rss
        for size in (2**31, 2**30, len(share) + 1):
            head = chunks.HEAD.pack(b"testbed\xff", 1, 0, 4096, size)
            assert len(head) == 32
            attacker.publish(TOPICS.share("b", "a"), head)
        attacker.publish(
            TOPICS.share("b", "a"), chunks.HEAD.pack(b"testbed\xff", 2, 0, 4096, len(share))
        )
        honest.publish(TOPICS.share("b", "c"), share)
        assert inbox.get(timeout=PATIENCE).payload == share
        assert process.memory_info().rss - before < 2**26
        kept = victim._paho._joiner._unfinished
        assert {sender: len(one.payload) for sender, one in kept.items()} == {"a": 0}
        victim.close()
        honest.close()


def test_client_cannot_publish_under_another_name(connect: Connect) -> None:
    aggregator, client = connect("aggregator"), connect("a")
    aggregator.subscribe(TOPICS.update("+"), TOPICS.status("+"))
    client.publish(TOPICS.update("b"), b"forged")
    client.publish(TOPICS.status("b"), b"forged", retain=True)
    client.publish(TOPICS.update("a"), b"own")
    assert aggregator.take() == (TOPICS.update("a"), b"own")
    late = connect("controller")
    late.subscribe(TOPICS.status("+"))
    client.publish(TOPICS.status("a"), b"ready", retain=True)
    assert late.take() == (TOPICS.status("a"), b"ready")


def test_client_cannot_set_a_will_under_another_name(connect: Connect) -> None:
    aggregator = connect("aggregator")
    aggregator.subscribe(TOPICS.status("+"))
    forger = connect("a", will=TOPICS.status("b"))
    if forger.refusal is None:
        forger.drop()
    connect("a").publish(TOPICS.status("a"), b"ready")
    assert aggregator.take() == (TOPICS.status("a"), b"ready")


def test_client_receives_only_its_own_messages(connect: Connect) -> None:
    aggregator, client, other = connect("aggregator"), connect("a"), connect("b")
    other.publish(TOPICS.status("b"), b"ready", retain=True)
    client.subscribe(
        TOPICS.update("+"),
        TOPICS.update("b"),
        TOPICS.model("b"),
        TOPICS.status("+"),
        "#",
        TOPICS.model("a"),
    )
    other.publish(TOPICS.update("b"), b"private")
    aggregator.publish(TOPICS.model("b"), b"not for a")
    aggregator.publish(TOPICS.model("a"), b"for a")
    assert client.take() == (TOPICS.model("a"), b"for a")


def test_connection_without_subscription_gets_no_retained_message(connect: Connect) -> None:
    watcher, client = connect("aggregator"), connect("a")
    watcher.subscribe(TOPICS.status("+"))
    client.publish(TOPICS.status("a"), b"ready", retain=True)
    watcher.take()
    stranger = connect("b")
    stranger.subscribe(TOPICS.model("b"))
    watcher.publish(TOPICS.model("b"), b"first")
    assert stranger.take() == (TOPICS.model("b"), b"first")


def test_last_will_is_retained_when_a_client_vanishes(connect: Connect) -> None:
    aggregator = connect("aggregator")
    aggregator.subscribe(TOPICS.status("+"))
    client = connect("a", will=TOPICS.status("a"))
    client.publish(TOPICS.status("a"), b"training", retain=True)
    assert aggregator.take() == (TOPICS.status("a"), b"training")
    client.drop()
    assert aggregator.take() == (TOPICS.status("a"), b"offline")
    late = connect("controller")
    late.subscribe(TOPICS.status("+"))
    assert late.take() == (TOPICS.status("a"), b"offline")


def test_messages_are_kept_while_other_clients_come_and_go(connect: Connect) -> None:
    aggregator, client = connect("aggregator"), connect("a")
    aggregator.subscribe(TOPICS.update("+"))
    coming = [
        threading.Thread(target=come_and_go, args=(connect, *which))
        for which in [
            ("b", TOPICS.model("b")),
            ("init/b", TOPICS.control("b")),
            ("init/a", TOPICS.control("a")),
            ("controller", TOPICS.telemetry("+")),
        ]
    ]
    for thread in coming:
        thread.start()
    sent = 0
    while any(thread.is_alive() for thread in coming):
        client.publish(TOPICS.update("a"), str(sent).encode())
        sent += 1
    received = [aggregator.take()[1] for _ in range(sent)]
    assert received == [str(number).encode() for number in range(sent)]


def come_and_go(connect: Connect, user: str, topic: str) -> None:
    for _ in range(25):
        peer = connect(user)
        peer.subscribe(topic)
        peer.paho.unsubscribe(topic)
        peer.close()


@pytest.mark.timed
def test_transfer_longer_than_the_keep_alive_keeps_its_connection(logins: Logins) -> None:
    """A chunk of 1 MiB takes 4.2 s at 2 Mbit/s; the keep-alive is 2 s, and the broker waits 3 s. One
    client sends, the other receives, each over its own link. A link on which nothing moves is still
    noticed."""
    relay, names = Relay(), Topics("r")
    lanes: list[LinkLane] = []
    got: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
    lost: list[int] = []
    threading.Thread(target=relay.serve, daemon=True).start()
    with ExitStack() as stack:
        connections = [Connection(logins(AGGREGATOR), [names.update("+"), names.status("+")], got.put)]
        for name in "ab":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            near, link = logins(name), AccessLink(2_000_000, 2_000_000)
            own = [LinkLane(link, way, random.random) for way in WAYS]
            relay.listen(listener, (near.host, near.port), own[:1], own[1:])
            lanes += own
            connections.append(
                Connection(
                    replace(near, port=listener.getsockname()[1]),
                    [names.model(name)],
                    got.put,
                    will=(names.status(name), b"offline"),
                    keepalive=2,
                    reconnected=lost.append,
                )
            )
        for connection in connections:
            stack.enter_context(closing(connection)).open()
        aggregator, sender, _ = connections
        begin = time.monotonic()
        sender.publish(names.update("a"), bytes(2**20))
        aggregator.publish(names.model("b"), bytes(2**20))
        for _ in range(2):
            received = got.get(timeout=PATIENCE)
            assert received.topic in (names.update("a"), names.model("b"))
            assert len(received.payload) == 2**20
            assert 4 < time.monotonic() - begin < 10
        assert not lost
        for lane in lanes:
            relay.submit(partial(lane.cut, time.monotonic()))
        cut = time.monotonic()
        assert [got.get(timeout=PATIENCE).payload for _ in range(2)] == [b"offline"] * 2
        assert time.monotonic() - cut > 1  # and not before
        for lane in lanes:
            relay.submit(partial(lane.mend, time.monotonic()))
            relay.submit(lane.advance)
