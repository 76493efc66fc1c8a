"""Trains of packets: what is made of their arrivals, and one each way over the loopback interface."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import closing

import pytest

from agents.links import packets
from agents.links.packets import TrainArrivals


def test_train_lasts_one_second_within_bounds() -> None:
    assert packets.train_length(10_000_000) == 854
    assert packets.train_length(64_000) == 12
    assert packets.train_length(1_000_000_000) == 2_700


def test_rate_counts_packets_after_the_first() -> None:
    """Ten more of 11,712 bits in 0.1 s; two of them were not fetched in time. What was missed before the
    train is none of its business."""
    found = TrainArrivals()
    assert found.rate == 0
    for number in range(9):
        found.add(at=1_000_000_000 + number * 12_500_000, missed=5 if number < 4 else 7)
    assert (found.count, found.missed) == (9, 2)
    assert found.rate == pytest.approx(1_171_200)


@pytest.fixture(scope="module")
def host() -> str:
    packets.listen_for_trains("127.0.0.1")
    return "127.0.0.1"


def test_repeated_request_is_not_counted_in_the_train(host: str) -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.settimeout(120)
        sock.connect((host, packets.PORT))
        for _ in range(2):
            sock.send(b"up 64000")
            assert sock.recv(2048) == b"go"
        for _ in range(packets.train_length(64_000)):
            sock.send(bytes(1422))  # 1464 on the wire
        assert json.loads(sock.recv(2048))["count"] == 12


@pytest.mark.timed
def test_rates_are_measured_in_both_directions(host: str) -> None:
    """Nothing limits it here: as fast as it was sent, a tenth faster than asked."""
    for measure in (packets.upload_train, packets.download_train):
        assert measure(host, 5_000_000, 1.0) > 4_000_000


class EmulatedSocket(socket.socket):
    """A socket of QEMU's user emulation, which knows no times of arrival."""

    def setsockopt(self, *_: object) -> None:
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))


def test_without_times_of_the_kernel_data_arrives_when_it_is_read() -> None:
    """As on a real device whose processor is emulated."""
    with EmulatedSocket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        packets.enable_timestamps(receiver)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"late", receiver.getsockname())
        begin = time.monotonic_ns()
        assert begin <= packets.arrival_time(receiver) <= time.monotonic_ns()
