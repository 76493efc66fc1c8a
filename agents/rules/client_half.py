"""The client half of a rule, which converts the result of a local training to an update. This module
contains only vector arithmetic, without I/O or clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from agents.checks import DeclarationError
from agents.config import LocalTraining
from agents.models.vectors import Vector
from agents.wire.payloads import ModelMessage

Kind = Literal["delta", "model", "gradient", "residual"]
"""Content of an update. `delta`: end minus start of the local training. `model`: the end of the local
training. `gradient`: gradient of one mini-batch at the received model, without a local step. `residual`
(rule AREA): the end minus the end of the client's previous local training. A client without a previous
training sends `model`."""

SavedVectors = Mapping[str, tuple[int, Vector]]
"""Vectors that a client saves on its disk: name -> (number, vector). The number is the sequence number
of an update, or the number of a dispatch."""

Length = int | Literal["model"]
"""Length of a declared vector: number of elements, or `model` for d, the number of the model's
parameters."""
Lengths = Mapping[str, Length]
"""Length of each declared vector, by name."""
Vectors = Mapping[str, Vector]
"""Vectors by name, each of shape (n,), float32."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class ClientSide:
    """Requirements of a rule on its clients."""

    kind: Kind = "delta"
    as_model: bool = False
    """Whether clients send the trained model in place of a delta, so that no bit is lost by rounding.
    Clients that use FedNova, compression or privacy still send `delta`. Useful for rules in which w does
    not change while clients train: the trained model can then replace w."""
    send_buffer: Literal["overwrite", "hold"] | None = None
    """Behaviour of a client whose update waits in the send buffer until the server pulls it.
    `overwrite`: train on newer models and replace the update. `hold`: train again only after the update
    was pulled. None if there is no send buffer: an update is sent as soon as it is finished."""
    model_vectors: Lengths = field(default_factory=dict)
    """Vectors that the server sends with each model (`Send.vectors`)."""
    update_vectors: Lengths = field(default_factory=dict)
    """Vectors that a client sends with each update (`Answer.vectors`)."""
    compressed: Sequence[str] = ()
    """Names of `update_vectors` that are compressed if the run compresses updates. The others are sent
    whole."""
    memory: Lengths = field(default_factory=dict)
    """Vectors that each client keeps from one update to the next (`Answer.memory`)."""
    adds_terms: bool = False
    """Whether the rule adds terms to the local objective (`ClientHalf.terms`)."""

    def __post_init__(self) -> None:
        for place in ("model_vectors", "update_vectors", "memory"):
            for name, length in getattr(self, place).items():
                if not _NAME.fullmatch(name):
                    raise ValueError(
                        f"{place} has the name {name!r:.40}, expected lower-case letters, digits and _"
                    )
                if length != "model" and not (isinstance(length, int) and length > 0):
                    raise ValueError(
                        f"{place} gives {name} the length {length!r:.40}, expected model, or a number "
                        "of elements above 0"
                    )
        if unknown := [name for name in self.compressed if name not in self.update_vectors]:
            raise ValueError(f"compressed names {unknown[0]}, which is not in update_vectors")
        if self.adds_terms and self.kind == "gradient":
            raise ValueError(
                "adds_terms needs local steps, but with kind gradient clients send a single gradient"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of update that the server accepts."""
        either = (
            self.as_model or self.kind == "residual"
        )  # a client without memory has no residual to send
        return (self.kind, "model") if either else (self.kind,)


def sizes(lengths: Lengths, parameters: int) -> dict[str, int]:
    """Return the number of elements of each declared vector, for a model of `parameters` parameters."""
    return {name: parameters if n == "model" else n for name, n in lengths.items()}


def elements(lengths: Lengths, parameters: int) -> int:
    """Return the number of elements of all declared vectors together, for a model of `parameters`
    parameters."""
    return sum(sizes(lengths, parameters).values())


def unfit_vectors(found: Vectors, expected: Mapping[str, int]) -> str | None:
    """Return how the vectors `found` differ from those that the rule declares; None if all names and
    shapes agree. `expected`: number of elements of each declared vector."""
    if found.keys() != expected.keys():
        if missing := [name for name in expected if name not in found]:
            return f"no vector {missing[0]}, which the rule declares"
        unknown = next(name for name in found if name not in expected)
        return f"a vector {unknown:.40}, which the rule does not declare"
    for name, size in expected.items():
        if found[name].shape != (size,):
            return f"vector {name} has the shape {found[name].shape}, expected ({size},)"
    return None


def checked_copies(what: str, found: Vectors, expected: Mapping[str, int], like: Vector) -> Vectors:
    """Return read-only copies of the vectors `found`, in the order of `expected` and with the data type
    of `like`. `expected`: number of elements of each declared vector. Raise DeclarationError if names or
    shapes differ from `expected`; the message begins with `what`."""
    arrays = {name: np.asarray(vector) for name, vector in found.items()}
    if (problem := unfit_vectors(arrays, expected)) is not None:
        raise DeclarationError(f"{what}: {problem}")
    copies = {name: arrays[name].astype(like.dtype) for name in expected}
    for copy in copies.values():
        copy.flags.writeable = False
    return copies


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a rule adds to the objective of one local training:

        f(w) + ⟨linear, w⟩ + (proximal/2) ‖w − start‖²

    So linear + proximal·(w − start) is added to the gradient of each step."""

    linear: Vector | None = None
    """Vector of the linear term, shape (d,), float32; None for zero."""
    proximal: float = 0.0
    """Weight of the squared distance to the start, at least 0. The weight in `local.proximal` is added
    to this one."""

    def __bool__(self) -> bool:
        return self.linear is not None or self.proximal != 0


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Form:
    """Content of an update."""

    kind: Kind
    vector: Callable[[], Vector]
    """Function that computes the vector to send, shape (d,)."""
    effective_steps: float = 1.0
    """FedNova: the effective number of local steps; 1 for a vector that is not normalised. The server
    averages this number over the updates to τ_eff."""
    memory: SavedVectors | None = None
    """Memory that the client must save before it sends the update; None if the client has nothing
    to save."""
    vectors: Vectors = field(default_factory=dict)
    """Vectors to send with the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Arguments from which the client half of a rule is made."""

    local: LocalTraining
    sends_changes: bool = False
    """Whether the steps after the rule (compression, privacy) require the update as a change of the
    model."""
    as_sent: Callable[[int, int, Vector], Vector] | None = None
    """Function that returns what the server receives, shape (d,), when the client sends a change of the
    model. The arguments are the sequence number of the update, the number of the dispatch, and the
    change that the client sends. The function is set if the server learns only sums: changes are then
    rounded, and an update may be discarded after its arrival. None if changes arrive unmodified and are
    never discarded."""
    memory: SavedVectors | None = None
    """Memory that the previous process of this client saved last; None if no memory was saved."""


class ClientState:
    """The client half of a rule during a run; the server half is `agents.rules.interface.State`.

    This default keeps no memory between updates. Depending on the rule and the settings, it sends the
    end of the training, or end minus start. With FedNova, it sends (end − start)/a_i (see
    `effective_steps`).
    """

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        self.side = side
        self.local = settings.local
        self._sends_changes = settings.sends_changes

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 if the memory is empty."""
        return 0

    def acknowledge(self, message: ModelMessage) -> None:
        """Read from `message` which update of this client the server applied last."""

    def begin(self, model: ModelMessage) -> Terms:
        """Return the terms to add to the objective of the training from `model`, which begins now."""
        return NO_TERMS

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """Return the content of update number `sequence`. The training did `steps` local steps, starting
        from `model`. `end` returns the end point of the training, shape (d,)."""
        start, fednova = model.vector, self.local.fednova
        if self.side.kind != "delta":
            return Form(self.side.kind, end)
        if self.side.as_model and not self._sends_changes and not fednova:
            return Form("model", end)
        if not fednova:
            return Form("delta", lambda: end() - start)
        a = effective_steps(self.local, self.local.rate(model.version, model.lr), steps)
        reported_steps = float(steps) if self.local.proximal else a
        return Form("delta", lambda: (end() - start) / np.float32(a or 1.0), reported_steps)

    def goodbye_models(self) -> Sequence[tuple[int, Vector]]:
        """Return the models that the client sends back with its goodbye, each with the sequence number
        of its update. Several models are returned if any of them may be the last one that the server has
        applied. The result is empty if the rule needs no models."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """A finished local training, for `ClientHalf.answer`."""

    model: ModelMessage
    """The received model: `vector`, shape (d,), `version`, and the rule's own `vectors`."""
    end: Vector
    """End point of the training, shape (d,), float32, read-only."""
    steps: int
    """Number of local steps that were done."""
    lr_sum: float
    """Sum of the step sizes of these steps: K·η for K steps of size η."""
    memory: Vectors
    """Memory with which the training began; empty if the client has none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Content of a client's update, and the client's memory after it."""

    vectors: Vectors = field(default_factory=dict)
    """Vectors to send with the update: those in `ClientSide.update_vectors`."""
    memory: Vectors = field(default_factory=dict)
    """Memory of the client from now on: the vectors in `ClientSide.memory`."""
    vector: Vector | None = None
    """Vector of the update, shape (d,), as the rule's `kind` requires. None for the default vector: for
    `delta`, end minus start of the training."""


class ClientHalf(ClientState):
    """The client half of a rule that adds terms to the local objective, sends vectors with its updates,
    or remembers vectors. A rule returns an object of a class derived from this one in `begin_client`,
    and declares in `client_side` what the class uses.

    `terms` and `answer` are pure functions: an object of the class stores nothing. Both methods get the
    client's memory as an argument. The memory is empty until the server half has accepted a first update
    of the client. An update that is lost, rejected or answered with `Ignored` does not change the
    memory. The memory is kept over crashes and when the run is resumed. If the server sends a client a
    further model before the client's last update has arrived, the client may train with the memory from
    before that update.

        class MyClient(ClientHalf):
            def terms(self, model: ModelMessage, memory: Vectors) -> Terms:
                return Terms(proximal=0.1)

            def answer(self, result: LocalResult) -> Answer:
                return Answer(memory={"last": result.end})
    """

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        super().__init__(side, settings)
        self._kept = KeptMemory.from_saved(settings.memory or {})
        self._begun: dict[int, Vectors] = {}
        """Memory with which each unfinished training began, by the dispatch number of the training's
        model."""

    def terms(self, model: ModelMessage, memory: Vectors) -> Terms:
        """Return the terms to add to the objective of the training that begins from `model`. `memory`:
        the client's memory; empty if it has none yet."""
        return NO_TERMS

    def answer(self, result: LocalResult) -> Answer:
        """Return the vectors that the client sends after the training, and the memory that it keeps."""
        return Answer()

    @property
    def newest(self) -> int:
        return self._kept.newest

    def acknowledge(self, message: ModelMessage) -> None:
        self._kept = self._kept.acknowledged(message.acknowledged)

    def begin(self, model: ModelMessage) -> Terms:
        memory = self._begun[model.dispatch] = self._kept.present
        while len(self._begun) > _TRAININGS:
            del self._begun[min(self._begun)]
        if not self.side.adds_terms:
            return NO_TERMS
        found = self.terms(model, memory)
        if found.linear is not None:
            expected = {"linear": model.vector.size}
            copies = checked_copies("terms", {"linear": found.linear}, expected, model.vector)
            found = replace(found, linear=copies["linear"])
        if not found.proximal >= 0:
            raise DeclarationError(f"terms: proximal is {found.proximal:g}, expected at least 0")
        return found

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        reached = end()
        lr, schedule = self.local.rate(model.version, model.lr), self.local.lr_by_step
        factors = steps if schedule is None else sum(map(schedule.factor, range(steps)))
        answer = self.answer(
            LocalResult(
                model=model,
                end=reached,
                steps=steps,
                lr_sum=lr * factors,
                memory=self._begun.pop(model.dispatch, {}),
            )
        )
        form = super().form(sequence, model, steps, lambda: reached)
        like, d = model.vector, model.vector.size
        vectors = checked_copies("answer", answer.vectors, sizes(self.side.update_vectors, d), like)
        memory = checked_copies("answer, memory", answer.memory, sizes(self.side.memory, d), like)
        if answer.vector is not None:
            whole = checked_copies("answer", {"update": answer.vector}, {"update": d}, like)
            form = Form(self.side.kind, lambda: whole["update"])
        if memory:
            self._kept = self._kept.after(sequence, memory)
        return replace(form, vectors=vectors, memory=self._kept.saved or None)


_TRAININGS = 2
"""Maximum number of a client's unfinished trainings: one in progress, and one in the send buffer."""
_APPLIED, _SENT = "applied", "sent"
"""First parts of the names in a client's saved memory; the name of the vector follows."""


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Up to two versions of a client's memory: after the last update that the server accepted, and after
    an update sent later. Each version has the sequence number of its update. The next model says which
    version is valid."""

    applied: tuple[int, Vectors] | None = None
    """Memory after the last update that the server is known to have accepted; None if no such update is
    known."""
    sent: tuple[int, Vectors] | None = None
    """Memory after an update that was sent later; None if there is none."""

    @classmethod
    def from_saved(cls, saved: SavedVectors) -> KeptMemory:
        """Restore the memories that were saved on disk as `saved`."""
        found: dict[str, tuple[int, dict[str, Vector]]] = {}
        for key, (number, vector) in saved.items():
            place, _, name = key.partition("/")
            found.setdefault(place, (number, {}))[1][name] = vector
        return cls(found.get(_APPLIED), found.get(_SENT))

    @property
    def saved(self) -> SavedVectors:
        """The memories in the form in which they are saved on disk."""
        places = {_APPLIED: self.applied, _SENT: self.sent}
        return {
            f"{place}/{name}": (end[0], vector)
            for place, end in places.items()
            if end is not None
            for name, vector in end[1].items()
        }

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 if the memory is empty."""
        return max((end[0] for end in (self.applied, self.sent) if end), default=0)

    @property
    def present(self) -> Vectors:
        """Memory for a training that starts now: `sent`, or `applied` if `sent` is None; empty if both
        are None."""
        end = self.sent or self.applied
        return {} if end is None else end[1]

    def after(self, sequence: int, memory: Vectors) -> KeptMemory:
        """Return the versions after update `sequence` was sent. `memory` is the client's memory after
        this update."""
        return KeptMemory(self.applied, (sequence, memory))

    def acknowledged(self, sequence: int) -> KeptMemory:
        """Return the versions after the aggregator has acknowledged update `sequence` as the last one
        that was accepted. `sequence` is 0 if no update was accepted. If a crash of the aggregator undid
        a part of the run, there may be no version for that update. The newest version is then kept."""
        if sequence == 0:
            return KeptMemory()
        for end in (self.sent, self.applied):
            if end is not None and end[0] == sequence:
                return KeptMemory(end)
        return KeptMemory(self.sent or self.applied)


def effective_steps(local: LocalTraining, lr: float, steps: int) -> float:
    """Return FedNova's a_i (Wang et al. 2020): the progress of `steps` steps in units of a single step.

    Start with a = c = 0. With momentum ρ, each step does c ← ρc + 1, a ← a + c. With a proximal term μ,
    each step does a ← (1 − ημ)a + 1. With both, the momentum comes first. With neither, a is `steps`.
    """
    a = c = 0.0
    shrink = 1 - lr * local.proximal
    for _ in range(steps):
        if local.momentum:
            c = local.momentum * c + 1
            a += c
        if local.proximal:
            a = shrink * a + 1
        elif not local.momentum:
            a += 1
    return a
