"""Round trips with a real kernel's answers, between two network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

from tests.namespaces import inside, joined

SLOW = """
import json, time
from agents.device import link_measurement as link_probe

send = link_probe._send_echo

def send_late(sock, number):
    time.sleep(0.005)
    send(sock, number)

link_probe._send_echo = send_late
print(json.dumps(link_probe.round_trips("10.213.0.1", 50, 0.001, 0.02)))
"""
"""Program that needs 5 ms to send a packet, of which it should send one per millisecond."""


def test_packets_that_a_slow_process_did_not_send_are_not_lost() -> None:
    with ExitStack() as stack:
        device, _ = joined(stack, "ip")
        allowed = "echo 0 0 > /proc/sys/net/ipv4/ping_group_range"
        command = [*inside(device), "sh", "-c", f'{allowed}; exec "$0" -c "$1"', sys.executable, SLOW]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    trips = json.loads(done.stdout)
    assert 1 <= len(trips) < 30
    assert None not in trips
