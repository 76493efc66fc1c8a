"""The broker of a run where Mosquitto is not installed: amqtt in a process of its own.

Run as `python -m testbed.broker.embedded CONFIG.json`; it serves until it is ended. Same accounts and
rights as Mosquitto, at a fraction of its throughput.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amqtt.broker import Broker
from amqtt.contexts import Action

from testbed.broker import Account, is_password, read_embedded


class RunBroker(Broker):  # type: ignore[misc]  # amqtt is not typed
    """amqtt with the accounts of a run instead of plugins.

    amqtt calls plugins in tasks. If another client connects or leaves meanwhile, its iteration over the
    subscriptions breaks off ("dictionary changed size"), and the remaining subscribers get nothing. And
    it checks no rights for last wills and retained messages. Hence these overrides. Should a later amqtt
    no longer call them, its own `_authenticate`, which finds no plugin, refuses everyone.
    """

    def __init__(self, host: str, port: int, accounts: Mapping[str, Account]) -> None:
        """`accounts` hold password hashes in place of the passwords."""
        self._accounts = accounts
        listener = {"type": "tcp", "bind": f"{host}:{port}"}
        super().__init__({"listeners": {"default": listener}, "plugins": {}})

    async def _authenticate(self, session: Any, _: Any) -> bool:
        account = self._accounts.get(session.username or "")
        if account is None or not is_password(session.password or "", account.password):
            return False
        return not session.will_flag or account.may_publish(session.will_topic)

    async def _topic_filtering(self, session: Any, topic: str, action: Action) -> bool:
        account = self._accounts.get(session.username or "")
        if account is None:
            return False
        return account.may_publish(topic) if action is Action.PUBLISH else account.may_read(topic)

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Any
    ) -> None:
        """Called at a SUBSCRIBE, and at a login for every subscription of *every* session."""
        subscribers = self._subscriptions.get(subscription[0], [])
        if any(subscriber is session for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)


async def serve(host: str, port: int, accounts: Mapping[str, Account]) -> None:
    """Serve until cancelled."""
    await RunBroker(host, port, accounts).start()
    print(f"listening on {host}:{port}", flush=True)  # noqa: T201  # stdout is the log
    await asyncio.Event().wait()


def worth_logging(record: logging.LogRecord) -> bool:
    """False for what is no fault here: port probes, and slow devices that acknowledge late."""
    late = record.exc_info is not None and isinstance(record.exc_info[1], TimeoutError)
    return not (late or any(phrase in record.getMessage() for phrase in ("No data", "PUBACK")))


def main(config: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger().handlers[0].addFilter(worth_logging)
    asyncio.run(serve(*read_embedded(Path(config))))


if __name__ == "__main__":
    main(sys.argv[1])
