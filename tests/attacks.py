"""Attacks from inside a device of a live run, and what refuses each: by its client or by its init.

    python -m tests.attacks WHO FACTS      in the device: WHO is `client` or `init`, FACTS is JSON

prints a JSON line per attack: who, what, what refused it; null: nothing did. Where a broker stays silent
on what it refuses, `the broker, in silence` is what the attacker sees, and the run is to show the rest.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

SILENCE = "the broker, in silence"
_WAIT_SECONDS = 1.0
"""Seconds to wait for an answer, or for a message that should not come."""
_PATIENCE_SECONDS = 120.0
"""Seconds to wait for what has to come, on a busy host, too."""


class RefusedError(Exception):
    """The attack was refused; the message says by whom."""


@dataclass(frozen=True)
class Facts:
    """Addresses and credentials that an attacker may know."""

    run: str
    device: str
    other: str
    """Another device."""
    config: str
    """Path of the attacker's own configuration, with its login."""
    reachable: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Addresses and ports that no process in the device may reach, by their service."""
    server: str = ""
    """The server's address on the devices' network."""
    others_address: str = ""


Attack = Callable[[Facts], object]


# --- on the broker -------------------------------------------------------------------------------


@contextmanager
def logged_in(
    facts: Facts,
    *,
    client_id: str = "",
    user: str | None = None,
    password: str | None = None,
    will: str | None = None,
) -> Iterator[paho.Client]:
    """A session with the attacker's own login, unless told otherwise; the broker's answer is awaited."""
    login = json.loads(Path(facts.config).read_text())["broker"]
    answers: list[str] = []
    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        client_id,
        protocol=paho.MQTTv311,
        transport="unix" if login["host"].startswith("/") else "tcp",
    )
    if login["certificate"] is not None:
        client.tls_set_context(ssl.create_default_context(cadata=login["certificate"]))
    if user != "":
        client.username_pw_set(user or login["username"], password or login["password"])
    if will is not None:
        client.will_set(will, b"offline", 1, retain=True)
    client.on_connect = lambda _c, _d, _f, reason, _p: answers.append(str(reason))
    client.on_connect_fail = lambda *_: answers.append("no connection")
    client.connect(login["host"], login["port"])
    client.loop_start()
    try:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not answers and time.monotonic() < until:
            time.sleep(0.01)
        if answers != ["Success"]:
            raise RefusedError(f"the broker: {(answers or ['no answer'])[0]}")
        yield client
    finally:
        if will is not None:  # vanish, so that the will is carried out
            with suppress(Exception):
                client.socket().close()  # type: ignore[union-attr]
        else:
            client.disconnect()
        client.loop_stop()
        client._reset_sockets()  # those that wake its loop; else they wait for the garbage collector


def taking_over(whose: str) -> Attack:
    def attack(facts: Facts) -> None:
        with logged_in(facts, client_id=whose.format(**vars(facts))):
            raise RefusedError("the broker: another session than it asked for")  # the run shows it

    return named(attack, f"take over the session of {whose}")


def logging_in(user: str, password: str | None = None) -> Attack:
    def attack(facts: Facts) -> None:
        with logged_in(facts, user=user.format(**vars(facts)), password=password):
            pass

    return named(attack, f"log in as {user or 'nobody'}" + (" by a guess" if password else ""))


def leaving_a_will(topic: str) -> Attack:
    def attack(facts: Facts) -> None:
        with logged_in(facts, will=f"testbed/{facts.run}/{topic.format(**vars(facts))}"):
            raise RefusedError(SILENCE)

    return named(attack, f"leave a will on {topic}")


def reading_and_publishing(facts: Facts) -> Iterator[tuple[str, str | None]]:
    """Read and publish in one session: each login may have only one."""
    root = f"testbed/{facts.run}/"
    filters = [each if each.startswith(("#", "$")) else root + each for each in READ]
    filters = [each.format(**vars(facts)) for each in filters]
    own = {f"{root}{one}/{facts.device}" for one in ("model", "request", "control")} | {f"{root}model"}
    got: list[str] = []
    with logged_in(facts) as client:
        client.on_message = lambda _c, _d, message: got.append(message.topic)
        client.subscribe([(each, 1) for each in filters])
        for topic, payload, retain in PUBLISH:
            topic = root + topic.format(**vars(facts))
            _publish(client, topic, payload, retain=retain)
        time.sleep(_WAIT_SECONDS)
    for name, each in zip(READ, filters, strict=True):
        heard = any(paho.topic_matches_sub(each, topic) for topic in got if topic not in own)
        yield f"read {name}", None if heard else SILENCE
    for topic, _, retain in PUBLISH:
        yield f"publish {topic}{', retained' if retain else ''}", SILENCE


def _publish(client: paho.Client, topic: str, payload: bytes, *, retain: bool) -> None:
    """The client whose login this is may take its session back meanwhile: then once more."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            client.publish(topic, payload, 1, retain).wait_for_publish(5)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


