"""The torch module of `agents.tasks.flower`. It exchanges Flower's messages with the ClientApp."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flwr.common as flower
import numpy as np
import torch
from flwr.clientapp import ClientApp

_TRAIN_LOSS = ("train_loss", "loss")
_LOSS = ("eval_loss", "loss", "val_loss", "test_loss")
_ACCURACY = ("eval_acc", "eval_accuracy", "accuracy", "acc", "val_accuracy", "test_accuracy")
_EXAMPLES = ("num-examples", "num_examples")
"""Names under which apps report the training loss, the loss, the accuracy and the number of examples. If
a reply has several of the names, the first one is used."""
_LIFETIME_SECONDS = 43_200.0
"""Lifetime of a message in seconds, Flower's default. Flower requires a lifetime, but it has no effect
here."""
_NET = 'Set net to what makes the initial model, as in net: "my_app.task:Net"'
_RUN = 1
_SERVER = 1
"""Ids, in Flower's messages, of the run and of the server's node. The node of partition k has the id k +
2."""


class FlowerModule(torch.nn.Module):
    """The named arrays of a Flower model, and the app that trains and evaluates them.

    Raises ValueError if `app` is not a ClientApp, or if the initial model is unknown.
    """

    def __init__(self, app: Any, initial: Any, run_config: Mapping[str, Any]) -> None:
        super().__init__()
        self._app = client_app(app)
        self._run_config = dict(run_config)
        self._contexts: dict[int, flower.Context] = {}
        self._trainings: dict[int, int] = {}
        """Number of trainings that each partition has started."""
        arrays, buffers = self._initial_arrays(initial)
        self._places: dict[str, tuple[torch.nn.Module, str]] = {}
        """Submodule that holds each array, and the array's name in that submodule. The arrays are in
        Flower's order."""
        self._dtypes = {name: array.dtype for name, array in arrays.items()}
        for name, array in arrays.items():
            holder: torch.nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if step not in dict(holder.named_children()):
                    holder.add_module(step, torch.nn.Module())
                holder = holder.get_submodule(step)
            # A copy, because the app's array may be read-only. Models are exchanged in float32.
            if array.dtype.kind == "f" and name not in buffers:
                tensor = torch.tensor(np.asarray(array, np.float32))
                holder.register_parameter(last, torch.nn.Parameter(tensor))
            else:
                holder.register_buffer(last, torch.tensor(np.asarray(array)))
            self._places[name] = holder, last

    def forward(self, partitions: torch.Tensor) -> torch.Tensor:
        """Return the app's loss and accuracy on each of `partitions`, shape (n, 2). They are scaled
        by the number of examples, so that their mean over partitions is the mean over all examples. A
        row of `partitions`, shape (n, 2), has the index of a partition and the total number of
        partitions."""
        rows = [self._evaluate(int(k), int(count)) for k, count in partitions.tolist()]
        results = torch.tensor(rows, dtype=torch.float64)
        weights = results[:, 2:] / results[:, 2].mean()
        return results[:, :2] * weights

    def fit(self, partition: int, partitions: int, lr: float) -> float:
        """Train in place on the partition. Return the loss that the app reports; NaN if it reports no
        loss."""
        number = self._trainings[partition] = self._trainings.get(partition, 0) + 1
        config = {"lr": lr, "server-round": number, "server_round": number}
        content = self._request("train", partition, partitions, config)
        self._load(content)
        return _figure(content, _TRAIN_LOSS)

    def _initial_arrays(self, initial: Any) -> tuple[dict[str, Any], set[str]]:
        """Return the initial arrays by name, and the names of the arrays that are buffers."""
        if initial is None:
            if not _has_client_fn(self._app):
                raise ValueError(
                    f"net is missing: an app of the message API provides no initial model. {_NET}"
                )
            try:
                content = self._request("get_parameters", 0, 1, {})
            except NotImplementedError as error:
                raise ValueError(
                    f"net is missing, and the client has no get_parameters. {_NET}"
                ) from error
            self._contexts.clear()  # they assume a single partition, because the number is unknown here
            return {name: array.numpy() for name, array in _arrays(content).items()}, set()
        made = initial() if callable(initial) else initial
        if isinstance(made, torch.nn.Module):
            state = made.state_dict()
            return {name: t.detach().cpu().numpy() for name, t in state.items()}, {
                name for name, _ in made.named_buffers()
            }
        if isinstance(made, Mapping):
            return {str(name): np.asarray(array) for name, array in made.items()}, set()
        if isinstance(made, list | tuple):
            return {str(k): np.asarray(array) for k, array in enumerate(made)}, set()
        raise ValueError(
            f"net returns {type(made).__name__}, expected a torch module, or a list or dict of arrays"
        )

    def _evaluate(self, partition: int, partitions: int) -> tuple[float, float, float]:
        """Return the loss, the accuracy and the number of examples that the app reports. A missing loss
        or accuracy is NaN; a missing number of examples is 1."""
        content = self._request("evaluate", partition, partitions, {"server-round": 0})
        examples = _figure(content, _EXAMPLES)
        return (
            _figure(content, _LOSS),
            _figure(content, _ACCURACY),
            1.0 if math.isnan(examples) else max(examples, 1.0),
        )

    def _request(
        self, kind: str, partition: int, partitions: int, config: Mapping[str, Any]
    ) -> flower.RecordDict:
        """Send a message of the kind `kind` with the present arrays to the app, and return the content
        of the reply. Raises NotImplementedError if the app's client does not support this kind of
        message."""
        context = self._context(partition, partitions)
        reply = self._app(_message(kind, partition, self._content(kind, config)), context)
        if reply.has_error():
            raise RuntimeError(f"the ClientApp replied to {kind} with an error: {reply.error}")
        for name, record in reply.content.config_records.items():
            if name.endswith(".status") and record.get("code"):
                raise NotImplementedError(f"the ClientApp's reply to {kind}: {record.get('message')}")
        return reply.content

    def _context(self, partition: int, partitions: int) -> flower.Context:
        if partition not in self._contexts:
            node = {"partition-id": partition, "num-partitions": partitions}
            self._contexts[partition] = flower.Context(
                run_id=_RUN, node_id=partition + 2, node_config=node, state=flower.RecordDict(),
                run_config=dict(self._run_config),
            )  # fmt: skip
        return self._contexts[partition]

    def _content(self, kind: str, config: Mapping[str, Any]) -> flower.RecordDict:
        """Return the content of a message in the format of the app: the format of NumPyClient and
        Client, or the format of the message API."""
        settings = flower.ConfigRecord(dict(config))
        if kind == "get_parameters":
            return flower.RecordDict({"getparametersins.config": settings})
        arrays = flower.ArrayRecord({name: flower.Array(array) for name, array in self._present()})
        names = ("arrays", "config")
        if _has_client_fn(self._app):
            ins = {"train": "fitins", "evaluate": "evaluateins"}[kind]
            names = (f"{ins}.parameters", f"{ins}.config")
        return flower.RecordDict({names[0]: arrays, names[1]: settings})

    def _present(self) -> Iterator[tuple[str, Any]]:
        for name, (holder, last) in self._places.items():
            tensor = getattr(holder, last).detach()
            yield name, tensor.cpu().numpy().astype(self._dtypes[name])  # a copy

    def _load(self, content: flower.RecordDict) -> None:
        """Load the arrays of the app's reply. Raises ValueError if their number or shapes differ from
        the model's."""
        arrays = [array.numpy() for array in _arrays(content).values()]
        if len(arrays) != len(self._places):
            raise ValueError(
                f"the ClientApp returned {len(arrays)} arrays, expected {len(self._places)} as in the "
                "model"
            )
        with torch.no_grad():
            for (name, (holder, last)), array in zip(self._places.items(), arrays, strict=True):
                tensor = getattr(holder, last)
                if tuple(tensor.shape) != array.shape:
                    raise ValueError(
                        f"the ClientApp returned an array of shape {array.shape} for {name}, expected "
                        f"{tuple(tensor.shape)} as in the model"
                    )
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))


