"""`testbed replay`: the same model from the same updates, bit by bit, or the first difference."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import threadpoolctl
from xxhash import xxh3_64_intdigest

from agents.rules.fedasync import FedAsyncState
from agents.rules.interface import Actions, Update
from testbed.errors import BadInputError, RunFailedError
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from tests.running import Testbed, write_small_topology
from tests.testbed.test_virtual_run import _run, _topology

EVENTFUL: dict[str, Any] = {
    "durability": "recording",
    "devices": [
        {"name": "fast", "count": 3, "timing": {"distribution": "exponential", "mean": "1s"}},
        {"name": "slow", "timing": "3s", "link": {"up": "100kbit", "rtt": "80ms"}},
    ],
    "scenario": [
        {"at": "4s", "crash": "fast-1", "restart_after": "3s"},
        {"at": "9s", "leave": "fast-2"},
    ],
    "stop": {"after": "25s"},
}
MAGIC = b"inputs2\n"
UPDATE = b'["UpdateArrived", {"at": 2, "sender": "fast", "size": 1, "arrived": 2}]'


def test_rules_compute_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several, a rule's sums would depend on the number of cores."""
    seen: list[dict[str, Any]] = []
    update = FedAsyncState.update

    def observed(self: FedAsyncState, found: Update) -> Actions:
        seen.extend(one for one in threadpoolctl.threadpool_info() if "numpy" in one["filepath"])
        return update(self, found)

    monkeypatch.setattr(FedAsyncState, "update", observed)
    with threadpoolctl.threadpool_limits(2, "blas"):
        run = _run(_topology(tmp_path, rule={"name": "fedasync"}, **EVENTFUL), tmp_path)
        virtual = len(seen)
        same = replay(RunDirectory(run.path))
        assert len(seen) == 2 * virtual > 0
    assert (same.rule, same.models) == ("fedasync", 2)  # the first one and the last
    assert same.updates == len(run.updates) > 10
    assert run.ended is not None
    assert same.version == run.ended.version > 5
    assert {one["num_threads"] for one in seen} == {1}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    return _run(_topology(folder, durability="recording"), folder).path


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> RunDirectory:
    """A copy of a recorded run, to be tampered with."""
    return RunDirectory(copytree(recorded, tmp_path / "run"))


def test_changed_update_is_found_by_its_checksum_or_by_the_model(run: RunDirectory) -> None:
    data = bytearray(run.inputs.read_bytes())
    second = data.index(b'["UpdateArrived"', data.index(b'["UpdateArrived"') + 1)
    header = data.index(b'{"__metadata__"', second)
    (length,) = struct.unpack_from("<Q", data, header - 8)
    data[header + length + 4 * 649 + 2] ^= 0x40  # of the last parameter, half of its magnitude
    run.inputs.write_bytes(data)
    told = r"inputs.bin, the entry at byte \d+, number \d+ of the run, is damaged: its checksum is wrong"
    with pytest.raises(BadInputError, match=told):
        replay(run)
    write(run.inputs, list(raw(run.inputs)))  # with valid checksums
    with pytest.raises(RunFailedError, match=r"models/final differs in 1 of 650 .* is number 649:"):
        replay(run)


def test_difference_names_the_kernels_that_round_otherwise(run: RunDirectory) -> None:
    """The final model of another processor differs in the last bit."""
    model = run.models / "final.safetensors"
    data = bytearray(model.read_bytes())
    data[-4] ^= 1
    model.write_bytes(data)
    here = run.read_manifest()["versions"]
    with pytest.raises(RunFailedError, match=r"Equal until then: [^.]*\.$"):
        replay(run)
    run.write_manifest(versions={**here, "blas": "openblas 0.3.29 (Kernel9)"})
    with pytest.raises(RunFailedError, match=r"\(Kernel9\) \(here .*CORETYPE=Kernel9 before"):
        replay(run)
    run.write_manifest(versions={**here, "processor": "Cray-1"})
    with pytest.raises(RunFailedError, match=r"processor Cray-1 \(here .*\), which may [^:]*\.$"):
        replay(run)
    run.write_manifest(versions={"numpy": here["numpy"]})  # of an earlier version
    with pytest.raises(RunFailedError, match=r"Equal until then: [^.]*\.$"):
        replay(run)


