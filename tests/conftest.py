"""Fixtures that give a test the real thing, or say why it cannot have it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import docker
import hypothesis  # its plugin imports it at the end: then what is frozen confuses trio
import pytest
from xdist.scheduler import LoadScopeScheduling

from agents.process import freeze, without_garbage_collection
from testbed import images
from testbed.cli import main as cli
from testbed.host import cpus, docker_engine
from testbed.host.cpus import CpuReading
from testbed.images import building
from tests import forked, leaks, neighbours
from tests.running import Said, Testbed, check_output

# No bounds in seconds, because a busy machine is no failure.
hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """With `-n auto`: twice as many as cores, because many tests wait for devices that wait."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.markexpr == "timed":
        return (
            "These tests measure seconds, rates and shares: leave the machine to them. One that fails "
            "beside other work is reported as `busy host`."
        )
    return None


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell started the tests in the background: that has
    them ignore it, and what they start would do the same."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forked.build_command_line_once()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collection: imports make almost no garbage. Later collections
    pass over what is imported."""
    with without_garbage_collection():
        result = yield
    freeze()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_OPEN] = leaks.open_files()
    if item.get_closest_marker("timed"):
        item.stash[_USE] = cpus.read_cpu_times()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a fixture of a module measures, tests judge long after it."""
    if fixturedef.scope != "module" or not request.node.get_closest_marker("timed"):
        return (yield)
    before = cpus.read_cpu_times()
    try:
        return (yield)
    finally:
        spans = request.node.stash.setdefault(_FIXTURE_USE, {})
        spans[fixturedef.argname] = (before, cpus.read_cpu_times())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that measures, and failed while others used the host, has shown nothing: it counts as an
    expected failure, printed with its traceback and with who they were."""
    report = yield
    if report.failed and _USE in item.stash and isinstance(item, pytest.Function):
        module = item.getparent(pytest.Module)
        assert module is not None
        of_fixtures = module.stash.get(_FIXTURE_USE, {})
        spans = [of_fixtures[name] for name in item.fixturenames if name in of_fixtures]
        for before, now in [*spans, (item.stash[_USE], cpus.read_cpu_times())]:
            if why := neighbours.busy_since(before, now):
                report.outcome, report.wasxfail = "skipped", why
                break
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A test that leaves files or sockets to the garbage collector fails, once its fixtures are gone."""
    yield
    if isinstance(item, pytest.Function):
        item.funcargs.clear()  # what fixtures have given, which pytest keeps for a moment
    before = item.stash[_OPEN]
    if left := leaks.left_since(before):
        told = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if left[_NAMED:] else "")
        pytest.fail(f"left to the garbage collector: {told}", pytrace=False)


_NAMED = 4
"""Maximum number of open files that a failure lists."""
_OPEN: pytest.StashKey[dict[int, str]] = pytest.StashKey()
"""Open files before a test and its fixtures."""
_USE: pytest.StashKey[CpuReading] = pytest.StashKey()
"""CPU times before a test that measures."""
_FIXTURE_USE: pytest.StashKey[dict[str, tuple[CpuReading, CpuReading]]] = pytest.StashKey()
"""CPU times before and after the last set-up of each fixture of a module that measures."""

WHOLE = (
    *("test_up_docker.py", "test_swarm.py", "test_netem.py", "test_notebooks.py"),
    *("test_recovery_runs.py", "test_dashboard.py", "test_documents.py", "test_wheel.py"),
    *("test_papers.py", "test_cli_outputs.py", "test_whole_runs.py", "test_resume.py"),
    "test_real_devices.py",
)
"""Long files whose tests share a run or a process, or are runs of containers, whose devices would take
each other's cores."""
SINGLE = (
    *(
        "test_actions_in_runs.py",
        "test_behaviours.py",
        "test_flower.py",
    ),
    *("test_own_code.py", "test_up_process.py", "test_recipes.py", "test_slow_evaluation.py"),
    *(
        "test_api.py",
        "test_clusters.py",
        "test_studies.py",
        "test_paper_tasks.py",
        "test_virtual_fuzz.py",
        "test_doors.py",
    ),
    "test_virtual_run.py",
)
"""Long files whose tests share nothing: each goes to whichever worker is free."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files without tests of a mark if only that mark is selected."""
    mark = config.option.markexpr
    if mark not in ("hosts", "timed") or collection_path.suffix != ".py":
        return None
    return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that none of them is left to one worker at the end."""
    order = [*WHOLE, *SINGLE]
    items.sort(key=lambda item: order.index(item.path.name) if item.path.name in order else len(order))


def unit_of_work(nodeid: str) -> str:
    """Return the unit of work for one worker: all tests of a file, or a single one."""
    file = nodeid.partition("::")[0]
    return nodeid if Path(file).name in SINGLE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = unit_of_work
    return scheduling


def unavailable(what: str, why: str) -> None:
    """Skip the test, loudly; fail it where TESTBED_REQUIRE (comma-separated, set in CI) names `what`."""
    if what in os.environ.get("TESTBED_REQUIRE", "").split(","):
        pytest.fail(f"TESTBED_REQUIRE asks for {what}: {why}")
    pytest.skip(f"needs {what}: {why}")


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine of this machine."""
    if not docker_engine.is_available():
        unavailable("docker", "no Docker engine answers")
    client = docker_engine.connect()
    yield client
    client.close()


@pytest.fixture(scope="session")
def built(engine: docker.DockerClient) -> images.Images:
    """The images, made before any run is timed."""
    return building.ensure(engine, print)


@pytest.fixture
def forked_programs() -> Iterator[None]:
    """Forks the programs that the test starts by `import testbed` (`tests.forked`)."""
    with forked.use():
        yield


@pytest.fixture
def testbed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked_programs: None
) -> Testbed:
    """`testbed ARGUMENTS` in this process, which is a second quicker than `cli`."""

    def testbed(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["testbed", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        said = Said(code if isinstance(code, int) else 0, *capsys.readouterr())
        if "--json" in arguments and not said.code:
            check_output(arguments, said.out)
        return said

    return testbed


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real datasets (TESTBED_DATA); the few tests that need it are skipped without it."""
    root = os.environ.get("TESTBED_DATA")
    if root is None:
        pytest.skip("TESTBED_DATA names no folder with datasets")
    return Path(root).resolve()
