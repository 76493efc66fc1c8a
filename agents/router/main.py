"""Process of the router, which runs in its own container between the devices and the broker.

    python -m agents.router.main CONFIG

Devices connect to the router as if it were the broker. It forwards their connections under its own
address, so that neither side needs a route. A device whose packets are delayed or lost has two queues,
one per direction, in which the delay line holds them. Segments that devices share are shaped by the
kernel (`agents.router.segments`).

The router runs outside the devices' CPU quotas, because a delay line that waits for CPU time delivers
late. It holds NET_ADMIN only in the network namespace of its container, which is removed with the
container. It fails closed: while it does not run, no packet passes.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agents import config, disturbances
from agents.config import RouterConfig
from agents.device.delayline import DelayServer, Impairment, QueueError
from agents.device.link import LinkError, interface_towards, run
from agents.device_actions import Disconnect, Reconnect, SetBackground, SetLink
from agents.disturbances import retry
from agents.mqtt import topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.router.network import Network
from agents.wire import messages
from agents.wire.messages import DeviceOrder, MeasureOrder, MessageError, NetworkStart

_RESOLVE_TIMEOUT_SECONDS = 30.0
"""Maximum until the name service resolves a host."""
_LOOK_SECONDS = 0.5
"""Seconds between two checks for a new address of a restarted server."""
_USE_SECONDS = 1.0
"""Seconds between two reports of the segments' use."""
_TABLES = ("iptables", "iptables-legacy")


def main() -> None:
    cfg = config.load(RouterConfig, Path(sys.argv[1]))
    try:
        Router(cfg).run()
    except (LinkError, QueueError, ConnectionFailedError, OSError) as error:
        sys.exit(f"router: {error}")


def impairment(link: Mapping[str, float]) -> Impairment:
    """One direction: half of the round-trip time; jitter and loss are already per direction."""
    return Impairment(link.get("rtt", 0.0) / 2, link.get("jitter", 0.0), link.get("loss", 0.0))


def forwarding_rules(targets: Mapping[str, int], inside: str, outside: str) -> list[list[str]]:
    """Forward the servers' ports on `inside`, the devices' interface, to the servers on `outside`. All
    other packets are dropped, even if a device uses the router as its gateway. `targets`: port of each
    server, by address."""
    ways = [
        (f"-i {inside} -p {protocol}", f"--dport {port}", address, port)
        for address, port in targets.items()
        for protocol in ("tcp", "udp")
    ]
    return [
        ["-P", "FORWARD", "DROP"],
        f"-A FORWARD -i {outside} -o {inside} -j ACCEPT".split(),
        *(f"-A FORWARD {where} -d {at} {to} -j ACCEPT".split() for where, to, at, _ in ways),
        *(
            f"-t nat -A PREROUTING {where} {to} -j DNAT --to-destination {at}:{port}".split()
            for where, to, at, port in ways
        ),
        f"-t nat -A POSTROUTING -o {outside} -j MASQUERADE".split(),
    ]


def new_forwarding_rules(targets: Mapping[str, int], inside: str, outside: str) -> list[list[str]]:
    """Replace earlier `forwarding_rules`, but not the POSTROUTING chain, which also has a rule of the
    engine's name service."""
    rules = forwarding_rules(targets, inside, outside)
    stays = [rule for rule in rules if "POSTROUTING" in rule]
    return [
        ["-F", "FORWARD"],
        ["-t", "nat", "-F", "PREROUTING"],
        *(rule for rule in rules if rule not in stays),
    ]


def queue_rules(address: str, up: int, down: int) -> list[list[str]]:
    """Send the device's packets to the NFQUEUEs `up` and `down`: those that the router forwards, and the
    ICMP echoes that measure the link."""
    return [
        f"-t mangle -A FORWARD -s {address} -j NFQUEUE --queue-num {up}".split(),
        f"-t mangle -A FORWARD -d {address} -j NFQUEUE --queue-num {down}".split(),
        f"-t mangle -A INPUT -s {address} -p icmp -j NFQUEUE --queue-num {up}".split(),
        f"-t mangle -A OUTPUT -d {address} -p icmp -j NFQUEUE --queue-num {down}".split(),
    ]


def iptables() -> list[str]:
    """iptables that works with this kernel, with the option to wait for its lock. Raises LinkError if
    none works."""
    problem = ""
    for name in _TABLES:
        command = [name, "-w"]
        try:
            run([*command, "-t", "nat", "-S"])
            run([*command, "-t", "mangle", "-S"])
        except (LinkError, OSError) as error:
            problem = problem or str(error)
        else:
            return command
    raise LinkError(f"the kernel does not accept iptables rules: {problem}")


