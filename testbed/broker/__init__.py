"""Broker of a run: accounts and their rights, broker programs of this host (Mosquitto, or amqtt, a
broker in Python: `embedded`), their configuration files, and what the broker refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import math
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agents import extras
from agents.config import BrokerAccess
from agents.mqtt import chunks
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER, Topics

# Accounts of a run's broker and their rights.
#
# Accounts exist only during their run. The sender of a message is known by its login, never by the
# payload: a client can publish only under its own name, and read only what is addressed to it.

_ITERATIONS = 101
"""PBKDF2 iterations: Mosquitto's default. More iterations would only help guessable passwords; the
passwords of accounts have 192 random bits.
"""


@dataclass(frozen=True, slots=True)
class Account:
    """Rights are topic filters, in which `+` stands for any one level."""

    username: str
    password: str = field(repr=False)
    publish: Sequence[str]
    subscribe: Sequence[str]

    def may_publish(self, topic: str) -> bool:
        return any(covers(pattern, topic) for pattern in self.publish)

    def may_read(self, topic: str) -> bool:
        """If `topic` is a filter: whether the account may subscribe to it."""
        return any(covers(pattern, topic) for pattern in self.subscribe)

    def at(self, host: str, port: int, certificate: str | None = None) -> BrokerAccess:
        return BrokerAccess(host, port, self.username, self.password, certificate)


def init_user(device: str) -> str:
    """The init is the emulator's process on the device. The device's FL client has its own username."""
    return f"init/{device}"


def router_user(node: str) -> str:
    return f"{ROUTER}/{node}"


def accounts(
    run: str, devices: Iterable[str], nodes: Iterable[str] = (), *, peers: bool = False
) -> dict[str, Account]:
    """Return username -> account, with new passwords. `nodes`: nodes that have a router.

    Only with `peers` may clients send messages to each other, and answers to the server. The topics that
    a client may publish to are listed one by one, without wildcards, because the broker keeps a retained
    message per topic. Raises ValueError if a device has the name of an infrastructure account.
    """
    names, topics = list(devices), Topics(run)
    if reserved := {AGGREGATOR, CONTROLLER, ROUTER}.intersection(names):
        raise ValueError(f"a device must not be called {' or '.join(sorted(reserved))}")
    rights = {
        AGGREGATOR: (
            [
                topics.status(AGGREGATOR),
                topics.broadcast,
                topics.failure(AGGREGATOR),
                *map(topics.model, names),
                *map(topics.request, names),
            ],
            [
                *(topics.update("+"), topics.status("+"), topics.report("+")),
                *([topics.sums("+")] if peers else []),
                topics.control(AGGREGATOR),
            ],
        ),
        CONTROLLER: (
            [topics.control("+")],
            [topics.status("+"), topics.telemetry("+"), topics.failure("+")],
        ),
    }
    for router in (ROUTER, *map(router_user, nodes)):
        reports = topics.status(ROUTER), topics.telemetry(ROUTER), topics.failure(ROUTER)
        rights[router] = ([*reports], [topics.control(ROUTER)])
    for name in names:
        rights[name] = (
            [
                *(topics.update(name), topics.status(name), topics.report(name)),
                *([topics.key(name), topics.sums(name)] if peers else []),
                *(topics.share(other, name) for other in names if peers and other != name),
            ],
            [
                *(topics.model(name), topics.broadcast, topics.request(name)),
                *([topics.key("+"), topics.share(name, "+")] if peers else []),
            ],
        )
        rights[init_user(name)] = (
            [topics.telemetry(name), topics.failure(name)],
            [topics.control(name)],
        )
    return {
        user: Account(user, secrets.token_urlsafe(24), tuple(publish), tuple(subscribe))
        for user, (publish, subscribe) in rights.items()
    }


def covers(pattern: str, topic: str) -> bool:
    """If `topic` is also a filter: whether `pattern` matches every topic that `topic` matches."""
    patterns, levels = pattern.split("/"), topic.split("/")
    return len(patterns) == len(levels) and all(
        part == level or (part == "+" and level != "#")
        for part, level in zip(patterns, levels, strict=True)
    )


def hash_password(password: str, salt: bytes | None = None) -> str:
    """The format is that of Mosquitto's password file (`$7$`: PBKDF2 with SHA-512). `salt`: None for
    fresh random bytes."""
    salt = os.urandom(12) if salt is None else salt
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    encoded = (base64.b64encode(part).decode() for part in (salt, digest))
    return f"$7${_ITERATIONS}${'$'.join(encoded)}"


def is_password(password: str, hashed: str) -> bool:
    salt = base64.b64decode(hashed.split("$")[3])
    return hmac.compare_digest(hash_password(password, salt).encode(), hashed.encode())


_REFUSED = re.compile(r": Denied PUBLISH from (\S+) | Refused: '(\S+)' may not ")
_CONNECTED = re.compile(r": New client connected from \S+ as (\S+) ")
_SUBSCRIBES = re.compile(r": Received SUBSCRIBE from (\S+)$")
_NO_LOGIN = re.compile(r" disconnected[,:] not authorised")  # with a colon since Mosquitto 2.1
_TOPIC = re.compile(r": \t(.+?)(?: \(QoS \d\))?$")


def refusals(log: str, accounts: Mapping[str, Account]) -> Counter[str]:
    """Return username -> number. A refusal is a failed login, or a message, last will or subscription on
    a topic that the account may not use. Failed logins are counted under `?`.

    Mosquitto logs each message that it refuses. Mosquitto accepts any subscription, but delivers no
    messages of topics that the account may not read. Therefore this function checks subscriptions and
    wills against `accounts`.
    """
    refused: Counter[str] = Counter()
    who, may = "", Account.may_read
    for line in log.splitlines():
        if found := _REFUSED.search(line):
            refused[found[1] or found[2]] += 1
        elif _NO_LOGIN.search(line):
            refused["?"] += 1
        elif found := _CONNECTED.search(line):
            who, may = found[1], Account.may_publish
        elif found := _SUBSCRIBES.search(line):
            who, may = found[1], Account.may_read
        elif found := _TOPIC.search(line):
            refused[who] += who in accounts and not may(accounts[who], found[1])
    return +refused


# Broker programs of this host: Mosquitto, or amqtt, a broker in Python.
#
# amqtt and Flower need different versions of the same packages, so one environment cannot have both. The
# folder `AMQTT_FOLDER` is a second place for amqtt and what it needs. Only the broker's process imports
# from there.

AMQTT = "amqtt>=0.11.3,<0.13"
"""Requirement in pip's notation. The extra `broker` of pyproject.toml has the same."""
AMQTT_FOLDER = Path(sys.prefix, "share", "edge-fl-testbed", "broker")
INSTALL_MOSQUITTO = "sudo apt-get install mosquitto"