def client_app(candidate: Any) -> Any:
    """Return `candidate` if it is a ClientApp. If `candidate` is a function, return the ClientApp that
    the function returns. Raises ValueError if there is no ClientApp."""
    app = candidate
    if not isinstance(candidate, ClientApp) and callable(candidate) and not _required(candidate):
        app = candidate()
    if not isinstance(app, ClientApp):
        raise ValueError(
            f"app is {type(app).__name__}, expected a Flower ClientApp, or a function without "
            "arguments that returns one"
        )
    return app


def _required(function: Any) -> list[str]:
    """Return the names of the function's parameters that have no default value."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def _has_client_fn(app: Any) -> bool:
    """Whether the app was made from a client_fn and not with the message API. Flower has no public
    attribute that shows this."""
    return getattr(app, "_call", None) is not None


def _message(kind: str, partition: int, content: flower.RecordDict) -> flower.Message:
    # As in a message that Flower has received. Without metadata, Flower requires its own runtime.
    metadata = flower.Metadata(
        _RUN, "", _SERVER, partition + 2, "", "", time.time(), _LIFETIME_SECONDS, kind
    )
    return flower.Message(content=content, metadata=metadata)


def _arrays(content: flower.RecordDict) -> flower.ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"the ClientApp replied with {len(records)} records of arrays, expected one")
    return records[0]


def _figure(content: flower.RecordDict, names: tuple[str, ...]) -> float:
    """Return the reply's metric under the first of `names` that the reply has. NaN if the reply
    has none of them, or if the metric is not a number.
    """
    values: dict[str, Any] = {}
    for record in (*content.config_records.values(), *content.metric_records.values()):
        values.update(record)
    figure = next((values[name] for name in names if name in values), math.nan)
    return float(figure) if isinstance(figure, int | float) else math.nan
