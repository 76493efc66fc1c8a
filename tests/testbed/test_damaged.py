"""Run directories and topologies that somebody has damaged, or made to do harm; disks that are full."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import psutil
import pytest

from agents import events
from agents.disk import files
from analysis import load, part, records
from analysis.charts import CHARTS
from testbed import topology
from testbed.data import preparation
from testbed.errors import BadInputError, HostError, from_os_error, writable_file, writable_folder
from testbed.run import live_runs, replay
from testbed.rundir.directory import RunDirectory
from testbed.rundir.listing import list_runs
from testbed.rundir.live_files import Samples
from testbed.runtimes import LiveRun
from testbed.topology import link_traces
from testbed.topology.links import LinkTrace
from tests.fuzz.run_directories import whole_run
from tests.running import Testbed
from tests.testbed.test_replay import raw, write

HEAD = (
    "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\nstop: {after: 1s}\n"
)


def manifest(runs: Path, run: str, **entries: object) -> RunDirectory:
    directory = RunDirectory.create(runs, run)
    directory.manifest.write_text(json.dumps(entries))
    return directory


def test_unreadable_manifest_does_not_hide_other_runs(tmp_path: Path, testbed: Testbed) -> None:
    ended = {"outcome": "after", "runtime": "docker", "cpus": {}}
    manifest(tmp_path, "a", created=1.0, **ended, validity={"valid": True})
    manifest(tmp_path, "b", created=2.0, **ended, validity={"valid": False, "reasons": ["busy"]})
    manifest(tmp_path, "c", created=3.0, **ended)
    manifest(tmp_path, "d", created=4.0)
    manifest(tmp_path, "e", created="yesterday", devices=[1])
    os.mkfifo(manifest(tmp_path, "f").manifest.with_name("pipe"))
    (tmp_path / "f" / "pipe").rename(tmp_path / "f" / "manifest.json")
    found = {row.run: (row.outcome, row.verdict) for row in list_runs(tmp_path)}
    assert found == {
        "a": ("after", "valid"),
        "b": ("after", "not valid"),
        "c": ("after", "not judged"),
        "d": ("crashed", None),
        "e": ("unreadable", None),
        "f": ("unreadable", None),
    }
    assert "not valid" in testbed("runs", "--runs", tmp_path).out
    said = testbed("export", tmp_path / "e")
    assert said.code == 2
    assert "manifest.json: not a manifest: created: Input should be a valid number" in said.err


def test_leftovers_of_a_killed_controller_are_removed_and_nothing_else(
    tmp_path: Path, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_runs, "find_live_runs", list)  # `--all` would end those of other tests
    dead = {"pid": 2**22 - 1, "started": 1.0}
    directories = [manifest(tmp_path, run, controller=dead) for run in ("one", "two", "far")]
    for directory in directories:
        (directory.work / "fast.json").write_text("a password")
        (directory.models / "final.safetensors").write_text("a model")
    directories[2].write_manifest(host={"name": "another host"})
    assert testbed("down", "one", "--runs", tmp_path).out == "one: down\n"
    assert [directory.work.exists() for directory in directories] == [False, True, True]
    assert testbed("down", "--all", "--runs", tmp_path).out.endswith("two: down\n")
    assert [directory.work.exists() for directory in directories] == [False, False, True]
    assert all((directory.models / "final.safetensors").exists() for directory in directories)


def test_suspended_controller_ends_its_run_and_has_time_for_its_fleet(tmp_path: Path) -> None:
    fleet = {f"d-{number}": {"group": "d"} for number in range(1, 51)}
    directory = manifest(tmp_path, "a", devices=fleet)
    assert live_runs.stop_timeout(directory) == 110.0
    assert live_runs.stop_timeout(manifest(tmp_path, "b", created="damaged")) == 60.0
    ending = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{ending}; signal.pause()"], stdout=subprocess.PIPE
    ) as controller:
        assert controller.stdout is not None
        controller.stdout.readline()
        known = psutil.Process(controller.pid)
        directory.write_manifest(controller={"pid": known.pid, "started": known.create_time()})
        known.suspend()
        try:
            live_runs.take_down(LiveRun("a", None, 0, directory.path))
            assert controller.wait(120) == 7
        finally:
            controller.kill()


@pytest.mark.parametrize(
    "line", [b"null", b'{"device":"a","at":1}null', b' null{"device":"a"}', b"[1]", b"{" * 5000]
)
def test_no_line_crashes_the_process(line: bytes) -> None:
    """Arrow's reader of JSON crashes where a line is `null`."""
    whole = b'{"device":"a","at":1.0,"cpu":2.0,"more":"}x"}\n'
    for block in (line + b"\n", whole + line + b"\n" + whole):
        tables, _ = records.parse_samples(block, None)
        assert tables["telemetry"]["cpu"].to_pylist() == [2.0] * block.count(whole)
        assert not len(tables["probe"])
    with pytest.raises(ValueError, match=r"events\.jsonl:1"):
        records.parse_events(Path("events.jsonl"), records.Lines(line + b"\n"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("at", '"1"'),
        ("at", "true"),
        ("version", "1.5"),
        ("version", "9" * 30),
        ("loss", "[1]"),
    ],
)
def test_record_with_wrong_field_types_is_refused(field: str, value: str, tmp_path: Path) -> None:
    fields = {"at": "1.0", "version": "1", "loss": "null", "accuracy": "0.5", field: value}
    line = '{"event":"evaluation",' + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
    with pytest.raises(ValueError, match=f"({field} is too large|{field}`)"):
        events.from_line(line)
    manifest(tmp_path, "run").events.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl:1"):
        load.load(tmp_path / "run")