class Router:
    """Router for all devices of a run, or for the devices of one node."""

    def __init__(self, cfg: RouterConfig) -> None:
        self._config = cfg
        self._links = {name: dict(cfg.links.get(name, {})) for name in cfg.addresses}
        self._queues = {name: (2 * k, 2 * k + 1) for k, name in enumerate(cfg.addresses)}
        """Queues (up, down), by device."""
        self._queued: set[str] = set()
        """Devices with iptables' rules for their queues, which are added when the link first needs
        them."""
        self._iptables = iptables()
        self._topics = topics.Topics(cfg.run)
        self._network = Network(cfg) if cfg.attached else None
        impairments = {
            queue: self._impairments(name) for name, queues in self._queues.items() for queue in queues
        }
        uniform = random.Random(cfg.seed).random  # noqa: S311
        self._delays = DelayServer(impairments, uniform)
        control = self._topics.control(topics.ROUTER)
        self._connection = Connection(cfg.broker, [control], self._carry_out)
        self._refusals = messages.Refusals(self._fail)

    def run(self) -> None:
        """Route packets until SIGTERM. Raises LinkError, QueueError, ConnectionFailedError."""
        signal.signal(signal.SIGTERM, lambda *_: self._delays.stop())
        found = {
            host: retry(partial(socket.gethostbyname, host), _RESOLVE_TIMEOUT_SECONDS)
            for host in self._config.targets
        }
        outside = interface_towards(next(iter(found.values())))
        inside = interface_towards(next(iter(self._config.addresses.values())))
        # Without segmentation offload: it would lose or delay up to 64 KiB of TCP data as one packet.
        run(f"ip link set dev {inside} gso_max_segs 1".split())
        for name in self._links:
            if self._impairments(name):
                self._send_to_queues(name)
        probe = None if self._network is None else self._network.set_up(inside)
        # Forwarding is enabled last, so that no packet passes without its impairment.
        for rule in forwarding_rules(self._targets(found), inside, outside):
            run([*self._iptables, *rule])
        self._connection.open()
        ready = messages.encode(messages.Status(topics.ROUTER, "ready"))
        self._connection.publish_status(self._topics.status(topics.ROUTER), ready)
        if probe is not None:
            self._connection.publish(self._topics.telemetry(topics.ROUTER), messages.encode(probe))
            threading.Thread(target=self._report_use, args=(self._network,), daemon=True).start()
        disturbances.Standstills().watch(self._report_standstill)
        if self._config.several:
            threading.Thread(target=self._follow, args=(found, inside, outside), daemon=True).start()
        try:
            self._delays.serve()
        finally:
            self._connection.close()
            self._delays.close()
            if self._network is not None:
                self._network.close()

    def _targets(self, addresses: Mapping[str, str]) -> dict[str, int]:
        """Port of each server, by address. `addresses`: IP address of each server, by host name."""
        return {addresses[host]: port for host, port in self._config.targets.items()}

    def _follow(self, addresses: Mapping[str, str], inside: str, outside: str) -> None:
        """Forward to a server's new address after a Swarm has restarted it."""
        known = dict(addresses)
        while True:
            time.sleep(_LOOK_SECONDS)
            found = dict(known)
            for host in known:
                with contextlib.suppress(OSError):  # not restarted yet
                    found[host] = socket.gethostbyname(host)
            if found == known:
                continue
            known = found
            try:
                for rule in new_forwarding_rules(self._targets(known), inside, outside):
                    run([*self._iptables, *rule])
            except LinkError as error:
                self._fail(str(error))

    def _send_to_queues(self, name: str) -> None:
        for rule in queue_rules(self._config.addresses[name], *self._queues[name]):
            run([*self._iptables, *rule])
        self._queued.add(name)

    def _carry_out(self, message: ReceivedMessage) -> None:
        """In paho's thread. If an order fails, report that; the link or segment then stays as it was."""
        try:
            match messages.decode(self._topics, message.topic, message.payload):
                case DeviceOrder(device, SetLink(changes)) if device in self._links:
                    self._change(device, changes)
                case DeviceOrder(
                    name, (SetLink() | SetBackground() | Disconnect() | Reconnect()) as action
                ) if self._network is not None and name in self._network.segments:
                    for device in self._network.act(name, action):
                        self._apply(device)
                case NetworkStart(run_time):
                    if self._network is not None:
                        self._network.start(run_time)
                case MeasureOrder(names) if self._network is not None:
                    measuring = partial(self._measure_again, self._network, names)
                    threading.Thread(target=measuring, daemon=True).start()
                case DeviceOrder() if self._config.several:
                    pass  # a device or segment of another router
                case _:
                    raise MessageError("expected a change of a link or segment of the router's run")
        except MessageError as error:
            self._refusals.add(message.topic, error)
        except (LinkError, OSError) as error:
            self._fail(str(error))

    def _measure_again(self, network: Network, names: Sequence[str]) -> None:
        """Measure and publish those of `names` that this router shapes."""
        try:
            if own := network.segments.keys() & names:
                found = messages.encode(network.measure(own))
                self._connection.publish(self._topics.telemetry(topics.ROUTER), found)
        except Exception as error:  # noqa: BLE001  (in a thread)
            self._fail(str(error))

    def _report_use(self, network: Network) -> None:
        """Publish the use every second."""
        while True:
            time.sleep(_USE_SECONDS)
            try:
                if (use := network.use(time.monotonic())) is not None:
                    topic = self._topics.telemetry(topics.ROUTER)
                    self._connection.publish(topic, messages.encode(use))
            except Exception as error:  # noqa: BLE001  (in a thread)
                self._fail(str(error))
                return

    def _report_standstill(self, since: float, at: float) -> None:
        found = messages.Disturbance(topics.ROUTER, at, since, "the router stood still")
        self._connection.publish(self._topics.telemetry(topics.ROUTER), messages.encode(found))

    def _fail(self, reason: str) -> None:
        sys.stderr.write(f"router: {reason}\n")
        failure = messages.Failure(topics.ROUTER, reason)
        self._connection.publish(self._topics.failure(topics.ROUTER), messages.encode(failure))

    def _change(self, name: str, changes: Mapping[str, Any]) -> None:
        self._links[name] |= changes
        self._apply(name)

    def _apply(self, name: str) -> None:
        """Apply the impairments of the device's link and segments to packets from now on."""
        for queue in self._queues[name]:
            self._delays.change(queue, self._impairments(name))
        if name not in self._queued:
            self._send_to_queues(name)

    def _impairments(self, name: str) -> list[Impairment]:
        """Return what the packets of the device pass in each direction, on its link and its segments."""
        own = impairment(self._links[name])
        shared = [] if self._network is None else self._network.impairments(name)
        return [*([] if own == Impairment() else [own]), *shared]


if __name__ == "__main__":
    main()
