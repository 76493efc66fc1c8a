"""Topics and names."""

from __future__ import annotations

import pytest

from agents.mqtt.topics import Topics, is_name


def test_topics_of_a_run() -> None:
    topics = Topics("run-1")
    assert topics.model("a") == "testbed/run-1/model/a"
    assert topics.update("+") == "testbed/run-1/update/+"
    assert topics.request("a") == "testbed/run-1/request/a"
    assert topics.status("a") == "testbed/run-1/status/a"
    assert topics.control("a") == "testbed/run-1/control/a"
    assert topics.telemetry("a") == "testbed/run-1/telemetry/a"
    assert topics.failure("a") == "testbed/run-1/failure/a"
    assert topics.split("testbed/run-1/status/pi4-2") == ("status", "pi4-2")


@pytest.mark.parametrize("name", ["a", "pi4-2", "run_1.b", "0", "x" * 63])
def test_valid_names_are_accepted(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "+", "#", "a/b", "a b", "a\n", "-a", ".a", "ä", "x" * 64, "a\x00"])
def test_invalid_names_are_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="invalid run name"):
        Topics(name)
