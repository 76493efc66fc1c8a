"""The aggregator's core together with all that a crash must not take: `DurableCore`.

What becomes of an input follows from the core's state and from the input alone. So each input goes into
a log before the core is handed it, and the log onto the disk before anybody is told what came of it.
From time to time the whole state goes into a checkpoint, and the log begins anew. After a crash the
newest checkpoint is read and the inputs that came after it are handed in once more: state, journal and
models are then what they were, to the bit. How much of this is done is `config.Durability`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents import events, wire
from agents.aggregator import actions as act
from agents.aggregator import inputs, recording, snapshot, storage
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.recording import Cut, Recording, RecordingError, Written
from agents.aggregator.snapshot import SnapshotError
from agents.buffers import NONE, Buffers
from agents.config import Durability
from agents.nanoseconds import Nanoseconds, to_seconds
from agents.rules.interface import Server
from agents.texts import counted
from agents.vectors import Vector

_APPLIED = f'{{"event":"{events.UpdateApplied.event}",'
_LEAST_LOG = 64 * 1024 * 1024
_LOG_TO_CHECKPOINT = 8
"""A log of more bytes than both, the latter times the checkpoint's, makes a new checkpoint due: what a
crash leaves is soon read, and the disk does not fill."""


@dataclass(slots=True)
class State:
    """All that a checkpoint holds."""

    segment: str
    """Id of the segment of the run that it is of."""
    core: AggregatorCore
    server: Server
    at: Nanoseconds = 0
    """Device time of the last input."""
    entries: int = 0
    """Of the log, so far: inputs and records of the shell's own."""
    journal: int = 0
    """Bytes of the journal that these have made."""
    acted: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    """The latest lines on what was done to devices: an order that comes twice makes no second one."""
    evaluating: list[int] = field(default_factory=list)
    """Versions whose evaluation has been asked for and is not done. Their models are in files: with
    `evaluate: {when: after}` there are many."""


