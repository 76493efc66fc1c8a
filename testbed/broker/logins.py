"""Accounts of a run's broker and their rights, and what the broker refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import BrokerAccess
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
    run: str, devices: Iterable[str], nodes: Iterable[str] = (), *, secure: bool = False
) -> dict[str, Account]:
    """Return username -> account, with new passwords. `nodes`: nodes that have a router.

    Clients may send messages to each other (keys and shares of masks) only with `secure` aggregation.
    The topics that a client may publish to are listed one by one, without wildcards, because the broker
    keeps a retained message per topic. Raises ValueError if a device has the name of an infrastructure
    account.
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
                *([topics.sums("+")] if secure else []),
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
                *([topics.key(name), topics.sums(name)] if secure else []),
                *(topics.share(other, name) for other in names if secure and other != name),
            ],
            [
                *(topics.model(name), topics.broadcast, topics.request(name)),
                *([topics.key("+"), topics.share(name, "+")] if secure else []),
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
