"""A crash of the aggregator, wherever it comes, takes nothing: not of state, records or models."""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import durable as durability
from agents.aggregator import inputs, recording, storage
from agents.aggregator.core import Setup
from agents.aggregator.durable import DurableCore
from agents.aggregator.inputs import Input, Settings
from agents.aggregator.recording import RecordingError
from agents.aggregator.storage import SnapshotError
from agents.config import Named, StopConditions
from agents.device_actions import Pause, to_json
from agents.models.vectors import Buffers
from agents.rules import RULES
from agents.rules.fedasync import FedAsync
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from agents.timing.nanoseconds import SECOND, from_seconds
from agents.wire.messages import Acknowledgement
from tests.agents import fleet as fleets
from tests.agents.fleet import Fleet
from tests.agents.helpers import COMPRESSED, Core, compressor, done, message, of, records
from tests.agents.lives import Life
from tests.agents.rules.test_properties import IMPORTANCE, INSTANCES, MOVES
from tests.fuzz.run_directories import DAMAGES

CHECKPOINT_EVERY = 7.0
"""Seconds; an instant of a fleet is one."""


def setup_of(rule: Rule, **settings: Any) -> Setup:
    (name,) = (name for name, kind in RULES.items() if type(rule) is kind)
    asked = Settings(
        run="run",
        schema="s",
        side=rule.client_side,
        importance=IMPORTANCE,
        stop=StopConditions(after=1e6),
        evaluate_every=from_seconds(1e6),
        checkpoint_every=from_seconds(CHECKPOINT_EVERY),
        **settings,
    )
    return Setup(asked, Named(name, vars(rule)), seed=7)


def kept(folder: Path, setup: Setup, leg: str = "1", **options: Any) -> DurableCore:
    """Return the core of the run in `folder`, new or resumed."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    options = {"durability": "update", "w": np.full(1, 0.3, np.float32)} | options
    return DurableCore(folder, setup, leg=leg, **options)


class Listening:
    """A durable core that also records its inputs."""

    def __init__(self, durable: DurableCore) -> None:
        self.durable = durable
        self.heard: list[Input] = []

    def handle(self, event: Input) -> Any:
        self.heard.append(copy.deepcopy(event))
        done = self.durable.handle(event)
        if isinstance(event, inputs.InstantOver):
            self.durable.sync()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.durable.core, name)


def lived(rule: Rule, folder: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> Listening:
    """A fleet's life with `rule`, in one go."""
    listening = Listening(kept(folder, setup_of(rule)))

    def make_core(*_: Any, **__: Any) -> Any:
        return Core(listening, None), listening.durable.server  # type: ignore[arg-type]

    monkeypatch.setattr(fleets, "make_core", make_core)
    dice = random.Random(3)  # noqa: S311
    fleet = Fleet(rule, IMPORTANCE, lambda _, w: np.cos(w))
    for _ in range(moves):
        Life(fleet).happens(dice.choice(MOVES), dice.choice("abcd"))
    return listening


def plain(found: Any, above: tuple[int, ...] = ()) -> Any:
    """All that the state `found` holds, to be compared to the bit."""
    if isinstance(found, np.ndarray):
        return found.dtype.str, found.shape, found.tobytes()
    if isinstance(found, np.random.Generator):
        return found.bit_generator.state
    if isinstance(found, set | frozenset):
        return sorted(found)
    if isinstance(found, dict):
        return [(key, plain(value, above)) for key, value in found.items()]
    if isinstance(found, list | tuple | deque):
        return [plain(one, above) for one in found]
    if isinstance(found, partial):
        return found.func, found.keywords
    if not type(found).__module__.startswith("agents.") or id(found) in above:
        return None if id(found) in above else found
    slots = getattr(type(found), "__slots__", ())
    fields = dict.fromkeys((*slots, *getattr(found, "__dict__", ())))
    return [(name, plain(getattr(found, name), (*above, id(found)))) for name in fields]


def crash(durable: DurableCore, folder: Path) -> None:
    """Lose everything that was not yet written to the operating system."""
    there = folder.with_name("crash")
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(folder, there)
    durable.close()
    shutil.rmtree(folder)
    there.rename(folder)