def test_missing_input_is_found_by_its_number_or_at_the_first_changed_record(run: RunDirectory) -> None:
    entries = list(raw(run.inputs))
    without = b"".join(_packed(n, *entry) for n, entry in enumerate(entries) if n != 9)
    run.inputs.write_bytes(MAGIC + without)
    with pytest.raises(BadInputError, match="it is number 10 of the run"):
        replay(run)
    updates = [n for n, (text, _) in enumerate(entries) if text.startswith(b'["UpdateArrived"')]
    del entries[updates[3]]
    write(run.inputs, entries)
    with pytest.raises(RunFailedError, match=r"events.jsonl:8 has UpdateApplied.client='slow'.* 3 upd"):
        replay(run)


def test_wording_of_another_version_is_no_difference(tmp_path: Path) -> None:
    topology = _topology(tmp_path, **EVENTFUL | {"bounds": {"staleness": 0}})
    run = RunDirectory(_run(topology, tmp_path).path)
    text = run.events.read_text(encoding="utf-8")
    assert '"reason":"staleness ' in text
    run.events.write_text(
        text.replace('"reason":"staleness ', '"reason":"too stale: '), encoding="utf-8"
    )
    assert replay(run).updates > 0
    dispatch = re.sub(r'("event":"rejected".*"dispatch":)\d+', r"\g<1>9999", text, count=1)
    run.events.write_text(dispatch, encoding="utf-8")
    with pytest.raises(RunFailedError, match="dispatch=9999"):
        replay(run)


def test_torn_last_entry_is_an_error(run: RunDirectory) -> None:
    whole = run.inputs.read_bytes()
    *_, (text, payload) = raw(run.inputs)
    start = len(whole) - 36 - len(text) - len(payload)
    for kept in (start + 5, start + 36, len(whole) - 1):
        run.inputs.write_bytes(whole[:kept])
        with pytest.raises(RunFailedError, match=f"inputs.bin is torn at byte {start}.* 16 updates"):
            replay(run)


def test_recording_that_ends_before_the_run_is_refused(run: RunDirectory) -> None:
    write(run.inputs, list(raw(run.inputs))[:-10])
    with pytest.raises(RunFailedError, match="ends before the run did"):
        replay(run)


@pytest.mark.parametrize(
    ("text", "payload", "message"),
    [
        (b'["__class__", {}]', b"", "not an input of an aggregator"),
        (b'["EndRequested", {"reason": "after"}]', b"", "EndRequested has the wrong fields"),
        (b'["TimersDue", {"at": "soon"}]', b"", "TimersDue has the wrong fields"),
        (b"[" * 100_000, b"", "nested too deeply"),
        (UPDATE, b"\x80\x04\x95", "shorter than a header"),
        (b'{"seed": 1}', b"", "Setup"),
    ],
    ids=["name", "fields", "types", "nested", "payload", "setup"],
)
def test_invalid_recording_is_refused(
    text: bytes, payload: bytes, message: str, run: RunDirectory
) -> None:
    write(run.inputs, [*raw(run.inputs), (text, payload)])
    with pytest.raises(BadInputError, match=rf"the entry at byte \d+: .*{message}"):
        replay(run)


def test_run_without_a_recording_is_refused_with_a_hint(testbed: Testbed, run: RunDirectory) -> None:
    run.inputs.unlink()
    said = testbed("replay", run.path)
    assert said.code == 2
    assert "durability: recording" in said.err


def test_run_of_processes_is_replayed(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path, durability="recording", stop={"updates": 15})
    up = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert up.code == 0, up.out + up.err
    (path,) = (tmp_path / "runs").iterdir()
    said = testbed("replay", path)
    assert said.code == 0, said.err
    assert "the final model, version 5, is bit-identical" in said.out
    assert "15 updates" in said.out


def raw(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Texts and payloads, unread."""
    data, at = path.read_bytes(), len(MAGIC)
    while at < len(data):
        text, payload = struct.unpack_from("<IQ", data, at)
        middle = at + 36 + text
        at = middle + payload
        yield data[middle - text : middle], data[middle:at]


def _packed(number: int, text: bytes, payload: bytes) -> bytes:
    head = struct.pack("<IQQQ", len(text), len(payload), number, xxh3_64_intdigest(text + payload))
    return head + struct.pack("<Q", xxh3_64_intdigest(head)) + text + payload


def write(path: Path, entries: list[tuple[bytes, bytes]]) -> None:
    path.write_bytes(MAGIC + b"".join(_packed(n, *entry) for n, entry in enumerate(entries)))
