"""The aggregator's core with its durable state: `DurableCore`.

The core is deterministic: its output depends only on its state and the input. Each input is written to a
log before the core handles it, and the log is fsynced before any reply is sent. From time to time the
whole state is saved in a checkpoint, and the log starts again. After a crash the newest checkpoint is
loaded, and the logged inputs after it are handled again: state, journal and models are the same as
before, bit by bit. `config.Durability` selects which of these steps are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs, recording, storage
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.recording import Cut, Extent, Recording, RecordingError
from agents.aggregator.storage import SnapshotError
from agents.config import LOGGED, Durability
from agents.disk import files
from agents.models.vectors import NONE, Buffers, Vector
from agents.rules.interface import Server
from agents.texts import quantity
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire import payloads

_APPLIED = f'{{"event":"{events.UpdateApplied.event}",'
_LEAST_LOG = 64 * 1024 * 1024
_LOG_TO_CHECKPOINT = 8
"""A checkpoint is due when the log is larger than `_LEAST_LOG` bytes, and than this multiple of the
checkpoint's size. This limits the duration of a recovery and the disk space."""


@dataclass(slots=True)
class DurableState:
    run: str
    schema: str
    """Hash of the model's schema."""
    leg: str
    core: AggregatorCore
    server: Server
    at: Nanoseconds = 0
    """Device time of the last input."""
    entries: int = 0
    """Inputs so far; each is an entry of the log."""
    journal: int = 0
    """Bytes of the journal after the last input."""
    journal_sum: int = 0
    """Checksum of the journal's first `journal` bytes."""
    evaluating: list[int] = field(default_factory=list)
    """Versions whose evaluation is not done. Each model is in a file, not in the checkpoint, because
    with `evaluate: {when: after}` many wait."""


