"""Accounts of a run's broker, the rights of each, and the broker's configuration files.

Accounts last as long as their run. The login, never a payload, decides who a message comes from: a
client can publish under its own name only, and read only what is addressed to it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from agents.config import Broker
from agents.topics import AGGREGATOR, CONTROLLER, ROUTER, Topics

BROKER = "broker"
"""Name of the broker as a part of a run, beside AGGREGATOR and CONTROLLER."""
MAX_PACKET = 128 * 2**20
"""Bytes of the largest MQTT packet: a model of 33 million float32 parameters."""
_ITERATIONS = 101
"""Mosquitto's own default. Stretching protects guessable passwords; ours are 192 random bits."""


@dataclass(frozen=True, slots=True)
class Account:
    """A login and its rights: topic filters, in which `+` stands for any one level."""

    username: str
    password: str = field(repr=False)
    publish: Sequence[str]
    subscribe: Sequence[str]

    def may_publish(self, topic: str) -> bool:
        return any(covers(pattern, topic) for pattern in self.publish)

    def may_read(self, topic: str) -> bool:
        """Whether it may receive `topic`, or subscribe to the filter `topic`."""
        return any(covers(pattern, topic) for pattern in self.subscribe)

    def at(self, host: str, port: int) -> Broker:
        """Connection settings for a login with this account."""
        return Broker(host, port, self.username, self.password)


def init_user(device: str) -> str:
    """Username of a device's init: the emulator's part of the device, apart from the FL client's."""
    return f"init/{device}"


def accounts(run: str, devices: Iterable[str]) -> dict[str, Account]:
    """Every account of `run` by username, with fresh passwords.

    Raises ValueError for a device that is named like one of the infrastructure's accounts.
    """
    names, topics = list(devices), Topics(run)
    if reserved := {AGGREGATOR, CONTROLLER, ROUTER}.intersection(names):
        raise ValueError(f"no device may be called {' or '.join(sorted(reserved))}")
    rights = {
        AGGREGATOR: (
            [
                topics.status(AGGREGATOR),
                topics.broadcast,
                *map(topics.model, names),
                *map(topics.request, names),
            ],
            [topics.update("+"), topics.status("+"), topics.control(AGGREGATOR)],
        ),
        CONTROLLER: (
            [topics.control("+")],
            [topics.status("+"), topics.telemetry("+"), topics.failure("+")],
        ),
        ROUTER: ([topics.status(ROUTER), topics.failure(ROUTER)], [topics.control(ROUTER)]),
    }
    for name in names:
        rights[name] = (
            [topics.update(name), topics.status(name)],
            [topics.model(name), topics.broadcast, topics.request(name)],
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
    """Whether the filter `pattern` matches every topic that `topic`, a topic or a filter, stands for."""
    patterns, levels = pattern.split("/"), topic.split("/")
    return len(patterns) == len(levels) and all(
        part == level or (part == "+" and level != "#")
        for part, level in zip(patterns, levels, strict=True)
    )


def hash_password(password: str, salt: bytes | None = None) -> str:
    """Hash in the format of Mosquitto's password file: `$7$`, PBKDF2 with SHA-512; by default with a
    fresh salt."""
    salt = os.urandom(12) if salt is None else salt
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    encoded = (base64.b64encode(part).decode() for part in (salt, digest))
    return f"$7${_ITERATIONS}${'$'.join(encoded)}"


def is_password(password: str, hashed: str) -> bool:
    """Whether `hashed` was made from `password`."""
    salt = base64.b64decode(hashed.split("$")[3])
    return hmac.compare_digest(hash_password(password, salt).encode(), hashed.encode())


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


def mosquitto_conf(host: str, port: int, directory: str) -> str:
    """Mosquitto's configuration, for version 2.0 on.

    `directory` is the path of its files as the broker sees it; `host` the address it binds to.
    """
    return f"""\
listener {port} {host}
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
max_queued_messages 10000
# Unlike message_size_limit, which drops in silence, this disconnects the sender.
max_packet_size {MAX_PACKET}
log_dest stdout
log_type error
log_type warning
log_type notice
log_timestamp_format %Y-%m-%dT%H:%M:%S
"""


def write_mosquitto(
    directory: Path,
    accounts: Mapping[str, Account],
    host: str,
    port: int,
    *,
    seen_at: str | None = None,
) -> Path:
    """Write conf, passwd and acl into `directory`; return the path of the conf.

    `seen_at` is the directory's path as the broker sees it, where it is mounted in a container.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    conf = directory / "mosquitto.conf"
    write_secret(conf, mosquitto_conf(host, port, seen_at or str(directory)))
    write_secret(directory / "passwd", password_file(accounts))
    write_secret(directory / "acl", acl_file(accounts))
    return conf


def write_embedded(path: Path, accounts: Mapping[str, Account], host: str, port: int) -> Path:
    """Write the configuration of `testbed.broker.embedded`; return `path`."""
    hashed = [
        asdict(replace(account, password=hash_password(account.password)))
        for account in accounts.values()
    ]
    write_secret(path, json.dumps({"host": host, "port": port, "accounts": hashed}))
    return path


def read_embedded(path: Path) -> tuple[str, int, dict[str, Account]]:
    """Read the file of `write_embedded`: host, port, and accounts with hashes in place of passwords."""
    config = json.loads(path.read_text(encoding="utf-8"))
    accounts = [Account(**entry) for entry in config["accounts"]]
    return config["host"], config["port"], {account.username: account for account in accounts}


def write_secret(path: Path, text: str) -> None:
    """Write `text` to a file that only this user may read, from the first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