@pytest.mark.parametrize("rule", [rules[-1] for rules in INSTANCES.values()], ids=INSTANCES)
def test_run_with_crashes_equals_the_run_without(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, records, the rule's buffer and its draws: to the bit."""
    for sync in ("fsync", "fdatasync"):  # the operating system lives on
        monkeypatch.setattr(os, sync, lambda _: None)
    whole = lived(rule, tmp_path / "whole", monkeypatch, moves=60)
    dice, folder, setup = random.Random(5), tmp_path / "broken", setup_of(rule)  # noqa: S311
    durable, done = kept(folder, setup), 0
    for crash_at in [*sorted(dice.sample(range(len(whole.heard)), 4)), len(whole.heard)]:
        while done < crash_at:
            event = whole.heard[done]
            durable.handle(copy.deepcopy(event))
            done += 1
            if isinstance(event, inputs.InstantOver):
                durable.sync()
        crash(durable, folder)
        durable = kept(folder, setup)
        done = durable.entries
    assert done == len(whole.heard)
    whole.durable.sync()
    assert plain(durable.core) == plain(whole.durable.core)
    journal = (folder / "events.jsonl").read_bytes()
    assert journal == (tmp_path / "whole" / "events.jsonl").read_bytes()
    assert durable.server.version > 0
    durable.close()
    whole.durable.close()


# A crash at each point


def begun(folder: Path, **options: Any) -> DurableCore:
    """Two clients have dispatches 1 and 2 of version 0; both updates of a buffer are missing."""
    durable = kept(folder, setup_of(FedBuff(buffer_size=2)), **options)
    for name in "ab":
        durable.handle(inputs.StatusChanged(0, name, "ready"))
    durable.handle(inputs.Started(0, 1e9, 0))
    durable.handle(inputs.InstantOver(0))
    durable.sync()
    return durable


def arrival(client: str, at: int = 5) -> inputs.UpdateArrived:
    times = done(at / SECOND, epoch=0)
    return inputs.UpdateArrived(at, client, 4, at, message(client, 1 + "ab".index(client), **times))


def again(durable: DurableCore, folder: Path, **options: Any) -> DurableCore:
    """Crash, and reopen the run."""
    crash(durable, folder)
    return kept(folder, setup_of(FedBuff(buffer_size=2)), **options)


def dealt_with(durable: DurableCore, client: str, dispatch: int) -> bool:
    """Whether an update that answers `dispatch` would be a duplicate."""
    return dispatch in durable.core._dispatches._dealt_with.get(client, ())


def written(folder: Path) -> list[events.Record]:
    return list(events.read(folder / "events.jsonl"))


def test_synced_input_survives_and_is_not_applied_twice(tmp_path: Path) -> None:
    """Whether or not the acknowledgement got out; an update in the rule's buffer, too."""
    durable = begun(tmp_path / "run")
    durable.handle(arrival("a"))
    durable.sync()
    durable = again(durable, tmp_path / "run")
    assert dealt_with(durable, "a", 1)
    assert durable.handle(arrival("a")) == [Acknowledgement("a", 1)]
    durable.handle(arrival("b"))
    assert durable.server.w.tolist() == [np.float32(0.3) + 1]
    durable.close()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["log", "checkpoint"])
@pytest.mark.parametrize(
    ("rule", "w", "floats"),
    # Of 0.5: the difference 1, and, of the older model, the difference 2; each goes half of the way.
    [(FedAsync(mixing=0.5, staleness="constant"), 1.75, 3.5), (FedBuff(buffer_size=2), 2.0, 4.0)],
    ids=["models", "deltas"],
)
def test_buffers_and_base_models_survive_every_crash(
    rule: Rule, w: float, floats: float, checkpoints: bool, tmp_path: Path
) -> None:
    kind, setup = rule.client_side.kind, setup_of(rule, keeps_models=True, steps=[COMPRESSED])
    begin: dict[str, Any] = {
        "w": np.full(1, 0.5, np.float32),
        "buffers": Buffers(np.zeros(1, np.float32), np.zeros(1, int)),
    }

    def update(client: str, value: float, counted: int) -> inputs.UpdateArrived:
        event = arrival(client)
        packed = compressor("fp16").compress(np.full(1, value, np.float32)).encoded
        sent: dict[str, Any] = {"kind": kind, "vector": np.zeros(0, np.float32), "encoded": packed}
        sent["buffers"] = Buffers(np.full(1, 2 * counted, np.float32), np.full(1, counted))
        return replace(event, message=replace(event.message, **sent))

    heard: list[Input] = [
        *(inputs.StatusChanged(0, name, "ready") for name in "ab"),
        *(inputs.Started(0, 1e9, 0), inputs.InstantOver(0)),
        *(update("a", 1.0, 1), inputs.InstantOver(5)),
        *(update("b", 2.0, 3), inputs.InstantOver(6)),
    ]
    found = {}
    for crashes in (False, True):
        folder = tmp_path / str(crashes)
        durable = kept(folder, setup, **copy.deepcopy(begin))
        for event in heard:
            durable.handle(copy.deepcopy(event))
            durable._due = checkpoints
            durable.sync()
            if crashes:
                crash(durable, folder)
                durable = kept(folder, setup)
        found[crashes] = plain(durable.core)
        assert (durable.server.w.tolist(), durable.server.buffers.floats.tolist()) == ([w], [floats])
        assert durable.server.buffers.integers.tolist() == [3]
        durable.close()
    assert found[True] == found[False]