def find_mosquitto() -> str | None:
    """Debian installs Mosquitto into a folder that only root has in PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def has_amqtt() -> bool:
    """Look in this environment and in `AMQTT_FOLDER`."""
    if importlib.util.find_spec("amqtt") is not None:
        return True
    return PathFinder.find_spec("amqtt", [str(AMQTT_FOLDER)]) is not None


def use_amqtt_folder() -> None:
    """Import packages from that folder first, if it exists."""
    if AMQTT_FOLDER.is_dir():
        sys.path.insert(0, str(AMQTT_FOLDER))


def amqtt_command() -> str:
    """Install into this environment, or into `AMQTT_FOLDER` if this environment has Flower."""
    if importlib.util.find_spec("flwr") is None:
        return extras.install_command("amqtt")
    return f"{sys.executable} -m pip install --no-warn-conflicts --target {AMQTT_FOLDER} '{AMQTT}'"


def lack_of_broker() -> str | None:
    """Return the reason why this host has no broker for local processes, with the commands that install
    one."""
    if find_mosquitto() is not None or has_amqtt():
        return None
    return (
        "the process runtime needs an MQTT broker, but neither Mosquitto nor amqtt is installed: run "
        f"{INSTALL_MOSQUITTO}, or {amqtt_command()}"
    )


BROKER = "broker"
"""Component of a run, like AGGREGATOR and CONTROLLER."""
_IN_FLIGHT = 4
"""Unacknowledged packets per connection, as a multiple of the largest packet's length. The broker holds
each of these packets twice."""
MOSQUITTO_CONF = "mosquitto.conf"
SOCKET = "broker.socket"
"""Name of the broker's Unix socket."""
TLS_SOCKET = "devices.socket"
"""Unix socket with TLS, to which the connections of real devices are forwarded if the broker cannot
listen at an address of this host."""
_CERTIFICATE, _KEY = "certificate.pem", "key.pem"
# By default Mosquitto would return the memory of each large message to the kernel, which zeroes it for
# the next message. Zeroing is most of a message's cost. So Mosquitto keeps up to 64 MiB of freed memory,
# as `agents.process` does.
_RUN_MOSQUITTO = """\
rm -f "$3" && mkfifo "$3" || exit
env -i grep --line-buffered -vE '^[^ ]*: (Sending |Received P)' < "$3" &
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=67108864
exec "$1" -c "$2" > "$3"
"""


