"""Fixtures that give a test the real thing, or say why it cannot have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from testbed import engine as docker_engine


def unavailable(what: str, why: str) -> None:
    """Skip the test, loudly; fail it where TESTBED_REQUIRE (comma-separated, set in CI) names `what`."""
    if what in os.environ.get("TESTBED_REQUIRE", "").split(","):
        pytest.fail(f"TESTBED_REQUIRE asks for {what}: {why}")
    pytest.skip(f"needs {what}: {why}")


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine of this machine."""
    if not docker_engine.available():
        unavailable("docker", "no Docker engine answers")
    client = docker_engine.connect()
    yield client
    client.close()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Where the real datasets lie (TESTBED_DATA); the few tests that want them skip without."""
    root = os.environ.get("TESTBED_DATA")
    if root is None:
        pytest.skip("TESTBED_DATA names no folder with datasets")
    return Path(root).resolve()
