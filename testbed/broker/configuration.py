"""The broker's configuration files: of Mosquitto, and of the embedded one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.mqtt import chunks
from testbed.broker.logins import Account, hash_password

BROKER = "broker"
"""Name of the broker as a component of a run, beside AGGREGATOR and CONTROLLER."""
_IN_FLIGHT = 4
"""Largest packets that one connection may have to acknowledge: the broker holds them twice."""
MOSQUITTO_CONF = "mosquitto.conf"
SOCKET = "broker.socket"
"""Name of the broker's Unix socket."""
_CERTIFICATE, _KEY = "certificate.pem", "key.pem"
# Mosquitto would hand the memory of each large message back, to be zeroed for the next: most of what it
# costs. It keeps up to 64 MiB of what it has freed, as `agents.process` has it of ours.
_RUN_MOSQUITTO = """\
rm -f "$3" && mkfifo "$3" || exit
env -i grep --line-buffered -vE '^[^ ]*: (Sending |Received P)' < "$3" &
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=67108864
exec "$1" -c "$2" > "$3"
"""


_CONNECTION = 16 * 2**20
"""Bytes of small messages that may wait for one connection."""
_BROKER = 64 * 2**20
"""Bytes of the broker itself, at most."""
_TOPICS = 8
"""More than a device may publish to, beside the shares of the other devices."""
_RIGHT = 256
"""Bytes that Mosquitto takes for a line of its access list, at most."""


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What one connection may cost the broker, in bytes: who exceeds that harms itself. And what all of
    them may."""

    packet: int = 128 * 2**20
    """Whoever sends a larger MQTT packet is disconnected."""
    queue: int = 2**30
    """What waits for one that reads or acknowledges slowly; a message beyond it is lost to that one."""
    messages: int = 10_000
    """How many may wait: of QoS 0, Mosquitto counts the messages alone, and not their bytes."""
    memory: int = 2**33
    """Of all messages, sessions and rights. Whoever sends what there is no room for is disconnected, and
    sends it again once it is back."""

    @classmethod
    def of(cls, parameters: int, devices: int, beside: float = 0.0, hostile: int = 1) -> BrokerLimits:
        """Of a run with so many parameters: a model with a header, or the largest chunk of one, and two
        models from each device, or as many as `beside`, beside small messages.

        Memory is for two models to each device and from it, and `beside`, with small messages for each;
        and for the largest message on every topic that each of so many `hostile` clients may have one
        kept on. A usual run has one model under way to or from each device.
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
        """Bytes for a container of the broker: with what the allocator keeps of freed memory, TLS, and
        the kernel's buffers of sockets, it is far from it where Mosquitto is at its own limit."""
        return 2 * self.memory + 2 * _BROKER


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The broker's certificate, which is signed by itself, and its private key: both PEM."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where a broker listens."""

    host: str
    port: int
    """Without TLS: of what devices cannot hear."""
    tls_port: int | None = None
    """Of the clients; None: theirs is `port` too."""
    socket: str | None = None
    """Path of a Unix socket, which its user and group may use."""

    @property
    def clients_port(self) -> int:
        return self.tls_port or self.port


def password_file(accounts: Mapping[str, Account]) -> str:
    """Mosquitto's password file, with fresh salts; it holds hashes alone."""
    return "".join(
        f"{account.username}:{hash_password(account.password)}\n" for account in accounts.values()
    )


def acl_file(accounts: Mapping[str, Account]) -> str:
    """Mosquitto's access list: what no line allows is denied."""
    lines: list[str] = []
    for account in accounts.values():
        lines.append(f"user {account.username}")
        lines += [f"topic write {topic}" for topic in account.publish]
        lines += [f"topic read {topic}" for topic in account.subscribe]
    return "\n".join(lines) + "\n"


def mosquitto_conf(at: Listeners, directory: str, limits: BrokerLimits) -> str:
    """Mosquitto's configuration, for version 2.0 on.

    `directory` is the path of its files as the broker sees it.
    """
    # Else a login could ask for another's id, and with that end or take over its session.
    named = "use_username_as_clientid true\n"
    listeners = f"listener {at.port} {at.host}\n{named}"
    if at.tls_port is not None:
        files = f"certfile {directory}/{_CERTIFICATE}\nkeyfile {directory}/{_KEY}\n"
        listeners += f"listener {at.tls_port} {at.host}\n{named}{files}tls_version tlsv1.3\n"
    if at.socket is not None:
        listeners += f"listener 0 {at.socket}\n{named}"
    return f"""\
{listeners}\
allow_anonymous false
password_file {directory}/passwd
acl_file {directory}/acl
# Started as root it would change to a user that may not read these files.
user root
# The run's state ends with the run.
persistence false
sys_interval 0
# A small message (an acknowledgement, a status) must not wait for a large one's segment to fill.
set_tcp_nodelay true
max_inflight_messages 20
# A message beyond the queue is lost in silence: room for all that a large fleet has under way.
max_queued_messages {limits.messages}
max_queued_bytes {limits.queue}
max_inflight_bytes {_IN_FLIGHT * limits.packet}
# Unlike message_size_limit, which drops in silence, this disconnects the sender.
max_packet_size {limits.packet}
# Also of what is retained, which no limit of a connection bounds.
memory_limit {limits.memory}
log_dest stdout
log_type error
log_type warning
log_type notice
# Refusals are told here only, among a line for each packet: `mosquitto_command` leaves these out.
log_type debug
log_timestamp_format %Y-%m-%dT%H:%M:%S
"""


def mosquitto_command(program: str, conf: str, pipe: str) -> tuple[str, ...]:
    """Command that runs Mosquitto with its log on stdout, without the lines on packets that are passed
    on. `pipe` is the path of a pipe to be made. The filter ends by itself, and bears no marks of a run.
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
    """Write conf, passwd, acl, certificate and key into `directory`; return the path of the conf.

    `seen_at` is the directory's path as the broker sees it, where it is mounted in a container.
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
    """Write the files of `testbed.broker.embedded` into `directory`; return its configuration."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hashed = [
        asdict(replace(account, password=hash_password(account.password)))
        for account in accounts.values()
    ]
    listeners: dict[str, dict[str, Any]] = {"default": {"type": "tcp", "bind": f"{at.host}:{at.port}"}}
    if at.tls_port is not None:
        listeners["tls"] = {
            "type": "tcp",
            "bind": f"{at.host}:{at.tls_port}",
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
    """Read the file of `write_embedded`: listeners as amqtt has them, bytes of the largest packet, and
    accounts with hashes in place of passwords."""
    config = json.loads(path.read_text(encoding="utf-8"))
    accounts = [Account(**entry) for entry in config["accounts"]]
    named = {account.username: account for account in accounts}
    return config["listeners"], config["packet"], named


def write_secret(path: Path, text: str) -> None:
    """Write `text` to a file that only this user may read, from the first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
