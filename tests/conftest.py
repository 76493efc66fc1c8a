"""Fixtures that give a test the real thing, or say why it cannot have it."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from testbed.cli import main as cli
from testbed.host import docker_engine
from tests.running import Said, Testbed


def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto`: half as many again as cores, as many tests wait for processes."""
    return math.ceil(1.5 * len(os.sched_getaffinity(0)))


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell started the tests in the background: that has
    them ignore it, and what they start would do the same."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = {
    *("test_netem.py", "test_notebooks.py", "test_paper_tasks.py", "test_papers.py"),
    *("test_recovery_runs.py", "test_studies.py", "test_virtual_fuzz.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs are in this folder, all else in its folders. Of what runs in parallel the longest files
    come first, so that none of them is left to one worker at the end."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and not item.get_closest_marker("together"):
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: not (item.path.parent == here or item.path.name in LONG))


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


@pytest.fixture
def testbed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Testbed:
    """`testbed ARGUMENTS` in this process, which is a second quicker than `cli`."""

    def testbed(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["testbed", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, *capsys.readouterr())

    return testbed


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Where the real datasets lie (TESTBED_DATA); the few tests that want them skip without."""
    root = os.environ.get("TESTBED_DATA")
    if root is None:
        pytest.skip("TESTBED_DATA names no folder with datasets")
    return Path(root).resolve()
