"""Loss and gradient of a task for a stack of models, each on a mini-batch of its own."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agents.flat import FlatModule
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.tasks.quadratic import Quadratic

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_WORKSPACE = 4 << 20
"""Bytes that the arrays of jobs trained together may take: more leave the processor's cache, with fewer
jobs numpy's overhead counts for more."""


class Objective(Protocol):
    """One thread at a time uses it: it may keep memory to work in from call to call."""

    def gradient(self, w: Floats, rows: Indices, sizes: Indices, out: Floats) -> Floats:
        """Mean loss of model `w[k]` on the `sizes[k]` samples that `rows[k]` begins with, for each k,
        shape (jobs,); its gradient goes into `out[k]`.

        `w` and `out` have shape (jobs, d), contiguous; `rows`, indices of training samples, (jobs, b);
        `sizes`, 1 to b, (jobs,).
        """
        ...

    def at_once(self, batch_size: int) -> int:
        """How many models are best trained together."""
        ...


def objective(task: Task, train: Shard) -> Objective:
    """The fastest there is for `task` on samples of `train`."""
    if isinstance(task, Quadratic):
        return Squares(train)
    with torch.random.fork_rng(devices=[]):
        module = task.model()
    if isinstance(module, nn.Sequential) and type(task).loss is Task.loss:
        match list(module):
            case [nn.Flatten(start_dim=1, end_dim=-1), nn.Linear() as layer]:
                return Softmax(train, layer)
    return AnyModule(task, train, module)


class Softmax:
    """Multinomial logistic regression by hand: with p = softmax(W x + b), the gradient of the
    cross-entropy is (p − onehot(y)) xᵀ for W and p − onehot(y) for b.

    In numpy, on one thread: at this size torch's operators cost more than their arithmetic, and threads
    wait longer for each other than they save.
    """

    def __init__(self, train: Shard, layer: nn.Linear) -> None:
        self._x = train.x.reshape(len(train), layer.in_features)
        self._y, self._scale = train.y, np.float32(train.scale)
        self._shape, self._bias = (layer.out_features, layer.in_features), layer.bias is not None
        self._pixels, self._floats = np.empty(0, self._x.dtype), np.empty(0, np.float32)

    def at_once(self, batch_size: int) -> int:
        classes, inputs = self._shape
        samples = batch_size * inputs * (self._x.itemsize + 4)
        models = 4 * (inputs + 1) * classes * 4
        return max(1, _WORKSPACE // (samples + models))

    def gradient(self, w: Floats, rows: Indices, sizes: Indices, out: Floats) -> Floats:
        classes, inputs = self._shape
        cut, matrices = classes * inputs, (len(w), classes, inputs)
        x = self._gather(rows)
        # Classes before samples: sums over classes then add whole rows.
        p: Floats = np.matmul(w[:, :cut].reshape(matrices), x.transpose(0, 2, 1))
        p *= self._scale
        if self._bias:
            p += w[:, cut:, None]
        p -= p.max(1)[:, None]
        labels = self._labels(rows)
        loss = -p.reshape(-1).take(labels)
        np.exp(p, out=p)
        total = p.sum(1)
        loss += np.log(total)
        weights = _weights(sizes, rows.shape[1])
        p *= (weights / total)[:, None]
        p.reshape(-1)[labels] -= weights
        if self._bias:
            p.sum(2, out=out[:, cut:])
        p *= self._scale
        np.matmul(p, x, out=out[:, :cut].reshape(matrices))
        losses: Floats = np.vecdot(loss, weights)
        return losses

    def _labels(self, rows: Indices) -> Indices:
        """Where in p, taken as flat, the probability of each sample's own class is."""
        jobs, width = rows.shape
        first = np.arange(jobs)[:, None] * (self._shape[0] * width) + np.arange(width)
        labels: Indices = self._y.take(rows) * width
        labels += first
        return labels

    def _gather(self, rows: Indices) -> Floats:
        """The samples of `rows`, unscaled, shape (jobs, b, inputs); valid until the next call."""
        inputs = self._shape[1]
        size = rows.size * inputs
        if self._floats.size < size:
            self._pixels, self._floats = np.empty(size, self._x.dtype), np.empty(size, np.float32)
        pixels = self._pixels[:size].reshape(-1, inputs)
        floats = self._floats[:size].reshape(*rows.shape, inputs)
        self._x.take(rows.reshape(-1), 0, out=pixels, mode="clip")  # unbuffered in this mode alone
        np.copyto(floats, pixels.reshape(floats.shape))
        return floats


class Squares:
    """½‖w − x‖²: its gradient is w − x."""

    def __init__(self, train: Shard) -> None:
        self._x = train.x.astype(np.float32) * np.float32(train.scale)

    def at_once(self, batch_size: int) -> int:
        return max(1, _WORKSPACE // (8 * batch_size * int(self._x.shape[1])))

    def gradient(self, w: Floats, rows: Indices, sizes: Indices, out: Floats) -> Floats:
        weights = _weights(sizes, rows.shape[1])
        differences = w[:, None, :] - self._x[rows]
        np.einsum("kbd,kb->kd", differences, weights, out=out)
        losses: Floats = np.einsum("kbd,kbd,kb->k", differences, differences, weights) / 2
        return losses


class AnyModule:
    """Any torch module, one model after the other: convolutions are work enough for each call, and a
    stack of them (grouped, or as matrix products) is slower."""

    def __init__(self, task: Task, train: Shard, module: nn.Module) -> None:
        self._loss = task.loss
        self._flat = FlatModule(module)
        self._x, self._y = torch.from_numpy(train.x), torch.from_numpy(train.y)
        self._scale = train.scale

    def at_once(self, batch_size: int) -> int:
        return 1

    def gradient(self, w: Floats, rows: Indices, sizes: Indices, out: Floats) -> Floats:
        losses = np.empty(len(w), np.float32)
        for k, size in enumerate(sizes):
            self._flat.load(w[k])
            self._flat.gradient.zero_()
            batch = torch.from_numpy(rows[k, :size])
            x = self._x[batch].to(torch.float32).mul_(self._scale)
            loss = self._loss(self._flat.module(x), self._y[batch]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            losses[k] = loss.item()
            out[k] = self._flat.gradient.numpy()
        return losses


def _weights(sizes: Indices, width: int) -> Floats:
    """1/size for each sample of a mini-batch, 0 for what fills it up to `width`; shape (jobs, width)."""
    weights: Floats = np.divide(np.arange(width) < sizes[:, None], sizes[:, None], dtype=np.float32)
    return weights
