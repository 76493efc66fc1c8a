"""Local training on one shard. Parameters are flat vectors, which are changed in place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from agents.client.resources import keep_float32
from agents.config import FROM_TASK, InitialModel, LocalTraining
from agents.models import flat
from agents.models.flat import FlatModule, buffers_of, build, fill, vector_of
from agents.models.vectors import NONE, Buffers, Vector, norm
from agents.rules.client_half import NO_TERMS, Terms, Vectors
from agents.shards import Shard, model_inputs
from agents.tasks.interface import FitClient, Task, mean_loss


@dataclass(frozen=True, slots=True)
class Result:
    end: Vector
    """Trained parameters, or the gradient if one was requested; shape (d,)."""
    steps: int
    """Steps done, fewer than planned after an interrupt."""
    loss: float
    """Mean over the steps, including the regularisation; NaN if no step was done."""
    buffers: Buffers = NONE
    memory: Vectors = field(default_factory=dict)
    """Memory of the task's own `fit`."""


_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types for torch's autocast, by the value of `precision`."""
_FIRST_SCALE = 2.0**16
"""For float16, whose smallest number is 6e-8: without a scale, small gradients would be 0."""


class Trainer:
    """Model and shard stay on `device`; arguments and results are on the CPU."""

    def __init__(
        self,
        task: Task,
        shard: Shard,
        local: LocalTraining,
        start: InitialModel = FROM_TASK,
        device: str | torch.device = "cpu",
    ) -> None:
        self._device = torch.device(device)
        keep_float32()
        self.flat = FlatModule(build(task, start).to(self._device), trained=not task.fits)
        self._task = task
        self._client = FitClient("client", 0)
        """The client of the next training, for a task with its own `fit`."""
        self.fits = task.fits
        self.assign(shard, local)

    def assign(self, shard: Shard, local: LocalTraining) -> None:
        """Use `shard` and the settings `local` from now on."""
        self._local = local
        bound = local.proximal or local.clip is not None
        self._start = self.flat.w.clone() if bound else None
        """Parameters at the start of the training, shape (d,), for `proximal` or `clip`."""
        self._scale = 1.0
        """Scale of the loss; 1 unless `precision` is float16."""
        self._proximal = local.proximal
        """Weight of the squared distance to the start: of the local settings plus of the rule's
        terms."""
        self._linear: torch.Tensor | None = None
        """Added to each gradient by the rule, shape (d,)."""
        self._skipped: Sequence[slice] = []
        """Parts of the vector that the next step must not change: the loss does not depend on them."""
        self._x = model_inputs(torch.from_numpy(shard.x).to(self._device), shard.scale)
        self._y = torch.from_numpy(shard.y).to(self._device)
        self._optimizer = _optimizer(local, self.flat)

    def set_client(self, name: str, index: int, memory: Vectors) -> None:
        """Set the client of the next training, for a task with its own `fit`. `index`: number of the
        device in device order. `memory`: the client's memory. `fit` gets a copy of the memory."""
        copies = {key: vector.copy() for key, vector in memory.items()}
        self._client = FitClient(name, index, copies)

    def warm_up(self) -> None:
        """Run one step, so that torch's lazy initialisation does not slow down the first training."""
        if batch := self._local.first_batch(len(self._y)):  # else the client never trains
            self._gradient(torch.arange(batch))
            self._descend(self._local.lr)

    def train(
        self,
        start: Vector,
        rng: np.random.Generator,
        lr: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        *,
        buffers: Buffers = NONE,
        terms: Terms = NO_TERMS,
    ) -> Result:
        """Train from `start`, shape (d,), until `stopped`, which is called before each step. `terms`:
        those of the rule; the reported loss does not include them. `lr`: before `lr_by_step` is applied;
        None for that of the settings.

        Mini-batches are taken from a random permutation of the shard. After each pass, a new one is
        drawn.
        """
        lr = self._local.lr if lr is None else lr
        schedule = self._local.lr_by_step
        self._set_terms(terms)
        self._load(start, buffers, rng)
        loss, steps = 0.0, 0
        order = batches(len(self._y), self._local, rng, self._device)
        for _ in range(self._local.count(len(self._y))):
            if stopped():
                break
            loss += self._gradient(next(order))
            self._descend(lr if schedule is None else lr * schedule.factor(steps))
            steps += 1
        end = self.flat.w
        if self._local.clip is not None and self._start is not None:
            _clip(end, self._start, self._local.clip)
        mean = loss / steps if steps else math.nan
        return Result(vector_of(end), steps, mean, buffers_of(self.flat.module))

    def gradient(self, start: Vector, rng: np.random.Generator, buffers: Buffers = NONE) -> Result:
        """One mini-batch at `start`, shape (d,)."""
        self._set_terms(NO_TERMS)
        self._load(start, buffers, rng)
        order = batches(len(self._y), self._local, rng, self._device)
        loss = self._gradient(next(order))
        return Result(vector_of(self.flat.gradient), 1, loss, buffers_of(self.flat.module))

    def _set_terms(self, terms: Terms) -> None:
        self._proximal = self._local.proximal + terms.proximal
        if self._proximal and self._start is None:
            self._start = self.flat.w.clone()
        self._linear = None
        if terms.linear is not None:
            self._linear = torch.from_numpy(np.array(terms.linear, np.float32)).to(self._device)

    def _load(self, start: Vector, buffers: Buffers, rng: np.random.Generator) -> None:
        # A child of `rng` seeds the model's own random draws (dropout), so `rng` itself does not change.
        seed = int(rng.spawn(1)[0].integers(2**63))
        flat.seed_generators(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        if self._start is not None:
            fill(self._start, start)
        self.flat.load(start, buffers)
        self._optimizer.reset()
        self._scale = _FIRST_SCALE if self._local.precision == "float16" else 1.0

    def _gradient(self, batch: torch.Tensor) -> float:
        """Return the local objective; put its gradient into `flat`, with the ℓ2 term, the FedProx term
        and the rule's terms, if set, and clipped if the settings require it."""
        flat, local, l2 = self.flat, self._local, self._task.l2
        value = self._differentiate(batch)
        unreached = flat.without_gradient()
        reaches_all = l2 or self._proximal or self._linear is not None  # these change all parameters
        self._skipped = [] if reaches_all else unreached
        with torch.no_grad():
            if l2:
                value += 0.5 * l2 * float(flat.w @ flat.w)
                flat.gradient.add_(flat.w, alpha=l2)
            if self._proximal and self._start is not None:
                flat.gradient.add_(flat.w, alpha=self._proximal)
                flat.gradient.sub_(self._start, alpha=self._proximal)
            if self._linear is not None:
                flat.gradient.add_(self._linear)
            if local.clip_gradient is not None:
                length = _length(flat.gradient)
                if length > local.clip_gradient:
                    flat.gradient.mul_(local.clip_gradient / length)
        return value

    def _differentiate(self, batch: torch.Tensor) -> float:
        """Return the task's loss; put its gradient into `flat`.

        In float16 the loss is scaled, so that small gradients are not lost. If the gradient overflows,
        the scale is halved for the rest of the training and the batch is repeated (BatchNorm then counts
        it twice).
        """
        flat, half = self.flat, _HALF.get(self._local.precision)
        x, y = self._x[batch], self._y[batch]
        while True:
            flat.gradient.zero_()
            with torch.autocast(self._device.type, half, enabled=half is not None):
                loss = mean_loss(self._task, flat.module(x), y)
            scaled = loss if self._scale == 1.0 else loss * self._scale
            scaled.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            if self._scale == 1.0:
                return value
            flat.gradient.div_(self._scale)
            if not math.isfinite(value) or bool(flat.gradient.isfinite().all()):
                return value
            self._scale /= 2

    def _descend(self, lr: float) -> None:
        with torch.no_grad():
            self._optimizer.step(lr, self._skipped)


_FIT_PARAMETERS = 3
"""Parameters of a `fit` that does not ask for the client: module, shard and step size."""


class FitTrainer(Trainer):
    """For a task with its own `fit` (`Task.fits`), one call of which is one step with step size `lr`."""

    def assign(self, shard: Shard, local: LocalTraining) -> None:
        self._local, self._shard = local, shard
        self._start = self.flat.w.clone() if local.clip is not None else None

    def warm_up(self) -> None:
        """Evaluate one sample and do one step of a torch optimizer, whose imports take seconds, before
        the run clock starts. `fit` is not called, because that may take long."""
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        torch.optim.SGD([weight], lr=0.1).step()
        if len(self._shard):  # else the client never trains
            with torch.no_grad():
                self.flat.module(self._shard.subset(np.arange(1)).tensors()[0])

    def train(
        self,
        start: Vector,
        rng: np.random.Generator,
        lr: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        *,
        buffers: Buffers = NONE,
        terms: Terms = NO_TERMS,
    ) -> Result:
        if terms:
            raise NotImplementedError("a task with its own fit cannot add terms to the objective")
        flat.seed_generators(int(rng.spawn(1)[0].integers(2**32)))
        if self._start is not None:
            fill(self._start, start)
        self.flat.load(start, buffers)
        self.flat.module.zero_grad()  # as in a module that was never trained
        loss = self._fit(self._local.lr if lr is None else lr)
        if self._local.clip is not None and self._start is not None:
            with torch.no_grad():
                _clip(self.flat.w, self._start, self._local.clip)
        memory = {name: _remembered(name, value) for name, value in self._client.memory.items()}
        return Result(vector_of(self.flat.w), 1, loss, buffers_of(self.flat.module), memory)

    def _fit(self, lr: float) -> float:
        """Return the loss of `fit`. Raises TypeError if it is not a number."""
        fit: Callable[..., object] = self._task.fit
        takes_client = len(inspect.signature(fit).parameters) > _FIT_PARAMETERS
        given = (self.flat.module, self._shard, lr, *((self._client,) if takes_client else ()))
        loss = fit(*given)
        try:
            return float(loss)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            name = type(self._task).__name__
            raise TypeError(
                f"{name}.fit returned {loss!r:.80}, expected the mean loss, or math.nan"
            ) from error

    def gradient(self, start: Vector, rng: np.random.Generator, buffers: Buffers = NONE) -> Result:
        raise NotImplementedError("a task with its own fit has no gradient")


def _remembered(name: object, value: object) -> Vector:
    """Copy of an entry. Raises TypeError unless it is a float32 vector with a text as name."""
    if not isinstance(name, str) or not isinstance(value, np.ndarray):
        raise TypeError(f"fit keeps memory[{name!r:.40}] = {value!r:.80}, expected a NumPy array")
    if value.ndim != 1 or value.dtype != np.float32 or not value.size:
        found = f"{value.dtype} of shape {value.shape}"
        raise TypeError(f"fit keeps memory[{name!r:.40}], {found}, expected float32 of shape (n,)")
    return value.copy()


def make_trainer(
    task: Task,
    shard: Shard,
    local: LocalTraining,
    start: InitialModel = FROM_TASK,
    device: str | torch.device = "cpu",
) -> Trainer:
    return (FitTrainer if task.fits else Trainer)(task, shard, local, start, device)


def _clip(end: torch.Tensor, start: torch.Tensor, bound: float) -> None:
    """Move `end` towards `start` until ‖end − start‖ ≤ bound."""
    end.sub_(start)
    length = _length(end)
    if length > bound:
        end.mul_(bound / length)
    end.add_(start)


def _length(tensor: torch.Tensor) -> float:
    """‖tensor‖ in float64. In float32, torch's `norm` of 30 million equal elements is 1.6 % too
    small."""
    if tensor.is_cpu:
        return norm(tensor.numpy())
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


class _Optimizer(Protocol):
    """Reads the gradient from the `FlatModule`."""

    def reset(self) -> None: ...

    def step(self, lr: float, skipped: Sequence[slice]) -> None:
        """For parts `skipped`, the step does not count. The gradient may be overwritten."""


def _optimizer(local: LocalTraining, flat: FlatModule) -> _Optimizer:
    return _Sgd(local, flat) if local.optimizer == "sgd" else _Adam(local, flat)


class _Sgd:
    """w ← w − lr·g, with weight decay and heavy-ball momentum."""

    def __init__(self, local: LocalTraining, flat: FlatModule) -> None:
        self._local, self._flat = local, flat
        self._velocity = torch.zeros_like(flat.w) if local.momentum else None

    def reset(self) -> None:
        if self._velocity is not None:
            self._velocity.zero_()

    def step(self, lr: float, skipped: Sequence[slice]) -> None:
        w, direction = self._flat.w, self._flat.gradient
        kept = [
            (whole[part], whole[part].clone())
            for whole in (w, self._velocity)
            for part in skipped
            if whole is not None
        ]
        if self._local.weight_decay:
            direction.add_(w, alpha=self._local.weight_decay)
        if self._velocity is not None:
            direction = self._velocity.mul_(self._local.momentum).add_(direction)
        w.sub_(direction, alpha=lr)
        for part, before in kept:
            part.copy_(before)


class _Adam:
    """torch's Adam or AdamW on the flat vector. After the first step that skips a parameter, the
    optimizer works on single parameters, because each parameter then has its own number of steps."""

    def __init__(self, local: LocalTraining, flat: FlatModule) -> None:
        self._local, self._flat = local, flat
        self._whole = self._optimizer = self._on([flat.w])
        self._parts: list[torch.Tensor] = []
        """Empty until a step has skipped a parameter."""

    def _on(self, tensors: list[torch.Tensor]) -> torch.optim.Adam:
        local = self._local
        kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
        betas = local.beta1, local.beta2
        return kind(tensors, local.lr, betas, local.epsilon, local.weight_decay)

    def reset(self) -> None:
        self._flat.w.grad = self._flat.gradient
        self._optimizer, self._parts = self._whole, []
        self._optimizer.state.clear()

    def step(self, lr: float, skipped: Sequence[slice]) -> None:
        if skipped and not self._parts:
            self._split()
        for part, tensor in zip(self._flat.parts, self._parts, strict=bool(self._parts)):
            tensor.grad = None if part in skipped else self._flat.gradient[part]
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def _split(self) -> None:
        self._parts = [self._flat.w[part] for part in self._flat.parts]
        self._optimizer = self._on(self._parts)
        if state := self._whole.state.get(self._flat.w):
            for part, tensor in zip(self._flat.parts, self._parts, strict=True):
                self._optimizer.state[tensor] = {
                    name: value[part] if value.dim() else value.clone() for name, value in state.items()
                }


def batches(
    samples: int, local: LocalTraining, rng: np.random.Generator, device: str | torch.device = "cpu"
) -> Iterator[torch.Tensor]:
    """Indices, shape (b,), without end; nothing if a pass has no mini-batch."""
    count, last = local.batches(samples)
    begins = [place * local.batch_size for place in range(count)]
    ends = [*begins[1:], *(begin + last for begin in begins[-1:])]
    while begins:
        # A batch of all samples is not shuffled. Its sum is bit-identical to that of gradient descent.
        order = torch.from_numpy(rng.permutation(samples) if ends[0] < samples else np.arange(samples))
        order = order.to(device)
        yield from (order[begin:end] for begin, end in zip(begins, ends, strict=True))