def test_number_too_large_for_a_float_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    path.write_text("".join(f'{{"device":"a","at":{at}}}\n' for at in (10**400, "NaN", 1)))
    assert [sample["at"] for sample in Samples(path).read()] == [1]
    assert isnan(part.known_number(10**400))


def test_a_recording_of_a_rule_with_other_parameters_is_refused(tmp_path: Path) -> None:
    path = whole_run(tmp_path)
    (setup, _), *rest = raw(path / "inputs.bin")
    write(path / "inputs.bin", [(setup.replace(b"buffer_size", b"buffer|size"), b""), *rest])
    with pytest.raises(BadInputError, match=r"inputs\.bin names an unknown rule"):
        replay.replay(RunDirectory(path))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            files.open_regular(path)
    with pytest.raises(OSError, match="not a regular file"):
        link_traces.read(LinkTrace(down="/dev/zero"), tmp_path)
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(OSError, match="larger than"):
        files.read(tmp_path / "large", 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices:\n" + "  - {name: d, cpu: 0.1}\n" * 2001, "devices: found 2,001 groups"),
        ("devices:\n" + "  - {name: d, cpu: 0.1, count: 900000}\n" * 2, "found 1,800,000 devices,"),
        ("devices: !!timestamp x", "this is no tag:yaml.org,2002:timestamp"),
        ("devices: [" + "x, " * 60 + "\x07]", "is not allowed"),
        (
            "devices: [{name: d, count: 90000, cpu: 0.1}]\nscenario:\n"
            + "  - {at: 1s, leave: d}\n" * 12,
            "scenario: has 1,080,000 actions on devices, expected at most",
        ),
    ],
)
def test_huge_or_malformed_topology_is_refused(text: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        topology.parse(HEAD + text)


def test_reading_a_file_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    """`testbed replay` allows models of 8 GiB, more than many machines can allocate."""
    (tmp_path / "model").write_bytes(b"w")
    assert files.read(tmp_path / "model", most=2**60) == b"w"


def test_topology_of_30_mb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("#" * 30_000_000)
    with pytest.raises(BadInputError, match=r"t\.yaml: cannot be read: this is larger than 4 MiB"):
        topology.load(tmp_path / "t.yaml")


def test_full_disk_is_reported_during_data_preparation(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    parsed = topology.parse(HEAD + "devices: [{name: d, cpu: 0.1}]\n")
    prepared = preparation.prepare(parsed, None)
    directory = RunDirectory.create(tmp_path, "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(HostError, match=r"test\.safetensors could not be written .* Make room"):
            preparation.write(prepared, directory)
        with pytest.raises(OSError, match="File too large") as raised, (tmp_path / "f").open("wb") as f:
            f.write(bytes(10_000))
        told = str(from_os_error(raised.value, directory.path))
        assert told.startswith(f"{directory.path}: File too large. Raise the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_is_reported_with_place_and_fix() -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        Path("/dev/full").write_text("x")
    told = r"runs/a: No space left on device \([\d,.]+ MiB free\). Make room there, or name"
    assert re.match(told, str(from_os_error(raised.value, Path("runs/a"))))


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder with two runs, as if it were another user's: one may be read, the other not even that.
    Root could do both."""
    with tempfile.TemporaryDirectory() as name:
        modes = {(folder := Path(name)): 0o555, folder / "run": 0o555, folder / "hidden": 0}
        for run in [*modes][1:]:
            run.mkdir()
            (run / "manifest.json").write_text("{}")
        for one, mode in modes.items():
            one.chmod(mode)
        if os.getuid() == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(os.getuid())
        for one in modes:
            one.chmod(0o755)


@pytest.mark.parametrize(
    "command",
    [
        "report no-such-run --to CLOSED/report.html",  # before any run is looked for
        "compare no-such-run --figure CLOSED/figure.pdf",
        "evaluate no-such-run --to CLOSED/models.csv",
        "export CLOSED/run",
        "export CLOSED/run --to CLOSED/new/tables",
        "export CLOSED/run --model",
        "profiles --script CLOSED/measure.py",
        "new examples CLOSED/new/folder",
    ],
)
def test_read_only_place_is_bad_input(testbed: Testbed, closed: Path, command: str) -> None:
    said = testbed(*command.replace("CLOSED", str(closed)).split())
    assert said.code == 2
    assert "you may not write there; name another place" in said.err


@pytest.mark.parametrize("run", ["run", "hidden"])
def test_run_of_another_user_is_not_resumed(testbed: Testbed, closed: Path, run: str) -> None:
    for arguments in (("--resume", closed / run), ("--resume", run, "--runs", closed)):
        said = testbed("up", *arguments)
        assert said.code == 2
        assert f"you may not read and write {closed / run}: " in said.err


def test_unwritable_place_is_reported_before_work_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert writable_folder(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    assert writable_file(tmp_path / "file") == tmp_path / "file"
    for place, why in (("file/tables", "file is not a folder"), ("file", "file is not a folder")):
        with pytest.raises(BadInputError, match=why):
            writable_folder(tmp_path / place)
    for place, why in ((".", "this is a folder"), ("none/file", "there is no folder .*none; make it")):
        with pytest.raises(BadInputError, match=f"^--to .*: {why}"):
            writable_file(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_file_that_cannot_be_created_is_reported_with_the_fix(tmp_path: Path) -> None:
    new, there, hidden = tmp_path / "new", tmp_path, tmp_path / "none" / "new"
    told = [
        str(from_os_error(PermissionError(13, "Permission denied", str(path))))
        for path in (new, there, hidden)
    ]
    assert told == [
        f"{new}: Permission denied. Name a place that you may write to (--runs, --to)",
        f"{there}: Permission denied",
        f"{hidden}: Permission denied",
    ]


def test_error_has_no_control_characters_and_a_bound() -> None:
    error = BadInputError("a.csv:1: \x1b[2J\u202e\nnext" + "x" * 20_000)
    assert str(error).startswith("a.csv:1: \\x1b[2J\\u202e\nnextx")
    assert len(str(error)) == 10_000


def test_chart_without_runs_is_reported() -> None:
    with pytest.raises(ValueError, match="the chart of devices needs at least one run"):
        CHARTS["devices"]([])