# --- on the network ------------------------------------------------------------------------------


def reaching(what: str, *, bound: bool = False) -> Attack:
    """Connect to any of the addresses of `what`; `bound` to the interface, whatever the routes say."""

    def attack(facts: Facts) -> None:
        with ThreadPoolExecutor(16) as pool:
            tries = [pool.submit(connect, *where, bound=bound) for where in facts.reachable[what]]
        problems = [problem for each in tries if (problem := each.result())]
        if len(problems) == len(tries):
            raise RefusedError(f"the network: {problems[0]}")

    return named(attack, f"reach {what}" + (" past the routes" if bound else ""))


def connect(address: str, port: int, *, bound: bool) -> str | None:
    """Why no host at `address` answers; None: one does, be it by a refusal."""
    with closing(socket.socket()) as sock:
        sock.settimeout(_WAIT_SECONDS)
        if bound:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        try:
            sock.connect((address, port))
        except ConnectionRefusedError:
            return None
        except OSError as error:
            return str(error)
    return None


def taking_the_address(whose: str) -> Attack:
    """Take an address of another and let all hear of it, by requests of ARP from it."""

    def attack(facts: Facts) -> None:
        address = {"the server": facts.server, "another device": facts.others_address}[whose]
        (peer,) = {facts.server, facts.others_address} - {address}
        with (
            changed(f"addr add {address}/32 dev eth0", f"addr del {address}/32 dev eth0"),
            closing(socket.create_server((address, 8883))) as listening,
            closing(socket.socket()) as sock,
        ):
            sock.settimeout(_WAIT_SECONDS)
            sock.bind((address, 0))
            with suppress(OSError):
                sock.connect((peer, 8883))
                return
            listening.settimeout(_WAIT_SECONDS)
            try:
                while listening.accept()[1][0] == address:  # of this device itself
                    pass
            except TimeoutError as error:
                raise RefusedError("the network: nobody answers, and nobody comes") from error

    return named(attack, f"take the address of {whose}")


def take_another_mac(facts: Facts) -> None:
    """send under another device's MAC"""
    mac = Path("/sys/class/net/eth0/address").read_text().strip()
    with changed("link set eth0 address 02:42:0a:00:00:09", f"link set eth0 address {mac}"):
        problem = connect(facts.server, 8883, bound=False)
    if problem is not None:
        raise RefusedError(f"the network: {problem}")


@contextmanager
def changed(there: str, back: str) -> Iterator[None]:
    ip(there)
    try:
        yield
    finally:
        ip(back)


def ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(f"the kernel: {done.stderr.strip()}")


def past_the_router(facts: Facts) -> None:
    """reach what is behind the router by a route of its own"""
    for address, _ in facts.reachable["behind the router"]:
        ip(f"route replace {address}/32 via {facts.server}")
    try:
        reaching("behind the router")(facts)
    finally:
        for address, _ in facts.reachable["behind the router"]:
            ip(f"route del {address}/32")


# --- on the container ----------------------------------------------------------------------------


def opening(path: str, flags: int = os.O_RDONLY) -> Attack:
    def attack(_: Facts) -> None:
        os.close(os.open(path, flags))

    return named(attack, f"{'read' if flags == os.O_RDONLY else 'write'} {path}")


def running(command: str) -> Attack:
    def attack(_: Facts) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise RefusedError(f"the kernel: {(done.stderr or done.stdout).strip().splitlines()[-1]}")

    return named(attack, command)


def calling(what: str, number: int, *arguments: int | bytes) -> Attack:
    """A system call, by its number on x86-64."""

    def attack(_: Facts) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(number, *arguments) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return named(attack, what)


def ask_for_a_name(_: Facts) -> None:
    """have the engine ask the world for a name"""
    socket.getaddrinfo("example.com", 80)


def sniff(_: Facts) -> None:
    """hear what others send (a packet socket)"""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close()


def raw(_: Facts) -> None:
    """forge packets (a raw socket)"""
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).close()


def use_inits_socket(_: Facts) -> None:
    """use the socket of its init"""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.connect("/testbed/control/broker.socket")


def become_root(_: Facts) -> None:
    """become root"""
    os.setuid(0)


def kill_init(_: Facts) -> None:
    """stop its init"""
    os.kill(1, 19)


def find_others_files(facts: Facts) -> None:
    """find files of others"""
    found = [path for path in Path("/testbed").rglob("*") if facts.other in path.name]
    found += [path for path in (Path("/testbed/passwd"), Path("/control")) if path.exists()]
    if not found:
        raise RefusedError("the mounts: there are none")


def named(attack: Attack, name: str) -> Attack:
    attack.__doc__ = name
    return attack


