"""The aggregator's core together with all that a crash must not take: `DurableCore`.

What becomes of an input follows from the core's state and from the input alone. So each input goes into
a log before the core is handed it, and the log onto the disk before anybody is told what came of it.
From time to time the whole state goes into a checkpoint, and the log begins anew. After a crash the
newest checkpoint is read and the inputs that came after it are handed in once more: state, journal and
models are then what they were, to the bit. How much of this is done is `config.Durability`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs, recording, snapshot, storage
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.recording import Cut, Extent, Recording, RecordingError
from agents.aggregator.snapshot import SnapshotError
from agents.config import LOGGED, Durability
from agents.disk import files
from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector
from agents.rules.interface import Server
from agents.texts import quantity
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire import payloads

_APPLIED = f'{{"event":"{events.UpdateApplied.event}",'
_LEAST_LOG = 64 * 1024 * 1024
_LOG_TO_CHECKPOINT = 8
"""A log of more bytes than both, the latter times the checkpoint's, makes a new checkpoint due: what a
crash leaves is soon read, and the disk does not fill."""


@dataclass(slots=True)
class State:
    """All that a checkpoint holds."""

    run: str
    schema: str
    """Hash of the model's schema."""
    segment: str
    """Id of the segment of the run that it is of."""
    core: AggregatorCore
    server: Server
    at: Nanoseconds = 0
    """Device time of the last input."""
    entries: int = 0
    """Number of inputs so far, each of which is an entry of the log."""
    journal: int = 0
    """Bytes of the journal that these have made."""
    journal_sum: int = 0
    """Checksum of these bytes."""
    evaluating: list[int] = field(default_factory=list)
    """Versions whose evaluation has been asked for and is not done. Their models are in files: with
    `evaluate: {when: after}` there are many."""


