"""`testbed replay`: repeats a run from its recorded inputs, with a new aggregator, and compares the
replay with the run.

All saved models are compared bit by bit. All records that the aggregator's core wrote to `events.jsonl`
are compared, too. The records show where the first difference is, even if the difference lies between
two saved models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from agents import events, user_code
from agents.aggregator import actions as act
from agents.aggregator import inputs, recording
from agents.aggregator.core import AggregatorCore, Setup
from agents.aggregator.recording import RecordingError, Torn
from agents.disk import files
from agents.models.vectors import Buffers, Vector
from agents.rules.interface import Server
from agents.texts import quantity
from agents.wire import payloads
from testbed.errors import BadInputError, RunFailedError
from testbed.host import cpus
from testbed.run import provenance
from testbed.rundir.directory import RunDirectory

_MAX_MODEL_BYTES = 2**33


@dataclass(slots=True)
class ReplayResult:
    """Counts of what was compared and found equal to the run."""

    run: str = ""
    rule: str = ""
    updates: int = 0
    """Applied updates."""
    version: int = 0
    """Version of the final model."""
    models: int = 0
    records: int = 0

    def __str__(self) -> str:
        models, records = quantity(self.models, "model"), quantity(self.records, "record")
        return f"{models} and {records}, {quantity(self.updates, 'update')} among them"


class _DifferenceError(Exception):
    """The text says where the replay differs from the run."""


def replay(directory: RunDirectory) -> ReplayResult:
    """Raises BadInputError if the run has not ended, or its recording is missing or cannot be read.
    Raises RunFailedError, with the first difference, if the replay differs from the run, or if the final
    model is missing."""
    if not directory.inputs.is_file():
        raise BadInputError(
            f"{directory.path} has no recording: run its topology again with `durability: recording`"
        )
    if directory.controller() is not None:
        raise BadInputError(f"{directory.run} is still running: replay it after its end")
    replay = _Replay(directory)
    user_code.use_folder(str(directory.code) if directory.code.is_dir() else None)
    try:
        with cpus.one_blas_thread():  # as in the aggregator
            return replay.run()
    except (RecordingError, payloads.WireError, ValueError, OSError) as error:
        raise BadInputError(f"cannot replay {directory.run}: {error}") from error
    except _DifferenceError as error:
        told = f"the replay differs from the run: {error}. Equal until then: {replay.same}."
        raise RunFailedError(" ".join([told, *_causes(directory)])) from error


def _causes(directory: RunDirectory) -> list[str]:
    """Return sentences on what may round otherwise here than in the run, and what to do."""
    theirs = directory.read_manifest().get("versions") or {}
    other = provenance.other_versions(theirs, ("numpy", "blas", "processor"))
    if not other:
        return []
    told = f"The run computed with {', '.join(other)}, which may round otherwise"
    library, _, kernels = str(theirs.get("blas")).rstrip(")").partition(" (")
    has_them = f"({kernels})" in provenance.versions()["blas"]
    if library.startswith("openblas") and kernels and not has_them:
        return [f"{told}: repeat the command with OPENBLAS_CORETYPE={kernels} before it."]
    return [f"{told}."]


_SKIPPED_RECORDS = (events.Acted, events.EvaluatedPart, events.Note)
"""Types of records that are not compared, because they are not written by the core alone."""
_WORDED_RECORDS = (events.Disrupted, events.UpdateRejected)
"""Types of records whose reason is a sentence for people. Another version of the testbed may use other
words."""


def _without_words(record: events.Record | None) -> events.Record | None:
    return replace(record, reason="") if isinstance(record, _WORDED_RECORDS) else record


@dataclass(slots=True)
class _Replay:
    directory: RunDirectory
    same: ReplayResult = field(default_factory=ReplayResult)
    _logged: Iterator[tuple[int, events.Record]] = field(init=False)
    _final: tuple[Vector, Buffers] | None = None
    """None before the run has ended. A resumed run may end more than once."""

    def __post_init__(self) -> None:
        self._logged = (
            (number, record)
            for number, record in events.read_numbered(self.directory.events)
            if not isinstance(record, _SKIPPED_RECORDS)
        )

    def run(self) -> ReplayResult:
        core: AggregatorCore | None = None
        for number, entry in enumerate(recording.read(self.directory.inputs)):
            match entry:
                case Setup():
                    core, server = self._begin(entry)
                case Torn(at):
                    raise _DifferenceError(
                        f"{self.directory.inputs.name} is torn at byte {at}, where the run was "
                        "interrupted"
                    )
                case recording.Cut():
                    pass
                case _ if core is not None:
                    self._carry_out(self._handle(core, entry, number), server)
                case _:
                    raise RecordingError(f"{self.directory.inputs} does not begin with the run's setup")
        if self._final is None:
            raise _DifferenceError("the recording ends before the run did, without a final model")
        self._compare("final", *self._final)
        for number, record in self._logged:
            raise _DifferenceError(f"events.jsonl:{number} is not in the recording: {record}")
        return self.same

    def _begin(self, setup: Setup) -> tuple[AggregatorCore, Server]:
        self.same.run = self.directory.run
        self.same.rule = setup.rule.name
        model, buffers = self._load_model(act.Save(0).name)
        try:
            return setup.core(model.copy(), buffers)
        except (TypeError, LookupError, ImportError) as error:
            raise RecordingError(f"{self.directory.inputs} names an unknown rule: {error}") from error

    def _handle(self, core: AggregatorCore, event: inputs.Input, number: int) -> act.Actions:
        try:
            return core.handle(event)
        except Exception as error:
            raise RecordingError(
                f"{self.directory.inputs}: entry {number}, {type(event).__name__}, is impossible after "
                f"the entries before it ({error!r}): entries are missing, reordered, or changed"
            ) from error

    def _carry_out(self, actions: act.Actions, server: Server) -> None:
        for action in actions:
            match action:
                case act.Save(final=True):
                    self._final = server.w.copy(), server.buffers
                case act.Save() as save:
                    self._compare(save.name, server.w, server.buffers)
                case act.Log(record) if not isinstance(record, _SKIPPED_RECORDS):
                    self._expect(record)
        self.same.version = server.version

    def _expect(self, record: events.Record) -> None:
        """Numbers are rounded as in the file."""
        replayed = events.from_line(events.to_line(record))
        number, found = next(self._logged, (0, None))
        if found is None:
            raise _DifferenceError(f"events.jsonl ends before {replayed}")
        if repr(_without_words(replayed)) != repr(_without_words(found)):  # repr: NaN equals NaN
            raise _DifferenceError(f"events.jsonl:{number} has {found}, the replay {replayed}")
        self.same.records += 1
        self.same.updates += isinstance(record, events.UpdateApplied)

    def _compare(self, name: str, w: Vector, buffers: Buffers) -> None:
        kept, kept_buffers = self._load_model(name)
        if kept.shape != w.shape:
            raise _DifferenceError(f"models/{name} has {kept.size} parameters, the replay {w.size}")
        differ = np.flatnonzero(kept.view(np.uint32) != w.astype("<f4").view(np.uint32))
        if len(differ):
            at = differ[0]
            raise _DifferenceError(
                f"models/{name} differs in {len(differ)} of {w.size} parameters; the first is number "
                f"{at}: {kept[at]!r}, in the replay {w[at]!r}"
            )
        if not kept_buffers.equals(buffers):
            raise _DifferenceError(f"models/{name} has other buffers than the replay")
        self.same.models += 1

    def _load_model(self, name: str) -> tuple[Vector, Buffers]:
        path = self.directory.models / f"{name}.safetensors"
        if not path.is_file():
            raise _DifferenceError(f"models/{name} is missing")
        w, _, buffers = payloads.unpack(files.read(path, _MAX_MODEL_BYTES))
        return w, buffers