_UPDATE = b"\x00" * 64
READ = ("#", "update/+", "model/{other}", "control/+", "status/+", "telemetry/+", "$SYS/#")
PUBLISH = (
    ("update/{other}", _UPDATE, False),
    ("status/{other}", b"offline", False),
    ("status/{other}", b"offline", True),
    ("status/aggregator", b"over", True),
    ("model", _UPDATE, True),
    ("model/{other}", _UPDATE, True),
    ("request/{other}", b"stop", False),
    ("control/{other}", b'{"do": "crash"}', False),
    ("control/aggregator", b'{"do": "stop"}', False),
    ("telemetry/{other}", b"{}", False),
    ("failure/router", b"forged", False),
)
ON_THE_BROKER: Sequence[Attack] = (
    *map(taking_over, ("aggregator", "controller", "router", "{other}", "init/{other}")),
    logging_in("aggregator", "guess"),
    *map(logging_in, ("controller", "{other}", "init/{other}", "")),
    *map(leaving_a_will, ("status/{other}", "status/aggregator")),
)
ON_THE_NETWORK: Sequence[Attack] = (
    *map(reaching, ("the host", "another device", "behind the router")),
    reaching("the host", bound=True),
    reaching("behind the router", bound=True),
    ask_for_a_name,
)
ON_THE_CONTAINER: Sequence[Attack] = (
    sniff,
    raw,
    find_others_files,
    *map(opening, ("/var/run/docker.sock", "/run/docker.sock", "/dev/mem", "/dev/kmsg", "/dev/sda")),
    opening("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    opening("/proc/sysrq-trigger", os.O_WRONLY),
    opening("/proc/sys/net/ipv4/ip_forward", os.O_WRONLY),
    opening("/etc/passwd", os.O_WRONLY),
    opening("/testbed/shard.safetensors", os.O_WRONLY),
    opening("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.O_WRONLY),
    opening("/sys/fs/cgroup/cpu.max", os.O_WRONLY),
    calling("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0),
    running("mknod /tmp/disk b 8 0"),
    running("unshare --net true"),
    running("unshare --user true"),
    calling("go before others", 141, 0, 0, -5),
    calling("load a kernel module", 175, 0, 0, b""),
    calling("restart the host", 169, 0xFEE1DEAD, 672274793, 0, 0),
    calling("set the host's clock", 227, 0, 0),
    calling("run a program in the kernel", 321, 5, b"\0" * 128, 128),
    calling("enter the host's namespaces", 308, 0, 0x40000000),
    calling("rename the host", 170, b"mine", 4),
)
ATTACKS_AT_ONCE: dict[str, Sequence[Attack]] = {
    "client": (
        *ON_THE_BROKER,
        logging_in("init/{device}"),
        *ON_THE_NETWORK,
        *ON_THE_CONTAINER,
        become_root,
        kill_init,
        use_inits_socket,
        *map(opening, ("/testbed/device.json", "/proc/1/environ", "/proc/1/mem", "/proc/1/maps")),
        opening("/proc/1/fd/3"),
        calling("trace its init", 101, 16, 1, 0, 0),
        running("tc qdisc del dev eth0 root"),
        running("ip addr add 10.9.8.7/32 dev eth0"),
        running("ip link set eth0 down"),
    ),
    "init": (
        *ON_THE_BROKER,
        logging_in("{device}"),
        *ON_THE_NETWORK,
        *ON_THE_CONTAINER,
    ),
}
ATTACKS_IN_TURN: dict[str, Sequence[Attack]] = {
    "client": (),
    "init": (
        taking_the_address("the server"),
        taking_the_address("another device"),
        take_another_mac,
        past_the_router,
    ),
}
"""Attacks that change the interface, which the others use."""


def reconnected(log: str) -> set[str]:
    """Return the logins used more than once, according to Mosquitto's log."""
    logins = Counter(re.findall("New client connected from .* as ([^ ]+) ", log))
    return {name for name, times in logins.items() if times > 1}


def refused_by(attack: Attack, facts: Facts) -> str | None:
    try:
        attack(facts)
    except RefusedError as refusal:
        return str(refusal)
    except OSError as error:
        return f"the kernel: {error.strerror or error}"
    return None


def main() -> None:
    who, facts = sys.argv[1], Facts(**json.loads(sys.argv[2]))
    for name, refusal in made(ATTACKS_AT_ONCE[who], facts, ATTACKS_IN_TURN[who]):
        told = json.dumps({"who": who, "attack": name, "refused by": refusal})
        sys.stdout.write(f"{told}\n")


def made(
    at_once: Sequence[Attack], facts: Facts, in_turn: Sequence[Attack] = ()
) -> Iterator[tuple[str, str | None]]:
    """Each attack, and what refused it."""
    with ThreadPoolExecutor(16) as pool:
        refusals = list(pool.map(partial(refused_by, facts=facts), at_once))
    for attack, refusal in zip(at_once, refusals, strict=True):
        yield attack.__doc__ or "", refusal
    yield from reading_and_publishing(facts)
    for attack in in_turn:
        yield attack.__doc__ or "", refused_by(attack, facts)


if __name__ == "__main__":
    main()