_CONNECTION = 16 * 2**20
"""Bytes of small messages queued for one connection."""
_BROKER = 64 * 2**20
"""Bytes of the broker without messages and rights."""
_TOPICS = 8
"""Topics that a device may publish to, at most, without those of shares for other devices."""
_RIGHT = 256
"""Bytes of a line of Mosquitto's access list."""


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits per connection and in total. A client that exceeds its own limit disturbs no other
    client."""

    packet: int = 128 * 2**20
    """Bytes of an MQTT packet. The sender of a larger packet is disconnected."""
    queue: int = 2**30
    """Bytes of messages queued for one connection. Further messages for the connection are dropped."""
    messages: int = 10_000
    """Messages queued for one connection. The limit is needed because Mosquitto does not count the bytes
    of messages with QoS 0."""
    memory: int = 2**33
    """Bytes of all messages, sessions and rights together. A sender whose message does not fit is
    disconnected, and sends the message again after it has reconnected."""

    @classmethod
    def for_run(
        cls, parameters: int, devices: int, beside: float = 0.0, hostile: int = 1
    ) -> BrokerLimits:
        """`parameters`: of the model.

        `packet` has room for a model with its header, or for the largest chunk of a model. `queue` has
        room for two models per device, `beside` more models in total, and small messages. `memory` has
        room for two models to each device, two models from each device, `beside` more models per device,
        and small messages. It also has room for `hostile` clients that each publish a retained message
        of the largest size on every topic that they may publish to. Usually one model is in flight to or
        from each device.
        """
        message = 4 * parameters + 2 * 64 * 2**10
        packet = min(message, chunks.CHUNK_BYTES + 2 * 64 * 2**10)
        queue = _CONNECTION + math.ceil((2 * devices + beside) * message)
        under_way = math.ceil((4 + beside) * devices * message) + (devices + 1) * _CONNECTION
        kept = hostile * (devices + _TOPICS) * packet
        memory = _BROKER + under_way + kept + _RIGHT * devices**2
        return cls(packet, queue, queue // packet + 10 * devices + 100, memory)

    @property
    def container(self) -> int:
        """Memory limit of the container, in bytes. Mosquitto reaches its own limit (`memory`) first,
        because the container's limit also has room for freed memory that the allocator keeps, for TLS
        and for socket buffers."""
        return 2 * self.memory + 2 * _BROKER


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Self-signed certificate and its private key, both in PEM format."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Listeners:
    host: str
    """Address of the interface."""
    port: int
    """TCP without TLS, for connections that devices cannot overhear."""
    tls_port: int | None = None
    """TCP with TLS, for the clients; None if clients use `port`."""
    socket: str | None = None
    """Path of a Unix socket for processes of the broker's user and group."""
    remote: tuple[str, int] | None = None
    """Address and TCP port with TLS for real devices, or path of a Unix socket with TLS, and 0."""

    @property
    def with_tls(self) -> tuple[tuple[str, int], ...]:
        own = () if self.tls_port is None else ((self.host, self.tls_port),)
        return own if self.remote is None else (*own, self.remote)

    @property
    def clients_port(self) -> int:
        return self.tls_port or self.port


def password_file(accounts: Mapping[str, Account]) -> str:
    """Mosquitto's format: salted hashes, with a fresh salt for each account."""
    return "".join(
        f"{account.username}:{hash_password(account.password)}\n" for account in accounts.values()
    )


def acl_file(accounts: Mapping[str, Account]) -> str:
    """Mosquitto denies everything that no line allows."""
    lines: list[str] = []
    for account in accounts.values():
        lines.append(f"user {account.username}")
        lines += [f"topic write {topic}" for topic in account.publish]
        lines += [f"topic read {topic}" for topic in account.subscribe]
    return "\n".join(lines) + "\n"


