"""Broker of a run: accounts and rights (`logins`), configuration files (`configuration`), counting of
refused messages and logins (`mosquitto_log`), and a broker in Python for hosts without Mosquitto
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
    router_user,
)
from testbed.broker.mosquitto_log import refusals

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