class DurableCore:
    """Keeps events.jsonl and models/ of `directory`, and in its state/aggregator/ checkpoint and log.

    `segment` is the id of this segment of the run: a resumed run has several, one from each start of all
    its processes; where the aggregator alone is started again, it is the same. With `record` the log is
    the run's recording, and is never cut.
    """

    def __init__(
        self,
        directory: Path,
        setup: Setup,
        w: Vector,
        *,
        segment: str,
        durability: Durability,
        record: bool = False,
        buffers: Buffers = NONE,
    ) -> None:
        """Begins the run that `setup` describes with the model `w` and its `buffers`, or goes on where
        its state is in `directory`. Raises RecordingError or SnapshotError where it cannot."""
        self._directory, self._schema = directory, setup.settings.schema
        self._durability, self._record = durability, record
        self._keeps = durability != "none" or setup.settings.evaluate_after
        """Whether models wait for their evaluation in files."""
        folder = directory / "state" / "aggregator"
        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoint = folder / "checkpoint.bin"
        self._log_path = (directory if record else folder) / "inputs.bin"
        self._log: Recording | None = None
        self._size = 0
        self._due = False
        self._evaluated: list[Path] = []
        """Models that need not be evaluated any more, once it is kept that they have been."""
        if self._checkpoint.is_file():
            self._recover(segment)
            return
        events_path = directory / "events.jsonl"
        if events_path.is_file() and events_path.stat().st_size:
            raise SnapshotError(f"{directory} holds a run, but no state to go on from")
        self._state = State(segment, *setup.core(w, buffers))
        self._journal = storage.Journal(events_path)
        if self._logs:
            self._log_path.write_bytes(b"")  # a start that came to nothing may have left one
            self._log = Recording(self._log_path, setup)
        self._save_checkpoint()

    @property
    def core(self) -> AggregatorCore:
        return self._state.core

    @property
    def server(self) -> Server:
        return self._state.server

    @property
    def at(self) -> Nanoseconds:
        """Device time of the last input."""
        return self._state.at

    @property
    def entries(self) -> int:
        """How many inputs and other records it was given in the whole run."""
        return self._state.entries

    @property
    def evaluating(self) -> Sequence[int]:
        """The version of each evaluation that has been asked for and is not done, in order."""
        return self._state.evaluating

    def kept(self, version: int) -> tuple[Vector, Buffers]:
        """The model of one of these versions, from its file. Any thread may ask."""
        w, _, buffers = wire.unpack(self._waiting(version).read_bytes())
        return w, buffers

    @property
    def _logs(self) -> bool:
        return self._record or self._durability == "update"

    def handle(self, event: inputs.Input, payload: bytes | bytearray | None = None) -> act.Actions:
        """What the core wants done because of `event`; records and models are written already.
        `payload` is what an update was decoded of."""
        if self._log is not None:
            self._log.write(event, payload)
        return self._take(event)

    def write(self, record: events.Record) -> None:
        """Write a record that does not come from the core."""
        written = Written(events.to_line(record))
        if written.line in self._state.acted:
            return
        if self._log is not None:
            self._log.write(written)
        self._take_record(written)

    def sync(self, *, told: bool) -> None:
        """Before anybody is `told` what came of the inputs so far: put these on the disk."""
        if self._log is not None:
            if told and self._durability == "update":
                self._log.sync()
            else:
                self._log.flush()
        if self._log is not None or self._durability == "none":
            self._remove_evaluated()
        self._journal.flush()  # with a log it can be made again; else a checkpoint syncs it, and the end
        most = max(_LEAST_LOG, _LOG_TO_CHECKPOINT * self._size)
        if self._due or (self._log is not None and not self._record and self._log.size > most):
            self._due = False
            self._save_checkpoint()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._journal.close()

    def _take(self, event: inputs.Input) -> act.Actions:
        state, server = self._state, self._state.server
        state.entries += 1
        state.at = max(state.at, event.at)
        if isinstance(event, inputs.Suspended):
            state.segment = event.segment
        if isinstance(event, inputs.EvaluationDone):
            state.evaluating.remove(event.version)
            self._evaluated.append(self._waiting(event.version))
        actions = state.core.handle(event)
        for action in actions:
            match action:
                case act.Log(record):
                    self._journal.write(record)
                case act.Evaluate(version):
                    state.evaluating.append(version)
                    if self._keeps:
                        with self._waiting(version).open("wb") as file:
                            file.writelines(wire.pack(server.w, {}, server.buffers))
                case act.Save(version, final) as save:
                    folder, schema = self._directory / "models", self._schema
                    storage.save_model(folder, save.name, server.w, server.buffers, version, schema)
                    self._due |= state.core.cut_short or not final
        return actions

    def _waiting(self, version: int) -> Path:
        """Where the model waits for its evaluation."""
        return self._checkpoint.with_name(f"evaluate-{version}.safetensors")

    def _remove_evaluated(self) -> None:
        for path in self._evaluated:
            path.unlink(missing_ok=True)
        self._evaluated.clear()

    def _take_record(self, written: Written) -> None:
        self._state.entries += 1
        record = events.from_line(written.line)
        if record is not None:
            self._journal.write(record)
        if isinstance(record, events.Acted):
            self._state.acted.append(written.line)
            if record.action is not None:
                self.core.progress.acted(record.device, record.action)

    def _recover(self, segment: str) -> None:
        """Bring back the state as of the last input that is on the disk."""
        state: State = snapshot.load(self._checkpoint)
        if state.segment == segment and not self._logs:
            raise SnapshotError("to go on within a run, an aggregator needs `durability: update`")
        journal = self._directory / "events.jsonl"
        if not journal.is_file() or journal.stat().st_size < state.journal:
            raise SnapshotError(f"{journal} has less than {self._checkpoint} says")
        self._state = state
        self._journal = storage.Journal(journal, state.journal)
        if self._log_path.is_file():
            self._replay(state)
        undone = sum(line.startswith(_APPLIED) for line in self._journal.cut())
        if self._logs:
            self._log = Recording(self._log_path, None)
        self._save_checkpoint()
        if state.segment != segment:
            self.handle(inputs.Suspended(state.at, segment))
            self._due = not self._logs
        if undone:
            lost = counted(undone, "update, applied since, is", "updates, applied since, are")
            text = f"the run goes on from its last checkpoint: {lost} lost"
            self.write(events.Note(to_seconds(state.at), text))
        self.sync(told=True)

    def _replay(self, state: State) -> None:
        """Hand in what the log has beyond `state`."""
        for entry in recording.read(self._log_path, state.entries):
            match entry:
                case Setup():
                    pass
                case Cut(before):
                    if before > state.entries:
                        raise RecordingError(f"{self._log_path} begins after the checkpoint")
                case Written():
                    self._take_record(entry)
                case recording.Torn():
                    break
                case _:
                    self._take(entry)

    def _save_checkpoint(self) -> None:
        """Keep the state as it is now; the log before it is not needed any more."""
        if self._durability == "none":
            return
        if self._log is not None:
            self._log.sync()
        self._journal.sync()
        self._state.journal = self._journal.size()
        self._size = snapshot.save(self._state, self._checkpoint)
        self._remove_evaluated()
        if self._log is not None and not self._record:
            self._log.cut(self._state.entries)