def mosquitto_conf(at: Listeners, directory: str, limits: BrokerLimits) -> str:
    """Configuration of Mosquitto 2.0 or newer. `directory`: path of the broker's files as the broker
    sees it."""
    # Otherwise a client could use the id of another client, and end or take over that client's session.
    named = "use_username_as_clientid true\n"
    listeners = f"listener {at.port} {at.host}\n{named}"
    for host, port in at.with_tls:
        files = f"certfile {directory}/{_CERTIFICATE}\nkeyfile {directory}/{_KEY}\n"
        listeners += f"listener {port} {host}\n{named}{files}tls_version tlsv1.3\n"
    if at.socket is not None:
        listeners += f"listener 0 {at.socket}\n{named}"
    return f"""\
{listeners}\
allow_anonymous false
password_file {directory}/passwd
acl_file {directory}/acl
# Otherwise Mosquitto, started as root, would switch to a user that may not read these files.
user root
# The run's state ends with the run.
persistence false
sys_interval 0
# A small message (an acknowledgement, a status) must not wait for a large one's segment to fill.
set_tcp_nodelay true
max_inflight_messages 20
# Messages beyond the queue are dropped silently: it has room for all that a large fleet has in flight.
max_queued_messages {limits.messages}
max_queued_bytes {limits.queue}
max_inflight_bytes {_IN_FLIGHT * limits.packet}
# Unlike message_size_limit, which drops silently, this disconnects the sender.
max_packet_size {limits.packet}
# Includes retained messages, which no limit of a connection bounds.
memory_limit {limits.memory}
log_dest stdout
log_type error
log_type warning
log_type notice
# Only this level logs refusals. It also logs every packet: `mosquitto_command` filters those lines.
log_type debug
log_timestamp_format %Y-%m-%dT%H:%M:%S
"""


def mosquitto_command(program: str, conf: str, pipe: str) -> tuple[str, ...]:
    """Mosquitto's log is printed without the lines about forwarded packets.

    `pipe`: path at which the command makes a named pipe. The process that filters the log ends with
    Mosquitto. It has no environment variables, so that it is not taken for a process of the run.
    """
    return ("sh", "-c", _RUN_MOSQUITTO, "sh", program, conf, pipe)


def write_mosquitto(
    directory: Path,
    accounts: Mapping[str, Account],
    at: Listeners,
    identity: TlsIdentity | None = None,
    *,
    seen_at: str | None = None,
    limits: BrokerLimits | None = None,
) -> Path:
    """Write conf, passwd, acl, certificate and key; return the path of `mosquitto.conf`.

    `seen_at`: path of `directory` in the broker's container, if it is another.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    conf = directory / MOSQUITTO_CONF
    write_secret(conf, mosquitto_conf(at, seen_at or str(directory), limits or BrokerLimits()))
    write_secret(directory / "passwd", password_file(accounts))
    write_secret(directory / "acl", acl_file(accounts))
    _write_identity(directory, identity)
    return conf


def _write_identity(directory: Path, identity: TlsIdentity | None) -> None:
    if identity is not None:
        write_secret(directory / _CERTIFICATE, identity.certificate)
        write_secret(directory / _KEY, identity.key)


def write_embedded(
    directory: Path,
    accounts: Mapping[str, Account],
    at: Listeners,
    identity: TlsIdentity | None = None,
    *,
    limits: BrokerLimits | None = None,
) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hashed = [
        asdict(replace(account, password=hash_password(account.password)))
        for account in accounts.values()
    ]
    listeners: dict[str, dict[str, Any]] = {"default": {"type": "tcp", "bind": f"{at.host}:{at.port}"}}
    for number, (host, port) in enumerate(at.with_tls):
        listeners[f"tls-{number}"] = {
            "type": "tcp",
            "bind": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "ssl": True,
            "certfile": str(directory / _CERTIFICATE),
            "keyfile": str(directory / _KEY),
        }
    _write_identity(directory, identity)
    config = directory / "broker.json"
    content = {"listeners": listeners, "packet": (limits or BrokerLimits()).packet, "accounts": hashed}
    write_secret(config, json.dumps(content))
    return config


def read_embedded(path: Path) -> tuple[dict[str, Any], int, dict[str, Account]]:
    """Returns the listeners in amqtt's format, the maximum length of a packet in bytes, and the
    accounts, which hold password hashes instead of passwords."""
    config = json.loads(path.read_text(encoding="utf-8"))
    accounts = [Account(**entry) for entry in config["accounts"]]
    named = {account.username: account for account in accounts}
    return config["listeners"], config["packet"], named


def write_secret(path: Path, text: str) -> None:
    """Only this user may read the file. The permissions are set when the file is created, before it has
    any content."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