class DurableCore:
    """The core with its files: events.jsonl and models/ in `directory`, checkpoint and log in its
    state/aggregator/.

    `leg`: id of the present leg of the run. A new one begins when all processes are started
    again (the run is resumed), but not when only the aggregator is restarted. With the durability
    `recording` the log is the run's recording and is never cut.
    """

    def __init__(
        self,
        directory: Path,
        setup: Setup,
        w: Vector,
        *,
        leg: str,
        durability: Durability,
        buffers: Buffers = NONE,
    ) -> None:
        """Begin the run with the model `w`, shape (d,), and its `buffers`, or recover that whose state
        is in `directory`. Raises RecordingError or SnapshotError."""
        self._directory = directory
        self._run, self._schema = setup.settings.run, setup.settings.schema
        self._durability = durability
        self._records = durability == "recording"
        self._logs = durability in LOGGED
        self._keeps = durability != "none" or setup.settings.evaluate_after
        """Models that wait for their evaluation are kept in files."""
        folder = directory / "state" / "aggregator"
        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoint = folder / "checkpoint.bin"
        self._log_path = (directory if self._records else folder) / "inputs.bin"
        self._journal_path = directory / "events.jsonl"
        self._log: Recording | None = None
        self._size = 0
        self._due = False
        self._covered: tuple[int, int] | None = None
        """Waiting lines of the journal and of `_evaluated` whose inputs are being written by
        `start_sync`."""
        self._evaluated: list[Path] = []
        """Models whose evaluation is done. A file is removed when the result is durable."""
        if self._checkpoint.is_file():
            self._recover(leg)
            return
        if self._journal_path.is_file() and self._journal_path.stat().st_size:
            raise SnapshotError(f"{directory} has a run, but no state from which it can be resumed")
        self._state = DurableState(self._run, self._schema, leg, *setup.core(w, buffers))
        self._journal = storage.Journal(self._journal_path)
        if self._logs:
            self._log = Recording(self._log_path, setup, recycled=not self._records)
        self._save_checkpoint()

    @property
    def core(self) -> AggregatorCore:
        return self._state.core

    @property
    def server(self) -> Server:
        return self._state.server

    @property
    def at(self) -> Nanoseconds:
        return self._state.at

    @property
    def entries(self) -> int:
        """Number of inputs in the whole run."""
        return self._state.entries

    @property
    def evaluating(self) -> Sequence[int]:
        """Versions whose evaluation is not done, in order."""
        return self._state.evaluating

    def load_kept_model(self, version: int) -> tuple[Vector, Buffers]:
        """`version` must be in `evaluating`. May be called in any thread. Raises SnapshotError."""
        path = self._model_file(version)
        try:
            w, _, buffers = payloads.unpack(bytes(files.without_checksum(path.read_bytes())))
        except (OSError, ValueError, payloads.WireError) as error:
            raise SnapshotError(
                f"{path}, a model that waits for its evaluation, cannot be read: {error}"
            ) from error
        return w, buffers

    def handle(self, event: inputs.Input, payload: bytes | bytearray | None = None) -> act.Actions:
        """Return the core's actions; those that write records or save models are already carried out.
        `payload`: bytes from which an update was decoded, if available."""
        if self._log is not None:  # None while the log is replayed
            self._log.write(event, payload)
        state, server = self._state, self._state.server
        state.entries += 1
        state.at = max(state.at, event.at)
        if isinstance(event, inputs.Suspended):
            state.leg = event.leg
        if isinstance(event, inputs.EvaluationDone):
            state.evaluating.remove(event.version)
            self._evaluated.append(self._model_file(event.version))
        actions = state.core.handle(event)
        self._journal.write(*[action.record for action in actions if isinstance(action, act.Log)])
        for action in actions:
            match action:
                case act.Evaluate(version):
                    state.evaluating.append(version)
                    if self._keeps:
                        with self._model_file(version).open("wb") as file:
                            file.writelines(
                                files.with_checksum(payloads.pack(server.w, {}, server.buffers))
                            )
                case act.Save(version, final) as save:
                    folder, schema = self._directory / "models", self._schema
                    storage.save_model(folder, save.name, server.w, server.buffers, version, schema)
                    self._due |= state.core.is_cut_short or not final
        return actions

    def sync(self) -> None:
        """Write all inputs to the disk, and flush their records. Save a checkpoint if one is due."""
        if self._log is not None:
            self._log.sync()
        self._finish(self._journal.lines, len(self._evaluated))
        if self._is_checkpoint_due():
            self._due = False
            self._save_checkpoint()

    def start_sync(self) -> Future[None] | None:
        """Sync in the background, while the core handles further inputs. None if it is done already;
        else call `finish_sync` when the future is done, before the next call."""
        if self._log is None or not self._log.is_dirty or self._is_checkpoint_due():
            self.sync()
            return None
        self._covered = self._journal.lines, len(self._evaluated)
        return self._log.start_sync()

    def finish_sync(self) -> None:
        """End what `start_sync` began. Raises OSError if the disk could not be written."""
        if self._log is not None and self._covered is not None:
            self._log.join()
            self._finish(*self._covered)

    def _finish(self, lines: int, evaluated: int) -> None:
        """Flush the next `lines` lines of the journal. Their inputs are on the disk, so it needs no
        fsync. Remove the models of the first `evaluated` evaluations."""
        self._covered = None
        self._journal.flush(lines)
        if self._log is not None or self._durability == "none":
            self._remove_evaluated(evaluated)

    def _is_checkpoint_due(self) -> bool:
        most = max(_LEAST_LOG, _LOG_TO_CHECKPOINT * self._size)
        return self._due or (self._log is not None and not self._records and self._log.size > most)

    def close(self) -> None:
        """If the log could not be written, the journal stays as it is: it must not have records whose
        inputs the log lacks."""
        try:
            if self._log is not None:
                self._log.close()
        except OSError:
            self._journal.abandon()
            raise
        if self._log is not None and self._log.has_failed:
            self._journal.abandon()
        else:
            self._journal.close()

    def _model_file(self, version: int) -> Path:
        return self._checkpoint.with_name(f"evaluate-{version}.safetensors")

    def _remove_evaluated(self, count: int) -> None:
        for path in self._evaluated[:count]:
            path.unlink(missing_ok=True)
        del self._evaluated[:count]

    def _recover(self, leg: str) -> None:
        """Restore the state after the last input on the disk. All files are verified before any is
        changed."""
        with self._report_damage():
            state: DurableState = storage.load_snapshot(self._checkpoint)
        if (state.run, state.schema) != (self._run, self._schema):
            other = "run" if state.run != self._run else "model: the task's parameters have changed"
            raise SnapshotError(f"{self._checkpoint} belongs to another {other}")
        if state.leg == leg and not self._logs:
            raise SnapshotError(
                "a restart of the aggregator within a run needs `durability: update` or `recording`"
            )
        with ExitStack() as on_error, self._report_damage():
            self._state = state
            self._journal = self._open_journal(state)
            on_error.callback(self._journal.abandon)
            extent = self._check_log(state) if self._logs else None
            if extent is not None:
                self._replay(state)
            for version in state.evaluating if self._keeps else ():
                self.load_kept_model(version)
            differs, beyond = self._journal.compare()
            undone = sum(line.startswith(_APPLIED) for line in beyond)
            if beyond and extent is not None:
                raise RecordingError(
                    f"{self._log_path} ends with entry {extent.last} of the run, but "
                    f"{self._journal_path} has {quantity(len(beyond), 'record')} after that: the end of "
                    "the log is missing"
                )
            on_error.pop_all()
        self._journal.cut()
        if extent is not None:
            self._log = Recording.reopen(self._log_path, extent, recycled=not self._records)
        self._save_checkpoint()
        if state.leg != leg:
            self.handle(inputs.Suspended(state.at, leg))
            self._due = not self._logs  # without a log, only a checkpoint can keep the new leg
        if undone:
            lost = quantity(undone, "later update is", "later updates are")
            self._note(f"the run continues from its last checkpoint: {lost} lost")
        if differs and self._logs:
            self._note("events.jsonl was damaged after the checkpoint; it was restored from the log")
        self.sync()

    def _note(self, text: str) -> None:
        self.handle(inputs.Written.from_record(events.Note(to_seconds(self.at), text)))

    def _open_journal(self, state: DurableState) -> storage.Journal:
        """Open the journal at the checkpoint's position. Raises SnapshotError."""
        path = self._journal_path
        if not path.is_file() or path.stat().st_size < state.journal:
            raise SnapshotError(f"{path} is missing or shorter than stated in {self._checkpoint}")
        journal = storage.Journal(path, state.journal)
        if journal.sum() != state.journal_sum:
            journal.abandon()
            raise SnapshotError(
                f"{path} is damaged: its first {state.journal:,} bytes do not match the checksum in "
                f"{self._checkpoint}"
            )
        return journal

    def _check_log(self, state: DurableState) -> Extent:
        """Raises RecordingError if entries are missing between the checkpoint and the log."""
        extent, entries = recording.check(self._log_path), state.entries
        if not extent.first <= entries <= extent.last:
            raise RecordingError(
                f"{self._log_path} has entries {extent.first} to {extent.last} of the run, but "
                f"{self._checkpoint} needs the entries after {entries}: the two files do not match"
            )
        return extent

    @contextmanager
    def _report_damage(self) -> Iterator[None]:
        """Add the names of the intact files to the message of a read error."""
        try:
            yield
        except OSError as error:
            place = error.filename or self._directory
            raise SnapshotError(f"{place}: {error.strerror}. {self._list_intact_files()}") from error
        except (SnapshotError, RecordingError) as error:
            raise type(error)(f"{error}. {self._list_intact_files()}") from error

    def _list_intact_files(self) -> str:
        whole = []
        with suppress(SnapshotError, OSError):
            state: DurableState = storage.load_snapshot(self._checkpoint)
            entries = quantity(state.entries, "entry", "entries")
            whole.append(f"{self._checkpoint.name} ({entries} of the run, {to_seconds(state.at):.1f} s)")
            self._open_journal(state).abandon()
            whole.append(self._journal_path.name)
        with suppress(RecordingError, OSError):
            if self._logs:
                extent = recording.check(self._log_path)
                whole.append(f"{self._log_path.name} (entries {extent.first} to {extent.last})")
        return (
            f"Intact: {', '.join(whole) or 'no file that is needed to resume the run'}. Nothing was "
            "changed: restore the damaged file from a copy, or start a new run"
        )

    def _replay(self, state: DurableState) -> None:
        for entry in recording.read(self._log_path, state.entries):
            match entry:
                case Setup() | Cut():
                    pass
                case recording.Torn():
                    break
                case _:
                    self.handle(entry)

    def _save_checkpoint(self) -> None:
        """Then cut the log, whose entries are not needed any more."""
        if self._durability == "none":
            return
        if self._log is not None:
            self._log.sync()
        self._journal.sync()
        self._state.journal, self._state.journal_sum = self._journal.size(), self._journal.sum()
        self._size = storage.save_snapshot(self._state, self._checkpoint)
        self._remove_evaluated(len(self._evaluated))
        if self._log is not None and not self._records:
            self._log.cut()
