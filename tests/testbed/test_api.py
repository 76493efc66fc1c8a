"""`import testbed`: runs from Python, in virtual time; `tests/test_flower.py` has one in processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

import testbed
from testbed.api.topology_input import text_of
from testbed.rundir import finding
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("forked_programs")

TOPOLOGY: dict[str, Any] = {
    "name": "api",
    "task": {"name": "quadratic", "centers": [[0], [1], [5]], "local": {"steps": 1, "lr": 0.4}},
    "rule": {"name": "fedasync", "mixing": 0.5},
    "devices": [{"name": "pi", "count": 3, "timing": "1s"}],
    "evaluate": {"every": "2s"},
    "stop": {"updates": 12},
    "runtime": {"name": "virtual"},
}
ENDLESS = {**TOPOLOGY, "stop": {"after": "100000h"}}


def test_every_public_name_is_there() -> None:
    assert "up" in dir(testbed)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = testbed.nothing
    assert {name for name in testbed.__all__ if getattr(testbed, name) is None} == set()


def test_up_reports_events_and_progress(tmp_path: Path) -> None:
    """The run is started from a thread beside an event loop, which continues meanwhile: the first event
    waits for it."""
    seen: list[testbed.events.Record] = []
    told: list[str] = []
    loop_went_on = threading.Event()

    def see(record: testbed.events.Record) -> None:
        seen.append(record)
        assert loop_went_on.wait(120)

    def whole() -> tuple[testbed.RunHandle, Any]:
        with testbed.up(TOPOLOGY, on_event=see, on_progress=told.append, runs=tmp_path) as handle:
            return handle, handle.wait()

    async def main() -> tuple[testbed.RunHandle, Any]:
        work = asyncio.create_task(asyncio.to_thread(whole))
        while not seen:
            await asyncio.sleep(0.01)
        loop_went_on.set()
        return await work

    handle, result = asyncio.run(main())
    assert (handle.outcome, handle.verdict, handle.live) == ("updates", "simulated", False)
    assert len(result.updates) == 12
    assert isinstance(seen[0], testbed.events.RunStarted)
    assert isinstance(seen[-1], testbed.events.RunEnded)
    assert str(seen) == str([*testbed.attach(handle.id, runs=tmp_path).events()])  # NaN equals NaN
    assert any("Preparing the data" in line for line in told)
    assert not any("\x1b" in line for line in told)
    assert len(testbed.load(handle.id, runs=tmp_path).updates) == len(testbed.load(handle).updates) == 12
    with pytest.raises(testbed.BadInputError, match="is not running"):
        handle.kill("pi-1")
    with pytest.raises(OSError, match="missing"):
        handle.save_model(tmp_path / "missing" / "model.pt")
    with pytest.raises(IsADirectoryError):
        handle.save_model(tmp_path)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(testbed.BadInputError, match="has no device phone; it has pi, pi-1, pi-2, pi-3"):
        handle.pause("phone")


def test_down_continues_after_a_run_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.run.live_runs.find_live_runs", list)  # all else on this machine
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    for run, runtime in (("a", "docker"), ("b", "process"), ("c", "docker")):
        (tmp_path / run / "work").mkdir(parents=True)
        (tmp_path / run / "manifest.json").write_text(json.dumps({"runtime": runtime}))
    with pytest.raises(testbed.HostError, match=r"(?s)a: no Docker engine that .*\nc: no Docker"):
        testbed.down(None, runs=tmp_path)
    assert not (tmp_path / "b" / "work").exists()
    assert finding.find_exact("x" * 300, tmp_path) is None  # no more to look at than what is another's


def test_resolved_topology_reproduces_the_run(tmp_path: Path) -> None:
    """The resolved topology has keys such as `on`, which YAML 1.1 reads as true."""
    run = testbed.simulate(TOPOLOGY, runs=tmp_path)
    again = testbed.simulate(run.topology, runs=tmp_path)
    assert "on" in run.topology["evaluate"]
    assert again.topology == run.topology
    assert again.updates.equals(run.updates)


def test_interrupt_removes_the_run(tmp_path: Path) -> None:
    handle = testbed.up(ENDLESS, runs=tmp_path)
    with pytest.raises(TimeoutError, match="still running after"):
        handle.wait(0.1)
    main = threading.get_ident()

    def interrupt_the_wait() -> None:
        eventually(lambda: sys._current_frames()[main].f_code is testbed.RunHandle.wait.__code__)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_the_wait).start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert (handle.live, handle.outcome) == (False, "interrupted")
    assert not (handle.path / "work").exists()


def test_run_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    code = f"import testbed, time\nprint(testbed.up({ENDLESS!r}).id, flush=True)\ntime.sleep(99)"
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    run = starter.stdout.readline().decode().strip()
    handle = testbed.attach(run, runs=tmp_path / "runs")
    assert handle.live
    starter.kill()
    starter.wait()
    starter.stdout.close()
    with pytest.raises(testbed.RunFailedError, match="did not run to its end: interrupted"):
        handle.wait(240)


def test_detached_run_continues_until_it_is_removed(tmp_path: Path) -> None:
    """It continues even if a callback fails."""

    def refuse(record: testbed.events.Record) -> None:
        raise LookupError(f"not me at {record.at:g}")

    run = testbed.up(ENDLESS, runs=tmp_path, detach=True).id
    handle = testbed.attach(tmp_path / run, on_event=refuse)
    with pytest.raises(LookupError, match="not me at 0"):
        handle.wait()
    assert handle.live
    pid = handle._directory.read_manifest()["controller"]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists())  # nor is it left as a zombie of ours
    assert not handle.live
    assert handle.outcome == "crashed"
    handle.down()
    assert not (handle.path / "work").exists()


def test_bad_input_is_raised(tmp_path: Path) -> None:
    with pytest.raises(testbed.BadInputError, match=r"rule.mixing: .*expected"):
        testbed.up({**TOPOLOGY, "rule": {"name": "fedasync", "mixing": 7}}, runs=tmp_path)
    with pytest.raises(testbed.BadInputError, match="no such file"):
        testbed.up("nowhere.yaml", runs=tmp_path)
    with pytest.raises(testbed.BadInputError, match="no run nowhere"):
        testbed.attach("nowhere", runs=tmp_path)
    assert list(tmp_path.glob("api-*")) == []


def test_failed_run_raises_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the controller before the run clock goes."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(testbed.RunFailedError, match="its controller ended"):
        testbed.up(TOPOLOGY, runs=tmp_path)


def test_sweep_runs_and_compares_its_cells(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(text_of(TOPOLOGY).text)
    study: dict[str, Any] = {
        "topology": base,
        "grid": {"seed": range(1, 3), "stop.updates": np.array([3, 6])},
    }
    told: list[str] = []
    found = testbed.sweep(study, jobs=1, runs=tmp_path, name="mine", on_progress=told.append)
    assert sorted(len(run.updates) for run in found.runs) == [3, 3, 6, 6]
    assert (found.failed, found.folder, found.target) == (0, tmp_path / "mine", None)
    assert told[0] == f"mine: 4 runs, into {tmp_path / 'mine'}"
    with pytest.raises(testbed.BadInputError, match="cannot be written as YAML"):
        testbed.sweep({**study, "variants": {"a": object()}}, runs=tmp_path)
    with pytest.raises(testbed.TestbedError, match="target: found 90, expected a share"):
        found.table(90)
    table = found.table(0.05)
    assert table["runs"].tolist() == [2, 2]
    assert table["loss_low"].isna().all()  # two seeds have no interval
    texts = ["name", "task", "baseline", "settings_rule", "settings_updates"]
    numbers = table.drop(columns=texts)
    assert all(pd.api.types.is_numeric_dtype(numbers[name]) for name in numbers.columns)


def test_functions_without_runs_raise_bad_input(tmp_path: Path) -> None:
    for take in (
        lambda: testbed.report([], tmp_path / "report.html"),
        lambda: testbed.draw([], tmp_path / "figure.png"),
        lambda: testbed.step_time([]),
    ):
        with pytest.raises(testbed.BadInputError, match="no runs: give one or more"):
            take()
    assert not list(tmp_path.iterdir())


def test_topology_may_be_a_file_a_text_or_a_mapping(tmp_path: Path) -> None:
    from testbed import topology

    file = tmp_path / "t.yaml"
    file.write_text(text_of(TOPOLOGY).text)
    text = file.read_text()
    read = topology.load(file)
    given: list[Any] = [file, str(file), text, {**TOPOLOGY, "devices": tuple(TOPOLOGY["devices"])}, read]
    parsed = [topology.parse(one.text, one.name) for one in (text_of(each) for each in given)]
    assert {one.to_yaml() for one in parsed} == {read.to_yaml()}
    assert [one.source.name for one in parsed] == [str(file), str(file), *2 * ["<topology>"], str(file)]
    assert "seed: 3" in text_of(file, {"seed": 3}).text
    for wrong in (7, {**TOPOLOGY, "seed": object()}):
        with pytest.raises(testbed.BadInputError):
            text_of(wrong)  # type: ignore[arg-type]


@pytest.mark.hosts
def test_notebook_shows_a_running_and_a_finished_run(tmp_path: Path) -> None:
    """The display of the first cell is kept up to date, by display id, in any front end."""
    cells = [
        f"import testbed\nrun = testbed.up({TOPOLOGY!r}, runs={str(tmp_path)!r})\nrun.show(every=0.1)",
        "result = run.wait()\nimport threading\n"
        "[one.join() for one in threading.enumerate() if one.name.startswith('display of')]",
        "run",
    ]
    notebook = nbformat.v4.new_notebook(  # type: ignore[no-untyped-call]
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    )
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    shown, _, table = asyncio.run(client.async_execute()).cells
    (output,) = shown.outputs
    html = output.data["text/html"]
    assert "12 updates in 12 versions" in html
    assert html.count('src="data:image/png;base64,') == 2
    assert "pi-3" in html
    assert "simulated" in table.outputs[0].data["text/html"]
