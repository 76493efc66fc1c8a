"""Installed packages: no conflicts in the tests' environment, and a broker for local processes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from testbed import broker, up
from testbed.api import machine
from testbed.errors import HostError
from tests.running import write_small_topology

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_environment_has_no_conflicting_packages() -> None:
    """It has every extra, but for `broker`, which cannot go together with `flower`. An environment of an
    older checkout may have conflicts: `make clean` removes it."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (every,) = (one for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("edge-fl"))
    extras = set(every.removeprefix("edge-fl-testbed[").removesuffix("]").split(","))
    assert {*extras, "broker", "dev"} == {*PROJECT["optional-dependencies"]}


def test_extra_broker_is_the_amqtt_that_messages_name() -> None:
    assert PROJECT["optional-dependencies"]["broker"] == [broker.AMQTT]


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "find_mosquitto", lambda: None)
    monkeypatch.setattr(broker, "has_amqtt", lambda: False)


@pytest.mark.parametrize("flower", [True, False])
def test_command_for_amqtt_spares_an_environment_with_flower(
    flower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if flower else None)
    command = broker.amqtt_command()
    assert (f"--target {broker.AMQTT_FOLDER} '{broker.AMQTT}'" in command) == flower
    assert command.endswith("'edge-fl-testbed[broker]'") != flower


def test_local_processes_without_a_broker_are_refused_before_the_start(
    no_broker: None, tmp_path: Path
) -> None:
    topology = write_small_topology(tmp_path)
    with pytest.raises(HostError, match=r"apt-get install mosquitto, or .* -m pip install"):
        up(topology, runtime="process", oversubscribe=True, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("has_engine", "status"), [(True, "warn"), (False, "missing")])
def test_doctor_names_the_missing_broker(no_broker: None, has_engine: bool, status: str) -> None:
    found = machine.broker(has_engine=has_engine)
    assert found.status == status
    assert found.fix is not None
    assert "apt-get install mosquitto" in found.fix
