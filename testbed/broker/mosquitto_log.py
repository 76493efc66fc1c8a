"""Logins, messages, last wills and subscriptions that a Mosquitto broker refused, read from its log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from testbed.broker.logins import Account

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