class DurableCore:
    """Keeps events.jsonl and models/ of `directory`, and in its state/aggregator/ checkpoint and log.

    `segment` is the id of this segment of the run: a resumed run has several, one from each start of all
    its processes; where the aggregator alone is started again, it is the same. With `recording` the log
    is the run's recording, and is never cut.
    """

    def __init__(
        self,
        directory: Path,
        setup: Setup,
        w: Vector,
        *,
        segment: str,
        durability: Durability,
        buffers: Buffers = NONE,
    ) -> None:
        """Begins the run that `setup` describes with the model `w` and its `buffers`, or goes on where
        its state is in `directory`. Raises RecordingError or SnapshotError where it cannot."""
        self._directory = directory
        self._run, self._schema = setup.settings.run, setup.settings.schema
        self._durability = durability
        self._records = durability == "recording"
        self._logs = durability in LOGGED
        self._keeps = durability != "none" or setup.settings.evaluate_after
        """Whether models wait for their evaluation in files."""
        folder = directory / "state" / "aggregator"
        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoint = folder / "checkpoint.bin"
        self._log_path = (directory if self._records else folder) / "inputs.bin"
        self._journal_path = directory / "events.jsonl"
        self._log: Recording | None = None
        self._size = 0
        self._due = False
        self._evaluated: list[Path] = []
        """Models that need not be evaluated any more, once it is kept that they have been."""
        if self._checkpoint.is_file():
            self._recover(segment)
            return
        if self._journal_path.is_file() and self._journal_path.stat().st_size:
            raise SnapshotError(f"{directory} holds a run, but no state to go on from")
        self._state = State(self._run, self._schema, segment, *setup.core(w, buffers))
        self._journal = storage.Journal(self._journal_path)
        if self._logs:
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
        """How many inputs it was given in the whole run."""
        return self._state.entries

    @property
    def evaluating(self) -> Sequence[int]:
        """The version of each evaluation that has been asked for and is not done, in order."""
        return self._state.evaluating

    def kept(self, version: int) -> tuple[Vector, Buffers]:
        """The model of one of these versions, from its file. Any thread may ask. Raises
        SnapshotError."""
        path = self._waiting(version)
        try:
            w, _, buffers = payloads.unpack(bytes(files.without_checksum(path.read_bytes())))
        except (OSError, ValueError, payloads.WireError) as error:
            raise SnapshotError(
                f"{path}, a model that waits for its evaluation, cannot be read: {error}"
            ) from error
        return w, buffers

    def handle(self, event: inputs.Input, payload: bytes | bytearray | None = None) -> act.Actions:
        """What the core wants done because of `event`; records and models are written already.
        `payload` is what an update was decoded of."""
        if self._log is not None:  # None while the log is read once more
            self._log.write(event, payload)
        state, server = self._state, self._state.server
        state.entries += 1
        state.at = max(state.at, event.at)
        if isinstance(event, inputs.Suspended):
            state.segment = event.segment
        if isinstance(event, inputs.EvaluationDone):
            state.evaluating.remove(event.version)
            self._evaluated.append(self._waiting(event.version))
        actions = state.core.handle(event)
        self._journal.write(*[action.record for action in actions if isinstance(action, act.Log)])
        for action in actions:
            match action:
                case act.Evaluate(version):
                    state.evaluating.append(version)
                    if self._keeps:
                        with self._waiting(version).open("wb") as file:
                            file.writelines(
                                files.with_checksum(payloads.pack(server.w, {}, server.buffers))
                            )
                case act.Save(version, final) as save:
                    folder, schema = self._directory / "models", self._schema
                    storage.save_model(folder, save.name, server.w, server.buffers, version, schema)
                    self._due |= state.core.is_cut_short or not final
        return actions

    def sync(self, *, told: bool) -> None:
        """Before anybody is `told` what came of the inputs so far: put these on the disk."""
        if self._log is not None:
            if told:
                self._log.sync()
            else:
                self._log.flush()
        if self._evaluated and (self._log is not None or self._durability == "none"):
            self._remove_evaluated()
        self._journal.flush()  # with a log it can be made again; else a checkpoint syncs it, and the end
        most = max(_LEAST_LOG, _LOG_TO_CHECKPOINT * self._size)
        if self._due or (self._log is not None and not self._records and self._log.size > most):
            self._due = False
            self._save_checkpoint()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._journal.close()

    def _waiting(self, version: int) -> Path:
        """Where the model waits for its evaluation."""
        return self._checkpoint.with_name(f"evaluate-{version}.safetensors")

    def _remove_evaluated(self) -> None:
        for path in self._evaluated:
            path.unlink(missing_ok=True)
        self._evaluated.clear()

    def _recover(self, segment: str) -> None:
        """Bring back the state as of the last input that is on the disk. All files are read to their
        ends, and compared, before the first is changed."""
        with self._damage_told():
            state: State = snapshot.load(self._checkpoint)
        if (state.run, state.schema) != (self._run, self._schema):
            other = "run" if state.run != self._run else "model: the task's has other parameters now"
            raise SnapshotError(f"{self._checkpoint} is of another {other}")
        if state.segment == segment and not self._logs:
            raise SnapshotError("to go on within a run, an aggregator needs `durability: update`")
        with ExitStack() as on_error, self._damage_told():
            self._state = state
            self._journal = self._kept_journal(state)
            on_error.callback(self._journal.abandon)
            extent = self._kept_log(state) if self._logs else None
            if extent is not None:
                self._replay(state)
            for version in state.evaluating if self._keeps else ():
                self.kept(version)
            differs, beyond = self._journal.compared()
            undone = sum(line.startswith(_APPLIED) for line in beyond)
            if undone and extent is not None:
                raise RecordingError(
                    f"{self._log_path} ends with entry {extent.last} of the run, and "
                    f"{self._journal_path} has {quantity(undone, 'update')} beyond what follows from "
                    "these: the end of the log is missing"
                )
            on_error.pop_all()
        self._journal.cut()
        if extent is not None:
            self._log = Recording.continued(self._log_path, extent)
        self._save_checkpoint()
        if state.segment != segment:
            self.handle(inputs.Suspended(state.at, segment))
            self._due = not self._logs
        if undone:
            lost = quantity(undone, "update, applied since, is", "updates, applied since, are")
            self._note(f"the run goes on from its last checkpoint: {lost} lost")
        if differs and self._logs:
            self._note("events.jsonl was damaged behind the checkpoint; the log has given it again")
        self.sync(told=True)

    def _note(self, text: str) -> None:
        self.handle(inputs.Written.of(events.Note(to_seconds(self.at), text)))

    def _kept_journal(self, state: State) -> storage.Journal:
        """The journal as of the checkpoint. Raises SnapshotError."""
        path = self._journal_path
        if not path.is_file() or path.stat().st_size < state.journal:
            raise SnapshotError(f"{path} has less than {self._checkpoint} says")
        journal = storage.Journal(path, state.journal)
        if journal.sum() != state.journal_sum:
            journal.abandon()
            raise SnapshotError(
                f"{path} is damaged: the first {state.journal:,} bytes are not those of "
                f"{self._checkpoint}, by their checksum"
            )
        return journal

    def _kept_log(self, state: State) -> Extent:
        """Return which entries the log holds, if it continues from the checkpoint. Raises
        RecordingError."""
        extent, entries = recording.check(self._log_path), state.entries
        if not extent.first <= entries <= extent.last:
            raise RecordingError(
                f"{self._log_path} has the entries {extent.first} to {extent.last} of the run, and "
                f"{self._checkpoint} needs those behind {entries}: it is the log of another time"
            )
        return extent

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        """Add to an error of reading the files which of them are whole."""
        try:
            yield
        except OSError as error:
            place = error.filename or self._directory
            raise SnapshotError(f"{place}: {error.strerror}. {self._whole()}") from error
        except (SnapshotError, RecordingError) as error:
            raise type(error)(f"{error}. {self._whole()}") from error

    def _whole(self) -> str:
        """Which of the files are whole."""
        whole = []
        with suppress(SnapshotError, OSError):
            state: State = snapshot.load(self._checkpoint)
            entries = quantity(state.entries, "entry", "entries")
            whole.append(f"{self._checkpoint.name} ({entries} of the run, {to_seconds(state.at):.1f} s)")
            self._kept_journal(state).abandon()
            whole.append(self._journal_path.name)
        with suppress(RecordingError, OSError):
            if self._logs:
                extent = recording.check(self._log_path)
                whole.append(f"{self._log_path.name} (entries {extent.first} to {extent.last})")
        return (
            f"Whole: {', '.join(whole) or 'no file that the run would go on from'}. Nothing was "
            "changed: put a copy of the damaged file back, or start a new run"
        )

    def _replay(self, state: State) -> None:
        """Hand in what the log has beyond `state`."""
        for entry in recording.read(self._log_path, state.entries):
            match entry:
                case Setup() | Cut():
                    pass
                case recording.Torn():
                    break
                case _:
                    self.handle(entry)

    def _save_checkpoint(self) -> None:
        """Keep the state as it is now; the log before it is not needed any more."""
        if self._durability == "none":
            return
        if self._log is not None:
            self._log.sync()
        self._journal.sync()
        self._state.journal, self._state.journal_sum = self._journal.size(), self._journal.sum()
        self._size = snapshot.save(self._state, self._checkpoint)
        self._remove_evaluated()
        if self._log is not None and not self._records:
            self._log.cut()