def test_repeated_order_is_recorded_once_even_across_a_crash(tmp_path: Path) -> None:
    paused = events.Acted(1.0, "a", "scenario", 0.001, to_json(Pause()))
    durable = begun(tmp_path / "run")
    durable.handle(inputs.Written.from_record(paused))
    durable.handle(inputs.Written.from_record(paused))
    durable.sync()
    recovered = again(durable, tmp_path / "run")
    recovered.handle(inputs.Written.from_record(paused))
    recovered.sync()
    assert [one for one in written(tmp_path / "run") if isinstance(one, events.Acted)] == [paused]
    recovered.close()


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_records_stop_where_the_log_could_not_be_written(in_a_thread: bool, tmp_path: Path) -> None:
    """As with a full disk: the run goes on from what the log has."""
    durable = begun(tmp_path, durability="recording")
    durable.handle(arrival("a"))
    durable.sync()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "inputs.bin").stat().st_size, limits[1]))
    try:
        durable.handle(arrival("b"))
        if in_a_thread:
            durable.start_sync()
        with pytest.raises(OSError, match=r"File too large.*inputs\.bin"):
            durable.finish_sync() if in_a_thread else durable.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    durable.handle(arrival("b", at=6))
    durable.close()
    resumed = kept(tmp_path, setup_of(FedBuff(buffer_size=2)), durability="recording")
    assert dealt_with(resumed, "a", 1)
    assert not dealt_with(resumed, "b", 2)
    resumed.close()


@pytest.mark.parametrize("lost", [1, 60, 600])
def test_journal_behind_the_log_is_completed(lost: int, tmp_path: Path) -> None:
    durable = begun(tmp_path / "run")
    durable.handle(inputs.Written.from_record(events.Note(0.0, "from the controller")))
    durable.handle(arrival("a"))
    durable.handle(arrival("b"))
    durable.sync()
    journal = tmp_path / "run" / "events.jsonl"
    whole = journal.read_bytes()
    os.truncate(journal, len(whole) - lost)
    durable = again(durable, tmp_path / "run")
    assert journal.read_bytes() == whole
    journal.write_bytes(b"")
    with pytest.raises(
        SnapshotError, match=r"events\.jsonl is missing or shorter than stated in .*checkpoint\.bin"
    ):
        again(durable, tmp_path / "run")


