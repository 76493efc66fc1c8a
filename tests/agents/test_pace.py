"""How long work at a share of the CPU takes, whatever slices the quota has dealt it out in."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.client.resources import Pace, share_in


class Host:
    """A clock, the CPU time that the process has used, and its share, to be set."""

    def __init__(self, share: float | None = 0.25) -> None:
        self.now, self.cpu, self.share = 100.0, 7.0, share
        self.pace = Pace(lambda: self.share, lambda: self.cpu, lambda: self.now)

    def work(self, cpu: float, seconds: float) -> None:
        self.cpu += cpu
        self.now += seconds


def test_work_done_within_its_first_slices_takes_its_nominal_time() -> None:
    host = Host()
    host.work(0.0, 5.0)  # it waits for a model
    host.pace.begin()
    host.work(0.5, 1.75)  # the first slice was there at once, and the last one took no whole period
    assert host.pace.end() == pytest.approx(0.25)


def test_throttled_work_needs_no_wait() -> None:
    host = Host()
    host.pace.begin()
    host.work(0.5, 3.0)
    assert host.pace.end() == 0


def test_overhead_of_an_update_is_added_to_the_next_training() -> None:
    host = Host()
    host.pace.begin()
    host.work(0.5, 2.0)
    assert host.pace.end() == 0
    host.work(0.02, 0.5)  # it is sent, and a model comes
    host.pace.begin()
    host.work(0.1, 0.4)
    assert host.pace.end() == pytest.approx(0.08)


def test_reading_the_model_counts_as_work() -> None:
    host = Host()
    host.work(0.0, 5.0)
    arrived = host.now
    host.work(0.02, 0.06)  # it is read
    host.pace.begin(arrived)
    host.work(0.5, 1.9)
    assert host.pace.end() == pytest.approx(0.52 / 0.25 - 1.96)


def test_model_received_during_training_is_worked_on_afterwards() -> None:
    host = Host()
    arrived = host.now
    host.pace.begin(arrived)
    host.work(0.5, 1.5)
    assert host.pace.end() == pytest.approx(0.5)  # until 2.0 s
    host.work(0.0, 0.5)
    host.pace.begin(arrived + 1.0)
    host.work(0.5, 1.0)
    assert host.pace.end() == pytest.approx(1.0)


@pytest.mark.parametrize(("before", "after"), [(0.25, 0.5), (0.5, 0.25)])
def test_changed_share_adds_no_delay(before: float, after: float) -> None:
    host = Host(before)
    host.pace.begin()
    host.share = after
    host.work(0.5, 0.9)
    assert host.pace.end() == pytest.approx(0.1)


@pytest.mark.parametrize(("before", "after"), [(None, None), (0.25, None), (None, 0.25)])
def test_without_a_quota_there_is_no_wait(before: float | None, after: float | None) -> None:
    host = Host(before)
    host.pace.begin()
    host.share = after
    host.work(0.5, 0.1)
    assert host.pace.end() == 0


def test_share_of_a_file_is_none_until_it_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "pi.share"
    assert share_in(file) is None
    file.write_text("0.25")
    assert share_in(file) == 0.25
