"""What the docker runtime has the engine do, which is a stand-in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker
import pytest
from docker.errors import APIError

from agents.device_actions import Action, Crash, Join, Leave, Restart, SetCpu
from testbed.errors import BadInputError, HostError
from testbed.images import Images
from testbed.runtimes.docker import DockerRuntime
from tests.testbed.test_process_runtime import spec


@dataclass
class Engine:
    """Remembers the quotas; the container of an ended device has an exit code."""

    quotas: list[int] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    refuses: bool = False

    def update_container(self, _container: str, *, cpu_quota: int, **_: Any) -> None:
        if self.refuses:
            raise APIError("no")
        self.quotas.append(cpu_quota)

    def inspect_container(self, container: str) -> dict[str, Any]:
        code = self.codes.get(container)
        return {"State": {"Running": code is None, "ExitCode": code}}


def made(tmp_path: Path, engine: Engine, more: str = "") -> DockerRuntime:
    run = spec(tmp_path, more=more)
    client = cast("docker.DockerClient", SimpleNamespace(api=engine))
    runtime = DockerRuntime(
        client, Images("agent", "broker"), replace(run, plan=replace(run.plan, runtime="docker"))
    )
    runtime._containers = {device.name: device.name for device in run.plan.devices}
    return runtime


def test_only_who_is_down_starts_without_a_quota(tmp_path: Path) -> None:
    engine = Engine()
    runtime = made(tmp_path, engine, "scenario: [{at: 5s, join: d-2}]")

    def lifted(device: str, action: Action) -> bool:
        engine.quotas.clear()
        runtime.act(device, action)
        return engine.quotas == [-1]

    assert not lifted("d-1", Restart())  # it is there
    assert lifted("d-2", Join())
    for ends, begins in ((Crash(), Restart()), (Leave(), Join())):
        assert not lifted("d-1", ends)
        assert lifted("d-1", begins)
        assert not lifted("d-1", begins)


def test_a_container_that_has_ended_does_not_start_again(tmp_path: Path) -> None:
    engine = Engine(codes={"d-1": 137})
    runtime = made(tmp_path, engine)
    with pytest.raises(BadInputError, match=r"d-1 cannot .* container has ended \(exit code 137\)"):
        runtime.act("d-1", Restart())
    assert engine.quotas == []


def test_a_share_that_the_engine_refuses_is_forgotten(tmp_path: Path) -> None:
    engine = Engine(refuses=True)
    runtime = made(tmp_path, engine)
    with pytest.raises(HostError, match="limit the CPU of d-1"):
        runtime.act("d-1", SetCpu(0.9))
    engine.refuses = False
    runtime.limit("d-1")
    assert engine.quotas == [5000]  # 0.1 of 50 ms, as planned