def test_crash_between_checkpoint_and_log_truncation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log then has inputs that are in the checkpoint, too."""
    durable = begun(tmp_path / "run")
    durable.handle(arrival("a"))
    with monkeypatch.context() as patched:
        patched.setattr(recording.Recording, "cut", lambda *_: None)
        durable._due = True
        durable.sync()
    durable.handle(inputs.InstantOver(6))
    durable.sync()
    entries = durable.entries
    durable = again(durable, tmp_path / "run")
    assert durable.entries == entries
    durable.handle(arrival("b"))
    assert durable.server.version == 1
    durable.close()


def test_run_without_a_log_resumes_from_its_checkpoint_and_reports_the_loss(tmp_path: Path) -> None:
    folder, options = tmp_path / "run", {"durability": "checkpoint"}
    durable = begun(folder, **options)
    durable._due = True
    durable.sync()
    for name in "ab":
        durable.handle(arrival(name))
    durable.sync()
    assert durable.server.version == 1
    durable = again(durable, folder, leg="2", **options)
    assert (durable.server.version, durable.server.w.tolist()) == (0, [np.float32(0.3)])
    *_, note = written(folder)
    assert isinstance(note, events.Note)
    assert "last checkpoint: 2 later updates are lost" in note.message
    assert not [r for r in written(folder) if isinstance(r, events.UpdateApplied)]
    with pytest.raises(SnapshotError, match="needs `durability: update`"):
        again(durable, folder, leg="2", **options)


def test_run_without_checkpoints_is_not_resumed(tmp_path: Path) -> None:
    durable = begun(tmp_path / "run", durability="none")
    with pytest.raises(SnapshotError, match="has a run, but no state from which"):
        again(durable, tmp_path / "run", leg="2", durability="none")


def test_log_larger_than_the_checkpoint_triggers_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This bounds the disk space and the recovery time. A recording keeps everything."""
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, sync, lambda _: None)
    monkeypatch.setattr(durability, "_LEAST_LOG", 20_000)
    for kept in ("update", "recording"):
        folder, record = tmp_path / kept, kept == "recording"
        durable = begun(folder, durability=kept)
        for at in range(1, 1200):
            durable.handle(inputs.InstantOver(at))
            durable.sync()
        log = folder / "inputs.bin" if record else folder / "state" / "aggregator" / "inputs.bin"
        assert (log.stat().st_size > 60_000) == record
        durable = again(durable, folder, durability=kept)
        assert durable.at == 1199
        durable.close()


# Damaged files


STATE = "state/aggregator"
LOG, CHECKPOINT, JOURNAL = f"{STATE}/inputs.bin", f"{STATE}/checkpoint.bin", "events.jsonl"


def left_by_a_crash(folder: Path) -> dict[str, bytes]:
    """A checkpoint, then two acknowledged updates that made a version; all files by their paths."""
    durable = begun(folder)
    durable._due = True
    durable.sync()
    for name in "ab":
        durable.handle(arrival(name))
        durable.sync()
    crash(durable, folder)
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def refused(folder: Path, error: type[Exception], told: str) -> str:
    """Continue the run in `folder`, which is refused with `told` before a file is changed."""
    before = files_of(folder)
    with pytest.raises(error, match=told) as raised:
        kept(folder, setup_of(FedBuff(buffer_size=2)), leg="2")
    assert files_of(folder) == before
    return str(raised.value)


def test_flipped_bits_in_the_log_are_errors_and_change_no_file(tmp_path: Path) -> None:
    """Without checksums a bit in a vector gave another model, and one in a length made the rest look
    torn."""
    folder = tmp_path / "run"
    whole = left_by_a_crash(folder)[LOG]
    last = whole.rindex(b"inputs3\n")
    for at in range(8, len(whole), 29):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (folder / LOG).write_bytes(damaged)
        told = r"inputs\.bin, the entry at byte \d+.* is damaged"
        if at >= last:  # the records say that this write was completed
            told = r"inputs\.bin ends with entry 5 of the run, but .* has 3 records after that"
        text = refused(folder, RecordingError, told)
        assert "Intact: checkpoint.bin (4 entries of the run, 0.0 s), events.jsonl" in text
    (folder / LOG).write_bytes(whole)
    durable = kept(folder, setup_of(FedBuff(buffer_size=2)), leg="2")
    assert durable.server.version == 1
    durable.close()


def test_empty_missing_or_older_log_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = left_by_a_crash(folder)[LOG]
    log = folder / LOG
    log.write_bytes(b"")
    refused(
        folder, RecordingError, r"inputs\.bin is empty\. Intact: checkpoint\.bin .*, events\.jsonl\."
    )
    log.unlink()
    refused(folder, SnapshotError, r"inputs\.bin: No such file or directory\. Intact: checkpoint")
    log.mkdir()
    refused(folder, SnapshotError, r"inputs\.bin: this is not a regular file\. Intact: checkpoint")
    log.rmdir()
    recording.Recording(log, setup_of(FedBuff(buffer_size=2))).close()
    refused(folder, RecordingError, "has entries 0 to 0 of the run, but .* needs the entries after 4")
    log.write_bytes(whole[:4096])  # the end is missing, at a whole entry
    refused(folder, RecordingError, "3 records after that: the end of the log is")


