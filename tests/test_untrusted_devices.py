"""Real devices whose clock is wrong, whose programs are hostile, and machines that are no part of the
run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.timing.clock_sync import Estimate
from tests.conftest import unavailable
from tests.running import Finished, Testbed, started, until_printed
from tests.ssh_servers import SshServers, servers, write_with_real_devices
from tests.waiting import eventually

PORT = 18_894
SKEW, DRIFT = 80_000_000, 50e-6
"""Error of the clock of the real devices: nanoseconds at the start, and seconds per second."""
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, found);
    if (code == 0 && which == CLOCK_MONOTONIC) {
        long long ns = found->tv_sec * 1000000000LL + found->tv_nsec;
        ns += 80000000LL + (ns - BEGIN) / 20000;
        found->tv_sec = ns / 1000000000LL;
        found->tv_nsec = ns % 1000000000LL;
    }
    return code;
}
"""
STRANGER = """
import json, socket, ssl, sys, time
import paho.mqtt.client as mqtt
said = json.load(sys.stdin)
where = said["host"], said["port"]
found = {}
with socket.create_connection(where, 5) as plain:
    plain.settimeout(5)
    plain.sendall(bytes.fromhex("100f00044d5154540402003c000361626300"))
    try:
        found["plain"] = plain.recv(4).hex()
    except OSError as error:
        found["plain"] = ""
context = ssl.create_default_context(cadata=said["certificate"])
def connected(name, password):
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="stranger")
    client.tls_set_context(context)
    if name:
        client.username_pw_set(name, password)
    codes, granted, messages = [], [], []
    client.on_connect = lambda c, u, f, code, p: codes.append(code.value)
    client.on_subscribe = lambda c, u, m, each, p: granted.extend(one.value for one in each)
    client.on_message = lambda c, u, message: messages.append(message.topic)
    client.connect(*where)
    client.loop_start()
    end = time.monotonic() + 5
    while not codes and time.monotonic() < end:
        time.sleep(0.05)
    if codes == [0]:
        client.subscribe([("#", 1), (said["other"], 1)])
        client.publish(said["forged"], b"x", 1)
        time.sleep(3)
    client.disconnect()
    client.loop_stop()
    return codes, messages
found["nobody"] = connected("", "")[0]
found["wrong"] = connected(said["user"], "guess")[0]
found["as another"] = connected(said["user"], said["password"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def begin() -> int:
    """Time in ns at which the clock of the real devices is wrong by SKEW."""
    return time.monotonic_ns()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, begin: int) -> Iterator[SshServers]:
    folder = tmp_path_factory.mktemp("hosts")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    command = ["cc", "-shared", "-fPIC", f"-DBEGIN={begin}LL", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        unavailable("ssh", f"no C compiler: {error}")
    with servers(folder, ("pi1", "stranger"), f" LD_PRELOAD={library}") as found:
        yield found


@pytest.fixture(autouse=True)
def ssh(hosts: SshServers, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.repair()
    monkeypatch.setenv("TESTBED_SSH", hosts.ssh)


def topology(folder: Path, hosts: SshServers, python: str, **changes: Any) -> Path:
    pi = {"name": "pi", "hosts": ["root@pi1"], "python": python}
    return write_with_real_devices(folder, hosts, PORT, pi, **changes)


@pytest.mark.timed
def test_wrong_clock_is_corrected_and_strangers_are_refused(
    hosts: SshServers, begin: int, tmp_path: Path
) -> None:
    machine = hosts.machines[0]
    file = topology(tmp_path, hosts, sys.executable, stop={"after": "16s"})
    errors, claimed = [], []
    with started("up", file, "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        refused = by_a_stranger(hosts, tmp_path / "runs")
        (estimate,) = machine.home.rglob("clock.json")
        end = time.monotonic() + 6
        while time.monotonic() < end:
            found = Estimate.from_dict(json.loads(estimate.read_text()))
            now = time.monotonic_ns()
            own = now + SKEW + round((now - begin) * DRIFT)
            errors.append(abs(found.other(own) - now) / 1e6)
            claimed.append(found.uncertainty / 1e6)
            time.sleep(0.2)
        output, _ = up.communicate(timeout=100)
    assert up.returncode == 0, output
    assert max(errors) < 1, (errors, claimed)
    codes, messages = refused.pop("as another")
    assert (set(codes), messages) == ({0}, [])  # it may connect, but neither sends nor receives
    assert refused == {"plain": "", "nobody": [135], "wrong": [135]}
    run = Finished.only_one_in(tmp_path / "runs")
    updates = [one for one in run.updates if one.client == "pi"]
    assert len(updates) > 3
    assert all(one.train_start < one.train_end < one.at for one in updates)
    measured = json.loads((run.path / "fidelity.json").read_text())["real"]["pi"]
    assert measured["host"] == "root@pi1"
    assert 0 < measured["step"] < 1
    assert 0 < measured["rtt"] < 0.1
    assert measured["up"] > 1e7
    assert measured["down"] > 1e7
    assert 0 < measured["clock"] < 0.02
    assert 0 <= measured["foreign"] <= 1
    assert "real device" in output
    assert not any("invalid" in log.read_text() for log in (run.path / "logs").iterdir())


def by_a_stranger(hosts: SshServers, runs: Path) -> dict[str, Any]:
    """What a machine that is no part of the run, or that has stolen a device's login, gets."""
    (run,) = runs.iterdir()
    (file,) = hosts.machines[0].home.rglob("client.json")
    access = json.loads(file.read_text())["broker"]
    topic = f"testbed/{run.name}"
    said = {
        "host": hosts.address,
        "port": PORT,
        "certificate": access["certificate"],
        "user": access["username"],
        "password": access["password"],
        "other": f"{topic}/model/near",
        "forged": f"{topic}/update/near",
    }
    command = f"{sys.executable} -c {shlex.quote(STRANGER)}"
    done = subprocess.run(
        [*shlex.split(hosts.ssh), "stranger", command],
        input=json.dumps(said),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


HOSTILE = {
    "endless": "while True: sys.stdout.buffer.write(bytes(65536))",
    "controls": r"sys.stderr.buffer.write(b'\x1b[2J\x1b]0;owned\x07\xff\xfe\x80' * 9); sys.exit(3)",
    "answer": "answer(b'x' * 10**7 + b'\\n')",
    "lies": 'answer(b\'{"python": [], "free": -1e999, "system": {"Linux": 1}}\\n\')',
    "failure": r"answer(b'{\"failure\": \"\\u001b[2J\\u202e\\u0000\"}\n')",
    "deep": "answer(b'[' * 200000 + b'\\n')",
}
"""What the program called `python` on the device does, by name."""


@pytest.mark.hosts
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_output_ends_in_a_clean_error(
    testbed: Testbed, hosts: SshServers, tmp_path: Path, name: str
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nsource = sys.stdin.buffer\n"
        "source.read(int(source.readline()))\ntoken = json.loads(source.readline())['token']\n"
        "def answer(line):\n    sys.stdout.buffer.write(token.encode() + b'\\n' + line)\n"
        f"{HOSTILE[name]}\n"
    )
    program.chmod(0o755)
    done = testbed("up", topology(tmp_path, hosts, str(program)), "--runs", tmp_path / "runs")
    assert done.code == 1, done.err
    assert "root@pi1" in done.err
    assert "Traceback" not in done.err
    assert len(done.err) < 5000
    shown = done.out + done.err
    assert not any(sign in shown for sign in ("\x1b]", "\x1b[2J", "\x07", "\x00", "\u202e"))
    eventually(lambda: hosts.machines[0].processes(str(program)) == [])
