"""`testbed sweep --on`: cells on a real Dask scheduler with workers on this machine, and on Slurm's
daemons."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from testbed import topology
from testbed.errors import HostError
from testbed.rundir.directory import RunDirectory
from testbed.sweeps.clusters import Target, remote
from testbed.sweeps.clusters.remote import ClusterPool
from testbed.sweeps.worker import CellOutcome, NeededFile, find_needed, problem_of_needed
from tests import clusters
from tests.conftest import unavailable
from tests.running import TOPOLOGIES, Testbed, children_running, cli, started, until_printed
from tests.testbed.test_studies import BASE, EMULATED, _folder, runs_in  # noqa: F401
from tests.waiting import eventually

OWN_RULE = 'name: "feddyn:FedDyn", alpha: 0.1, sample: 2'
LONG = "{stop: {updates: 100000000}}"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Dask]:
    if why := clusters.why_no_dask():
        unavailable("dask", why)
    with clusters.dask(tmp_path_factory.mktemp("dask")) as found:
        yield found


@pytest.fixture
def dask(scheduler: clusters.Dask) -> Iterator[clusters.Dask]:
    """The scheduler, with workers that end with the test."""
    with scheduler.programs:
        yield scheduler


def write_sweep(content: str) -> str:
    Path("study.yaml").write_text(f"topology: base.yaml\n{content}")
    return "study.yaml"


def entries() -> list[dict[str, object]]:
    return [*json.loads(Path("runs/study/index.json").read_text())["cells"].values()]


def run_folders() -> set[str]:
    return runs_in(Path("runs/study"))


def attempts() -> list[Path]:
    return [*Path("runs/study/.cluster").glob("*/try-*")]


def cell_processes(worker: int) -> list[psutil.Process]:
    """Return the processes in which the worker with this pid runs cells."""
    return children_running(worker, "testbed.sweeps.worker") if attempts() else []


@pytest.mark.hosts
def test_lost_worker_and_interrupt(dask: clusters.Dask) -> None:
    """A worker is killed in the middle: all cells are done, none is twice in the index. Ctrl-C ends a
    cell on the other worker."""
    first, second = dask.add_worker(), dask.add_worker()
    file = write_sweep("variants: {a: {stop: {after: 200s}}}\ngrid: {seed: [1, 2, 3, 4, 5]}")
    with started("sweep", file, "--on", dask.on) as running:
        eventually(lambda: len(attempts()) >= 3)
        first.kill()
        second.send_signal(signal.SIGSTOP)
        time.sleep(3)  # which makes the sweep long enough for an estimate of what is left
        second.send_signal(signal.SIGCONT)
        output, _ = running.communicate(timeout=900)
    assert running.returncode == 0, output
    assert "5 of 5  a, seed" in output
    assert "left\n" in output
    assert len(entries()) == 5
    assert {entry["run"] for entry in entries()} == run_folders()
    assert {entry["outcome"] for entry in entries()} == {"after"}
    assert "5 of 5 runs done already" in cli("sweep", file, "--on", dask.on).stdout
    file = write_sweep(f"variants: {{long: {LONG}}}")
    with started("sweep", file, "--on", dask.on) as running:
        cells = eventually(lambda: cell_processes(second.pid))
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=900)
    assert running.returncode == 130, output
    assert "Interrupted: the same command makes the remaining runs" in output
    assert not any(cell.is_running() for cell in cells)
    assert len(entries()) == 5
    assert {entry["run"] for entry in entries()} == run_folders()


@pytest.mark.hosts
def test_cell_fails_after_bounded_tries_and_killed_sweep_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := clusters.why_no_dask():
        unavailable("dask", why)
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    file = write_sweep(f"variants: {{long: {LONG}}}")
    with clusters.dask(tmp_path) as dask:
        worker = dask.add_worker()
        with started("sweep", file, "--on", dask.on) as running:
            eventually(attempts)
            worker.kill()
            until_printed(running, "failed: 1 worker was lost")
            output, _ = running.communicate(timeout=900)
        assert running.returncode == 1
        assert "1 run failed" in output
        worker = dask.add_worker()
        with started("sweep", file, "--on", dask.on) as running:
            (cell,) = eventually(lambda: cell_processes(worker.pid))
            running.kill()
        eventually(lambda: not cell.is_running())


@pytest.mark.hosts
def test_results_come_back_without_a_shared_folder(dask: clusters.Dask) -> None:
    """The worker has another file system in place of the sweep's folder, and none of the user's code."""
    if os.geteuid() or shutil.which("unshare") is None:
        unavailable("mountns", "a mount namespace takes root, and unshare of util-linux")
    Path("runs").mkdir()
    Path("own").mkdir()
    shutil.copy(TOPOLOGIES / "own/feddyn.py", "own")
    Path("base.yaml").write_text(f"{BASE}code: own/feddyn.py\n".replace("name: fedavg", OWN_RULE))
    hidden = 'mount -t tmpfs none runs && mount -t tmpfs none own && exec "$@"'
    dask.add_worker(["unshare", "--mount", "sh", "-c", hidden, "sh"])
    file = write_sweep("grid: {seed: [1]}")
    small = cli("sweep", file, "--on", f"{dask.on}?result=1kB")
    assert small.returncode == 1
    assert "the results have" in small.stdout
    assert "expected at most 1000B: raise it with ?result=SIZE" in small.stdout
    done = cli("sweep", file, "--on", dask.on)
    assert done.returncode == 0, done.stderr
    (run,) = run_folders()
    assert Path(f"runs/study/{run}/events.jsonl").stat().st_size > 0
    assert Path(f"runs/study/{run}/code/feddyn.py").is_file()


@pytest.mark.hosts
def test_worker_with_another_version_is_refused(dask: clusters.Dask, tmp_path: Path) -> None:
    """The other version is a stub that says what it is."""
    stub = tmp_path / "other/testbed/sweeps/clusters/dask.py"
    stub.parent.mkdir(parents=True)
    for folder in stub.parents[:3]:
        (folder / "__init__.py").touch()
    stub.write_text(
        "def _describe(dask_worker):\n"
        "    return {'identity': 'testbed 0.1.0 with Python 3.9', 'engine': False}\n"
        "async def _close(sweep): pass\n"
    )
    dask.add_worker(environment={"PYTHONPATH": str(tmp_path / "other")})
    done = cli("sweep", write_sweep("grid: {seed: [1]}"), "--on", dask.on)
    assert done.returncode == 1
    told = done.stderr.replace("\n", " ")
    assert "has testbed 0.1.0 with Python 3.9, this machine has " in told
    assert remote.identity() in told
    assert not Path("runs/study/index.json").exists()


@pytest.mark.hosts
def test_emulated_cells_need_a_worker_with_an_engine(dask: clusters.Dask) -> None:
    dask.add_worker()
    Path("base.yaml").write_text(EMULATED)
    done = cli("sweep", write_sweep("grid: {seed: [1]}"), "--on", dask.on)
    assert done.returncode == 2
    assert "--resources engine=1" in done.stderr


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("ray", "expected local, dask://HOST:PORT"),
        ("dask", "expected local, dask://HOST:PORT"),
        ("slurm://here", "expected local, dask://HOST:PORT"),
        ("slurm:partition", "'partition' has no value"),
        ("dask://here?result=much", "result: expected a size"),
        ("dask://127.0.0.1:1?retries=1", "retries: expected result"),
    ],
)
def test_wrong_cluster_is_refused(testbed: Testbed, on: str, told: str) -> None:
    code, _, err = testbed("sweep", write_sweep("grid: {seed: [1]}"), "--on", on)
    assert code == 2
    assert told in err.replace("\n", " ")


def test_needed_files_are_checked_by_content(tmp_path: Path) -> None:
    data = tmp_path / "here/ylecun/mnist"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}-0.parquet").write_text(split)
    Path("trace").write_text("1\n")
    text = BASE.replace("{name: quadratic, centers: [[0], [1], [5]],", "{name: mnist-logreg,")
    Path("base.yaml").write_text(text.replace("timing: 1s", "timing: 1s, link: {trace: {up: trace}}"))
    read = topology.load(Path("base.yaml"))
    needed = find_needed(read, tmp_path / "here")
    assert [Path(one.path).name for one in needed] == ["trace", "train-0.parquet", "test-0.parquet"]
    there = tmp_path / "there"
    shutil.copytree(tmp_path / "here", there)
    assert problem_of_needed(needed, there) is None
    assert "TESTBED_DATA=FOLDER" in str(problem_of_needed(needed, None))
    file = there / "ylecun/mnist/test-0.parquet"
    file.write_text("rest")
    assert f"another content in {file}" in str(problem_of_needed(needed, there))
    file.unlink()
    assert f"cannot read {file}" in str(problem_of_needed(needed, there))
    Path("trace").unlink()
    assert f"cannot read {tmp_path / 'trace'}" in str(problem_of_needed(needed, there))


def job(**changes: object) -> bytes:
    inputs = remote.pack_folder(Path("run"), remote.MAX_INPUTS)
    names = ("sweep", "/nowhere", "base-1", inputs, "virtual", False, False, None, (), 2**20)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(remote.CellJob(remote.identity(), *names), **changes)
    )


def test_worker_refuses_cells_that_it_cannot_run() -> None:
    Path("run").mkdir()
    Path("run/topology.yaml").write_text(BASE)
    answer = msgspec.msgpack.decode(remote.run(job(identity="testbed 9"), "worker 7"))
    assert answer["outcome"]["reason"] == "refused"
    assert answer["outcome"]["error"] == remote.mismatch("worker 7", remote.identity(), "testbed 9")
    missing = NeededFile("/no/such/data.csv", in_data_root=False, checksum=1)
    packed = remote.run(job(needed=(missing,)), "worker 7", Path())
    remote.close("sweep")
    outcome = msgspec.msgpack.decode(packed, type=remote.CellAnswer).outcome
    assert outcome["reason"] == "refused"
    assert str(outcome["error"]).startswith("worker 7 cannot read /no/such/data.csv")
    assert [*Path().glob("try-*")] == []


def zipped(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(name, content)
    return packed.getvalue()


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a\\..\\outside"])
def test_archive_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        remote.unpack_folder(zipped(name, b"x"), tmp_path / "in", 10)
    assert not (tmp_path / "outside").exists()


def test_archive_has_a_limit(tmp_path: Path) -> None:
    packed = zipped("zeros", bytes(10**6))
    assert len(packed) < 2000
    with pytest.raises(remote.TooLargeError, match="expected at most"):
        remote.unpack_folder(packed, tmp_path, 10**6 - 1)
    lying = packed.replace((10**6).to_bytes(4, "little"), (5).to_bytes(4, "little"))
    with pytest.raises(ValueError):  # noqa: PT011  (zipfile words it)
        remote.unpack_folder(lying, tmp_path, 10)
    with pytest.raises(ValueError, match="damaged"):
        remote.unpack_folder(b"no zip file", tmp_path, 10**6)
    assert [*tmp_path.iterdir()] == [tmp_path / "base.yaml"]


@pytest.mark.hosts
def test_slurm_repeats_a_lost_job_and_cancels_at_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := clusters.why_no_slurm():
        unavailable("slurm", why)
    file = write_sweep(f"variants: {{short: {{}}, long: {LONG}}}")
    with clusters.slurm() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with started("sweep", file, "--on", "slurm:time=00:20:00") as running:
            until_printed(running, "short, seed 0")
            (lost,) = eventually(lambda: found if len(found := clusters.slurm_jobs()) == 1 else [])
            clusters.cancel_slurm_job(lost)
            (again,) = eventually(lambda: set(clusters.slurm_jobs()) - {lost})
            eventually(lambda: len(attempts()) == 3)
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=900)
        assert clusters.slurm_jobs() == []
    assert running.returncode == 130, output
    assert again != lost
    (entry,) = entries()
    assert entry["cell"] == "short, seed 0"
    assert run_folders() == {entry["run"]}


def received(tmp_path: Path, answer: bytes) -> CellOutcome:
    """What a sweep makes of the answer of a worker."""
    (tmp_path / "base-1").mkdir(parents=True, exist_ok=True)
    pool = ClusterPool(Target("dask://x", "dask", "x", {}, 2**20), tmp_path, 1)
    done: Future[bytes] = Future()
    done.set_result(answer)
    try:
        return pool._outcome(done, RunDirectory(tmp_path / "base-1"))
    finally:
        pool.close()


def answer(files: bytes | None = None, **fields: Any) -> bytes:
    outcome = {"reason": "time is up", "error": None, "seconds": 1.0, **fields}
    return msgspec.msgpack.encode(remote.CellAnswer(outcome, files=files))


def encrypted(packed: bytes) -> bytes:
    """Set the flag of the only entry, in its header and in the directory."""
    at = packed.index(b"PK\x01\x02") + 8
    return packed[:6] + b"\x01\x00" + packed[8:at] + b"\x01\x00" + packed[at + 2 :]


@pytest.mark.parametrize(
    "wrong",
    [
        answer(),
        answer(encrypted(zipped("events.jsonl", b"{}"))),
        answer(zipped("a", b"x"), seconds=math.nan),
        answer(zipped("a", b"x"), accuracy=417.3),
        answer(zipped("a", b"x"), loss=math.nan),
        answer(zipped("a", b"x"), reason=7),
        b"",
    ],
)
def test_unusable_answer_of_a_worker_fails_its_cell_alone(tmp_path: Path, wrong: bytes) -> None:
    outcome = received(tmp_path, wrong)
    assert outcome.reason == "failed"
    assert str(outcome.error).startswith("the answer of the worker cannot be used: ")


def test_refusal_of_a_worker_names_the_cluster(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"^dask://x: no torch$"):
        received(tmp_path, answer(reason="refused", error="no torch"))


def test_control_characters_of_a_worker_are_not_printed(tmp_path: Path) -> None:
    outcome = received(tmp_path, answer(reason="failed", error="\x1b[2Jgone\n", validity={"a": ["\a"]}))
    assert outcome.error == "\\x1b[2Jgone\n"
    assert outcome.validity == {"a": ["\\x07"]}