def test_damaged_checkpoint_is_an_error_that_says_the_log_is_intact(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = left_by_a_crash(folder)[CHECKPOINT]
    for at in range(8, len(whole), 11):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (folder / CHECKPOINT).write_bytes(damaged)
        text = refused(
            folder, SnapshotError, r"checkpoint\.bin (is damaged|is incomplete|cannot be read)"
        )
        assert "Intact: inputs.bin (entries 4 to 6)" in text


def test_damaged_records_are_an_error_or_rewritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = left_by_a_crash(folder)[JOURNAL]
    journal = folder / JOURNAL
    journal.write_bytes(whole.replace(b'"wall_clock":1000000000.0', b'"wall_clock":1000000001.0'))
    text = refused(folder, SnapshotError, r"events\.jsonl is damaged: its first \d+ bytes do not")
    assert "Intact: checkpoint.bin (4 entries of the run, 0.0 s), inputs.bin (entries 4 to 6)" in text
    journal.write_bytes(whole.replace(b'"client":"b"', b'"client":"c"'))  # behind the checkpoint
    durable = kept(folder, setup_of(FedBuff(buffer_size=2)))
    durable.close()
    *_, note = written(folder)
    assert journal.read_bytes() == whole + events.to_line(note).encode()
    assert note == events.Note(
        5e-9, "events.jsonl was damaged after the checkpoint; it was restored from the log"
    )


def test_state_of_another_run_or_model_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left_by_a_crash(folder)
    setup = setup_of(FedBuff(buffer_size=2))
    for settings, told in (
        (replace(setup.settings, run="other"), "another run"),
        (replace(setup.settings, schema="t"), "another model"),
    ):
        other = replace(setup, settings=settings)
        with pytest.raises(SnapshotError, match=rf"checkpoint\.bin belongs to {told}"):
            kept(folder, other, leg="2")


@pytest.mark.parametrize("bad", [b"", b"\0" * 90], ids=["empty", "zeros"])
def test_damaged_model_waiting_for_evaluation_is_an_error(bad: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    durable = begun(folder)
    durable.handle(inputs.TimersDue(from_seconds(CHECKPOINT_EVERY)))
    durable.sync()
    crash(durable, folder)
    (waiting,) = (folder / "state" / "aggregator").glob("evaluate-0.safetensors")
    waiting.write_bytes(bad)
    refused(folder, SnapshotError, "a model that waits for its evaluation, cannot be read: its checksum")


def test_run_with_damaged_files_resumes_unchanged_or_is_refused(tmp_path: Path) -> None:
    """Cut off, overwritten, empty, missing, no regular files: whatever is done to them."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    left_by_a_crash(whole)
    outcomes = Counter[str]()
    for seed in range(200):
        dice = random.Random(seed)  # noqa: S311
        shutil.copytree(whole, folder)
        file, how = folder / dice.choice([LOG, CHECKPOINT, JOURNAL]), dice.choice(DAMAGES)
        with suppress(ValueError, IndexError):  # what is no JSON has no values to change
            how(file, dice)
        before = files_of(folder)
        try:
            durable = kept(folder, setup_of(FedBuff(buffer_size=2)), leg="2")
        except (SnapshotError, RecordingError):
            outcomes["refused"] += 1
            assert files_of(folder) == before
        else:
            outcomes["went on"] += 1
            assert durable.server.version == 1
            assert [dealt_with(durable, *answered) for answered in (("a", 1), ("b", 2))] == [True, True]
            durable.close()
        shutil.rmtree(folder)
    assert min(outcomes["refused"], outcomes["went on"]) > 40


# Resumed with all its processes


def test_run_resumes_after_all_processes_restarted(tmp_path: Path) -> None:
    """Updates finished before the restart count first; then clients leave and join."""
    durable = begun(tmp_path / "run")
    durable.handle(arrival("a"))
    durable.sync()
    durable = again(durable, tmp_path / "run", leg="2")
    assert durable.core.epoch is None
    assert [type(r) for r in records(durable.handle(arrival("b")))] == [
        *[events.UpdateApplied] * 2,
        events.VersionMade,
    ]
    durable.handle(inputs.StatusChanged(5, "b", "ready"))
    assert durable.handle(inputs.InstantOver(5)) == []
    started = durable.handle(inputs.Started(5, 2e9, 100))
    assert records(started)[0] == events.RunStarted(5e-9, 2e9, ("b",), ("a", "c", "d"))
    assert [d.client for d in of(act.Dispatch, durable.handle(inputs.InstantOver(5)))] == ["b"]
    assert durable.core.epoch == 100
    durable.close()


def test_interrupted_run_resumes_with_its_buffer_and_timers(tmp_path: Path) -> None:
    durable = begun(tmp_path / "run")
    durable.handle(arrival("a"))
    ended = durable.handle(inputs.EndRequested(6, "interrupted"))
    assert [r.message for r in records(ended) if isinstance(r, events.Note)] == []
    ended = durable.handle(inputs.EvaluationDone(6, 0, 0.5, 0.5))
    notes = [r.message for r in records(ended) if isinstance(r, events.Note)]
    assert notes == ["updates not applied yet, but in the rule's buffer: 1"]
    assert not [r for r in records(ended) if isinstance(r, events.UpdateRejected)]
    assert durable.core.is_cut_short
    durable.sync()
    durable = again(durable, tmp_path / "run", leg="2")
    assert not durable.core.is_cut_short
    assert durable.core.next_timer == from_seconds(CHECKPOINT_EVERY)
    durable.handle(arrival("b", at=6))
    assert durable.server.version == 1
    durable.close()


def test_finished_run_is_not_resumed(tmp_path: Path) -> None:
    durable = begun(tmp_path / "run")
    durable.handle(inputs.TimersDue(from_seconds(1e6)))
    assert durable.core.ended is not None
    durable.sync()
    durable = again(durable, tmp_path / "run", leg="2")
    done = durable.handle(inputs.EvaluationDone(durable.at, 0, 0.5, 0.5))
    assert act.Finish("after") in done
    durable.close()


# The checkpoint's file


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [Evil(), Path(), print, Fraction(1, 2), DurableCore, recording.Recording, np.load, eval],
    ids=lambda content: getattr(content, "__name__", type(content).__name__),
)
def test_snapshot_with_unexpected_types_is_refused(content: object, tmp_path: Path) -> None:
    storage.save_snapshot({"state": content}, tmp_path / "checkpoint.bin")
    with pytest.raises(SnapshotError, match=r"it refers to \S+, which no state contains"):
        storage.load_snapshot(tmp_path / "checkpoint.bin")


def test_incomplete_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    vector = np.arange(1000, dtype=np.float32)
    storage.save_snapshot([vector, vector], path)
    one, two = storage.load_snapshot(path)
    assert one is two  # as before
    one[0] = 7  # and can be changed
    whole = path.read_bytes()
    for kept_bytes in (0, 7, 30, 60, len(whole) - 1):
        path.write_bytes(whole[:kept_bytes])
        with pytest.raises(SnapshotError):
            storage.load_snapshot(path)
    path.write_bytes(b"\x80\x05" + whole)
    with pytest.raises(SnapshotError, match="not a checkpoint"):
        storage.load_snapshot(path)
    path.write_bytes(b"testbed1" + whole[8:])
    with pytest.raises(SnapshotError, match="another version of the testbed"):
        storage.load_snapshot(path)


def test_model_is_kept_until_its_evaluation_is_on_disk(tmp_path: Path) -> None:
    durable = begun(tmp_path / "run")
    durable.handle(inputs.EvaluationDone(1, 0, 0.5, 0.5))
    durable = again(durable, tmp_path / "run")
    assert durable.evaluating == [0]
    assert durable.load_kept_model(0)[0].tolist() == [np.float32(0.3)]
    durable.handle(inputs.EvaluationDone(1, 0, 0.5, 0.5))
    durable.sync()
    durable = again(durable, tmp_path / "run")
    assert durable.evaluating == []
    assert not list((tmp_path / "run" / "state" / "aggregator").glob("evaluate-*"))
    durable.close()


@pytest.mark.parametrize("after", [False, True])
def test_without_durability_models_are_kept_only_for_evaluation_after_the_run(
    tmp_path: Path, *, after: bool
) -> None:
    durable = kept(tmp_path, setup_of(FedBuff(), evaluate_after=after), durability="none")
    durable.handle(inputs.Started(0, 0.0, 0))
    waiting = tmp_path / "state" / "aggregator" / "evaluate-0.safetensors"
    assert waiting.exists() == after
    durable.handle(inputs.EvaluationDone(1, 0, 0.5, 0.5))
    durable.sync()
    assert not waiting.exists()
    durable.close()
