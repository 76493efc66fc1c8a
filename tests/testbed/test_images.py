"""Images: what their tags depend on, what goes in, and that an interrupted build leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
import zipfile
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import docker
import pytest
from docker.errors import ContainerError

from testbed import images
from testbed.errors import BadInputError, HostError
from testbed.host import docker_engine, processes
from testbed.images import building, device_images, image_check, wheels
from testbed.topology import parse
from tests.waiting import eventually


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of `images/` and `agents/` to change."""
    return (
        copytree(images.FOLDER, tmp_path / "images"),
        copytree(images.AGENTS, tmp_path / "agents"),
    )


def test_remaining_build_time_uses_previous_durations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    moments = iter((0.0, 40.0, 65.0, 100.0, 140.0, 165.0))
    monkeypatch.setattr(building, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    first = building.BuildTime(["base", "agent"])
    assert str(first) == ""
    first.record_built("base")
    first.record_built("agent")
    again = building.BuildTime(["base", "agent"])
    assert str(again) == "about 65 s left"
    again.record_built("base")
    assert str(again) == "about 25 s left"
    again.record_built("agent")
    assert str(again) == ""


AGENT, LIBRARIES = {"agent", "agent-cuda"}, {"libraries", "libraries-cuda"}


@pytest.mark.parametrize(
    ("changed", "remade"),
    [
        ("agents/mqtt/topics.py", AGENT),
        ("images/agent/Dockerfile", AGENT),
        ("images/broker/Dockerfile", {"broker"}),
        ("images/libraries/requirements.txt", {"libraries", "agent"}),
        ("images/libraries/trim.txt", {"libraries", "agent"}),
        ("images/libraries/Dockerfile", LIBRARIES | AGENT),
        ("images/libraries-cuda/requirements.txt", {"libraries-cuda", "agent-cuda"}),
        ("images/libraries-cuda/trim.txt", {"libraries-cuda", "agent-cuda"}),
        ("images/base/packages.txt", {"base", "broker"} | LIBRARIES | AGENT),
    ],
)
def test_changed_file_changes_the_dependent_tags(
    inputs: tuple[Path, Path], changed: str, remade: set[str]
) -> None:
    before = images.current_tags(*inputs)
    (inputs[1] / "notes.txt").write_text("not for the image")
    (inputs[1] / "topics.cpython-311.pyc").write_bytes(b"")
    assert images.current_tags(*inputs) == before
    with (inputs[0].parent / changed).open("a") as file:
        file.write("# changed\n")
    after = images.current_tags(*inputs)
    assert {kind for kind in before if before[kind] != after[kind]} == remade


def test_leftovers_of_a_killed_build_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is interrupted is reported as that, whatever becomes of its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "testbed"
    (cache / "build-1" / "wheels").mkdir(parents=True)
    (cache / "wheels").mkdir()

    def interrupted() -> None:
        with building.scratch_folder() as scratch:
            assert sorted(cache.iterdir()) == [scratch, cache / "wheels"]
            scratch.rmdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [*cache.iterdir()] == [cache / "wheels"]


def test_images_have_the_projects_torch_version_and_differ_in_its_build_alone() -> None:
    plain, cuda = (
        wheels.significant_lines((images.FOLDER / name / "requirements.txt").read_text())
        for name in ("libraries", "libraries-cuda")
    )
    pin = re.search(r"torch==[\w.]+", (images.FOLDER.parent / "pyproject.toml").read_text())
    assert pin is not None
    assert pin[0] in plain
    assert cuda == [line.replace("torch==", "torch===") for line in plain]


@pytest.mark.parametrize(
    ("installed", "required"),
    [
        ("2.13.0+cpu", "torch==2.13.0+cpu"),
        ("2.13.0+cu130", "torch==2.13.0"),
        ("2.12.0+cpu", "torch==2.13.0"),  # another version than the pinned one
        (None, "torch==2.13.0"),
    ],
)
def test_torch_is_required_as_the_cpu_build_of_this_host(installed: str | None, required: str) -> None:
    assert wheels.prefer_cpu(["numpy>=2.0", "torch==2.13.0"], installed) == ["numpy>=2.0", required]


def test_cuda_libraries_are_refused_and_required_for_gpus_with_the_fix() -> None:
    wheels.refuse_cuda(["torch", "numpy"], "")
    message = r"2 CUDA libraries \(nvidia-cublas, .*PyTorch: no answer\. .*PIP_EXTRA_INDEX_URL=https:"
    with pytest.raises(HostError, match=message):
        wheels.refuse_cuda(["torch", "nvidia-cudnn-cu13", "nvidia-cublas"], "no answer")
    wheels.require_cuda(["torch-2.13.0.whl", "nvidia_cublas-13.1.1.3-py3-none-linux.whl"])
    with pytest.raises(HostError, match=r"no CUDA libraries.*PyTorch's wheels with CUDA.*build --gpu"):
        wheels.require_cuda(["torch-2.13.0.whl", "numpy-2.3.whl"])


def test_torch_of_the_same_version_with_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyPI's build for x86_64 does so, and its version does not show it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "_installed_torch", lambda: "2.13.0")
    monkeypatch.setattr(wheels, "_resolve", lambda *_: ["torch", "nvidia-cublas"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==2.13.0\n")
    with pytest.raises(HostError, match="1 CUDA libraries"):
        wheels.fetch_wheels(requirements, "x86_64", tmp_path, threading.Event())


def test_wheels_are_downloaded_once_unless_forced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`images build --force` downloads them again, because newer ones may exist."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("thing\n")

    def fetched(version: int, *, again: bool) -> list[str]:
        with zipfile.ZipFile(tmp_path / f"thing-{version}-py3-none-any.whl", "w") as wheel:
            about = f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
            wheel.writestr(f"thing-{version}.dist-info/METADATA", about)
            wheel.writestr(f"thing-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        folder = wheels.fetch_wheels(requirements, "x86_64", tmp_path, threading.Event(), again=again)
        return [path.name for path in folder.iterdir()]

    (tmp_path / "testbed").mkdir()
    assert fetched(1, again=False) == ["thing-1-py3-none-any.whl"]
    assert fetched(2, again=False) == ["thing-1-py3-none-any.whl"]
    assert fetched(2, again=True) == ["thing-2-py3-none-any.whl"]


def test_only_images_needed_by_the_run_are_built() -> None:
    class Engine:
        """Has the images called `has`."""

        def __init__(self, *has: str) -> None:
            self.has, self.images = has, self

        def list(self, name: str) -> list[str]:
            return [name] if name in self.has else []

    def missing(tags: dict[str, str], *has: str) -> set[str]:
        return building.missing_kinds(Engine(*has), tags)  # type: ignore[arg-type]

    every = images.current_tags(images.FOLDER, images.AGENTS)
    plain = {kind: tag for kind, tag in every.items() if not kind.endswith("-cuda")}
    assert missing(plain, every["agent"], every["broker"]) == set()
    cpu = every["agent"], every["broker"], every["base"]
    assert missing(every, *cpu) == {"agent-cuda", "libraries-cuda"}
    own = every | {"code": "testbed-code:1", "code-cuda": "testbed-code:2"}
    assert missing(own, *cpu, every["agent-cuda"]) == {"code", "code-cuda"}


def test_unpacking_keeps_imported_files_and_drops_trimmed_ones(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        for name in ("thing/a.py", "thing/tests/test_a.py", "thing-1.dist-info/METADATA",
                     "thing-1.data/purelib/b.py", "thing-1.data/scripts/thing"):  # fmt: skip
            wheel.writestr(name, name)
    (tmp_path / "trim.txt").write_text("# no tests\n*/tests/*\n")
    with tarfile.open(tmp_path / "site.tar", "w") as archive:
        wheels.unpack(tmp_path, tmp_path / "trim.txt", archive, threading.Event())
    with tarfile.open(tmp_path / "site.tar") as archive:
        assert archive.getnames() == ["site/thing/a.py", "site/thing-1.dist-info/METADATA", "site/b.py"]
        content = archive.extractfile("site/b.py")
        assert content is not None
        assert content.read() == b"thing-1.data/purelib/b.py"


def test_output_of_a_failed_program_is_quoted() -> None:
    command = ["sh", "-c", "echo the cause; echo the end >&2; exit 3"]
    with pytest.raises(HostError, match=r"(?s)exit code 3.*the cause.*the end"):
        processes.run(command, stop=threading.Event())


def test_stopped_program_ends_with_its_children(tmp_path: Path) -> None:
    stop = threading.Event()
    pids = tmp_path / "pids"
    command = ["sh", "-c", f"trap '' TERM; sleep 300 & echo $$ $! > {pids}; wait; sleep 300"]

    def stop_once_both_run() -> None:
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_once_both_run, daemon=True).start()
    with pytest.raises(processes.StoppedError):
        processes.run(command, stop=stop)
    # The kernel ends a killed process whose parent is gone in its own time, on a busy host not at once.
    killed = [int(pid) for pid in pids.read_text().split()]
    assert len(killed) == 2
    eventually(lambda: not any(map(_is_running, killed)))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_without_registry_and_mmdebstrap_the_error_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostError, match="apt-get install mmdebstrap"):
        images.bootstrap_debian(["python3"], "amd64", tmp_path, threading.Event())


@pytest.mark.docker
def test_agents_start_in_a_small_image_and_broker_without_rights(
    engine: docker.DockerClient, built: images.Images
) -> None:
    assert building.ensure(engine, (output := list[str]()).append) == built
    assert output == [], "existing images are not built again"
    assert engine.images.get(built.agent).attrs["Size"] < 1.3e9
    script = (
        "import importlib.util as u; print([n for n in ('pip', 'nvidia', 'testbed') if u.find_spec(n)]);"
        "import agents.client.main, agents.aggregator.main, torch; print(torch.ones(2).sum().item())"
    )
    printed = engine.containers.run(
        built.agent,
        ["python3", "-c", script],
        user="10001:10001",
        read_only=True,
        network_mode="none",
        cap_drop=["ALL"],
        remove=True,
    )
    assert printed == b"[]\n2.0\n"
    user = engine.containers.run(built.broker, ["-u"], entrypoint="id", network_mode="none", remove=True)
    assert int(user) > 0


@pytest.mark.timed  # others build images, too
@pytest.mark.docker
def test_ctrl_c_during_a_build_leaves_nothing(
    engine: docker.DockerClient, built: images.Images, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {built.broker}\nARG BUILD\nLABEL testbed.build=${{BUILD}}\nUSER root\n"
        "RUN touch /layer\nRUN sleep 61\n"
    )
    context = tmp_path / "context.tar"
    with tarfile.open(context, "w") as archive:
        archive.add(tmp_path / "Dockerfile", "Dockerfile")

    def containers() -> list[str]:
        running = engine.containers.list(all=True, ignore_removed=True)
        return [str(found.id) for found in running if "sleep 61" in str(found.attrs)]

    def interrupt_when_it_runs() -> None:
        while not containers():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = {image["Id"] for image in engine.api.images(all=True)}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt_when_it_runs).start()
        with pytest.raises(KeyboardInterrupt), context.open("rb") as file:
            building.engine_build(engine, "testbed-broker:interrupted", file, {})
    finally:
        signal.signal(signal.SIGINT, handler)
    assert containers() == []
    assert {image["Id"] for image in engine.api.images(all=True)} == before


def test_pruning_keeps_images_in_use() -> None:
    def image(number: int, *tags: str, shared: int = 600) -> dict[str, object]:
        return {"Id": f"sha256:{number}", "RepoTags": [*tags], "Size": 1000, "SharedSize": shared}

    found = building.image_entries(
        [
            image(1, "testbed-agent:here"),
            image(2, "testbed-agent:running", "somebody-elses:1"),
            image(3, "testbed-agent:other", shared=-1),
            image(4, "testbed-broker:old"),
            image(5),
            image(6, "registry.example:5000/team/testbed-base:0123456789ab", "team/testbed-runner:1"),
            image(7, "registry.example:5000/team/testbed-base:ba9876543210"),
        ],
        here={"testbed-agent:here", "testbed-base:ba9876543210"},
        registered={"testbed-agent:here": "/a", "testbed-agent:other": "/b", "testbed-agent:gone": "/c"},
        in_containers={"sha256:2"},
    )
    pushed = "registry.example:5000/team/testbed-base:"
    assert [(one.image, one.alone, one.user, one.is_kept) for one in found] == [
        (f"{pushed}0123456789ab", 400, "", False),
        (f"{pushed}ba9876543210", 400, "this checkout", True),
        ("testbed-agent:here", 400, "this checkout", True),
        ("testbed-agent:other", 1000, "/b", False),
        ("testbed-agent:running", 400, "containers", True),
        ("testbed-broker:old", 400, "", False),
    ]

    def removed(*, everything: bool) -> list[str]:
        return [one.image for one in building.removable_images(found, everything=everything)]

    old = f"{pushed}0123456789ab"
    assert removed(everything=False) == [old, "testbed-broker:old"]
    assert removed(everything=True) == [old, "testbed-agent:other", "testbed-broker:old"]


@pytest.mark.docker
def test_only_unused_images_are_listed_and_removed(
    engine: docker.DockerClient, built: images.Images
) -> None:
    """The tag belongs to an image of another version of the project. The engine may have other
    images."""
    old = "testbed-broker:0ld"
    user = engine.containers.create(built.broker, "mosquitto")
    engine.images.get(built.broker).tag(*old.split(":"))
    try:
        (found,) = [one for one in building.list_images(engine) if one.image == old]
        assert (found.user, found.is_kept) == ("containers", True)
        assert found not in building.removable_images([found], everything=True)
    finally:
        user.remove()
    assert building.remove_images(engine, [found]) == [found]
    tags = {one.image for one in building.list_images(engine)}
    assert old not in tags
    assert {built.agent, built.broker} <= tags


def test_images_of_all_existing_checkouts_are_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkouts = [tmp_path / name for name in ("one", "other", "deleted")]
    for checkout in checkouts:
        checkout.mkdir()
        monkeypatch.setattr(images, "FOLDER", checkout)
        images.register_images({"agent": f"testbed-agent:{checkout.name}-before"})
        images.register_images({"agent": f"testbed-agent:{checkout.name}"})
    checkouts[2].rmdir()
    assert images.registered_images() == {
        f"testbed-agent:{name}": str(tmp_path / name) for name in ("one", "other")
    }


@pytest.fixture
def sensor(tmp_path: Path) -> Path:
    """A Dockerfile, with what it copies, and what it does not."""
    folder = tmp_path / "sensor"
    (folder / "data").mkdir(parents=True)
    (folder / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY driver.py /opt/\n")
    (folder / "driver.py").write_text("")
    (folder / "data" / "large.bin").write_bytes(b"large")
    (folder / ".dockerignore").write_text("# not for the image\ndata\n")
    return folder / "Dockerfile"


def test_user_image_is_rebuilt_when_its_inputs_change(sensor: Path) -> None:
    def tag(base: str = "testbed-agent:1") -> str:
        return device_images.BuildContext.read(sensor).tag(base)

    first = tag()
    assert device_images.BuildContext.read(sensor).files == (".dockerignore", "Dockerfile", "driver.py")
    (sensor.parent / "data" / "large.bin").write_bytes(b"another")
    assert tag() == first
    assert tag("testbed-agent:2") != first
    (sensor.parent / "driver.py").write_text("# changed\n")
    assert tag() != first


def test_only_regular_files_of_limited_size_go_into_an_image(
    sensor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sensor.parent / "driver").symlink_to("driver.py")
    os.mkfifo(sensor.parent / "pipe")
    with pytest.raises(BadInputError, match=r"sensor/pipe is neither a file nor a link"):
        device_images.BuildContext.read(sensor)
    with (sensor.parent / ".dockerignore").open("a") as ignored:
        ignored.write("pipe\n")
    assert "driver" in device_images.BuildContext.read(sensor).files
    monkeypatch.setattr(device_images, "_MAX_BYTES", 10)
    with pytest.raises(BadInputError, match=r"put the Dockerfile into a folder .* \.dockerignore"):
        device_images.BuildContext.read(sensor)


def test_missing_programs_of_an_image_are_named() -> None:
    """Looked at with this host's Python, which has all but the image's programs, perhaps."""
    env = {**os.environ, "PYTHONPATH": str(images.AGENTS.parent)}
    seen = json.loads(
        subprocess.check_output([sys.executable, image_check.__file__], text=True, env=env)
    )
    assert seen["agents"] == image_check.digest(images.AGENTS)
    assert {lack for lack in seen["lacks"] if not lack.startswith("the program ")} == set()
    assert list(device_images._faults({"lacks": [], "agents": "mine"}, "mine")) == []
    old = list(device_images._faults({"lacks": ["torch (ImportError: no)"], "agents": "other"}, "mine"))
    assert old[0] == "torch (ImportError: no)"
    assert "of this version of the testbed" in old[1]
    nothing = subprocess.run(
        [sys.executable, "-I", "-S", image_check.__file__], capture_output=True, text=True, check=True
    )
    lacks = "; ".join(json.loads(nothing.stdout)["lacks"])
    assert "torch (ModuleNotFoundError" in lacks
    assert "the agents' code" in lacks


@pytest.mark.docker
def test_image_unfit_for_a_device_is_refused_with_its_group(
    engine: docker.DockerClient, built: images.Images
) -> None:
    """The broker's: it has no torch."""
    read = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedbuff}\n"
        f"devices:\n  - {{name: a, cpu: 0.1, image: no-such-image:1}}\n"
        f"  - {{name: b, cpu: 0.1, image: '{built.broker}'}}\nstop: {{after: 1s}}\n"
    )
    begun, label = int(time.time()), f"testbed.run={uuid.uuid4()}"
    with pytest.raises(BadInputError) as caught:
        device_images.group_images(engine, read, built, print, dict([label.split("=")]))
    text = str(caught.value)
    assert "devices[0].image: a: the engine has no image no-such-image:1" in text
    assert f"devices[1].image: {built.broker} cannot run a device: it lacks torch" in text
    events = engine.events(
        begun, int(time.time()) + 1, {"type": "container", "label": label}, decode=True
    )
    assert {"create", "die", "destroy"} <= {one["Action"] for one in events}


@pytest.mark.docker
def test_output_of_a_short_container_is_read_and_nothing_left(
    engine: docker.DockerClient, built: images.Images
) -> None:
    """This holds for any default log driver of the engine, and on Ctrl-C."""
    label = f"testbed.run={uuid.uuid4()}"
    labels = dict([label.split("=")])
    shell = ["sh", "-c", "echo printed; [ $0 = 0 ] || echo failed >&2; exit $0"]
    assert docker_engine.run_output(engine, built.broker, [*shell, "0"], labels) == b"printed\n"
    with pytest.raises(ContainerError, match="failed") as error:
        docker_engine.run_output(engine, built.broker, [*shell, "3"], labels)
    assert error.value.exit_status == 3

    drivers = []

    def interrupt() -> None:
        while not (found := engine.containers.list(filters={"label": label})):
            time.sleep(0.1)
        drivers.append(found[0].attrs["HostConfig"]["LogConfig"]["Type"])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        docker_engine.run_output(engine, built.broker, ["sleep", "600"], labels)
    thread.join()
    assert drivers == ["json-file"]
    assert engine.containers.list(all=True, filters={"label": label}) == []
