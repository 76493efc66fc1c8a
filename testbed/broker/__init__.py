"""Broker of a run: accounts, rights, and the counting of refused messages and logins (`logins`),
configuration files (`configuration`), and a broker in Python for hosts without Mosquitto
(`embedded`).
"""

from testbed.broker.configuration import (
    BROKER,
    MOSQUITTO_CONF,
    SOCKET,
    TLS_SOCKET,
    BrokerLimits,
    Listeners,
    TlsIdentity,
    acl_file,
    mosquitto_command,
    mosquitto_conf,
    password_file,
    read_embedded,
    write_embedded,
    write_mosquitto,
    write_secret,
)
from testbed.broker.logins import (
    Account,
    accounts,
    covers,
    hash_password,
    init_user,
    is_password,
    refusals,
    router_user,
)

__all__ = [
    "BROKER",
    "MOSQUITTO_CONF",
    "SOCKET",
    "TLS_SOCKET",
    "Account",
    "BrokerLimits",
    "Listeners",
    "TlsIdentity",
    "accounts",
    "acl_file",
    "covers",
    "hash_password",
    "init_user",
    "is_password",
    "mosquitto_command",
    "mosquitto_conf",
    "password_file",
    "read_embedded",
    "refusals",
    "router_user",
    "write_embedded",
    "write_mosquitto",
    "write_secret",
]
