"""The torch module of `agents.tasks.flower`, which exchanges Flower's messages with the ClientApp."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flwr.common as flower
import numpy as np
import torch
from flwr.clientapp import ClientApp

_TRAIN_LOSS = ("train_loss", "loss")
_LOSS = ("eval_loss", "loss", "val_loss", "test_loss")
_ACCURACY = ("eval_acc", "eval_accuracy", "accuracy", "acc", "val_accuracy", "test_accuracy")
_EXAMPLES = ("num-examples", "num_examples")
"""Names under which apps report four figures: training loss, loss, accuracy, number of examples; the
first one in a reply is used. Without a name for a loss or an accuracy, it is the metric whose name alone
contains the word in `_PARTS`."""
_PARTS = {"loss": "loss", "accuracy": "acc"}
"""Word in the name of a loss or an accuracy."""
_ROUND = "{round}"
"""Value in `app_config` that stands for the number of the training."""
_SECURE_MODS = frozenset({"secagg_mod", "secaggplus_mod"})
_CLIPPING_MODS = frozenset({"fixedclipping_mod", "adaptiveclipping_mod"})
_CLIPPING_NORM = "clipping_norm"
"""Key by which a strategy sends the bound of Flower's clipping mods."""
_EVALUATE = 'write evaluate: "my_app.server_app:global_evaluate", a function that evaluates the model'
_LIFETIME_SECONDS = 43_200.0
"""Lifetime of a message, Flower's default: required, but without effect here."""
_NET = 'Set net to what makes the initial model, as in net: "my_app.task:Net"'
_RUN = 1
_SERVER = 1
"""Id of the run and of the server's node in Flower's messages. The node of partition k has the id k +
2."""


class FlowerModule(torch.nn.Module):
    """The named arrays of a Flower model, and the app that trains and evaluates them.

    `evaluate`, `app_config`, `metrics` (names of loss and accuracy) and `partitions`: see
    `agents.tasks.flower.Flower`. Raises ValueError if `app` is not a ClientApp, or if the initial model
    is unknown.
    """

    def __init__(
        self,
        app: Any,
        initial: Any,
        run_config: Mapping[str, Any],
        *,
        evaluate: Any = None,
        app_config: Mapping[str, Any] | None = None,
        metrics: tuple[str | None, str | None] = (None, None),
        partitions: int | None = None,
    ) -> None:
        super().__init__()
        self._app = client_app(app)
        self._run_config = dict(run_config)
        self._evaluate_fn, self._app_config = evaluate, dict(app_config or {})
        self._metrics, self._partitions = metrics, partitions
        self._contexts: dict[int, flower.Context] = {}
        self._trainings: dict[int, int] = {}
        """Trainings that each partition has started."""
        arrays, buffers = self._initial_arrays(initial)
        self._positive = {
            name for name, array in arrays.items() if array.dtype.kind == "f" and (array > 0).all()
        } - buffers
        """Parameters whose values were all above 0 in the initial model and in all replies."""
        self._places: dict[str, tuple[torch.nn.Module, str]] = {}
        """Submodule of each array, and its name there, in Flower's order."""
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
        """Loss and accuracy of each partition, shape (n, 2), scaled by its number of examples, so that
        the mean over partitions is that over all examples. A row of `partitions`, shape (n, 2): index of
        a partition, and total number."""
        if self._evaluate_fn is None:
            rows = [self._evaluate(int(k), int(count)) for k, count in partitions.tolist()]
        else:
            rows = [self._evaluate_globally()] * len(partitions)
        results = torch.tensor(rows, dtype=torch.float64)
        reported, examples = results[:, :2], results[:, 2:]
        if not examples.any():
            return reported
        # A partition without examples may report a loss of NaN.
        return torch.where(examples > 0, reported * (examples / examples.mean()), 0.0)

    def fit(self, partition: int, partitions: int, lr: float) -> float:
        """Let the app train the arrays in place. Return the loss that it reports; NaN if it reports
        none."""
        number = self._trainings[partition] = self._trainings.get(partition, 0) + 1
        self._report_negative()
        content = self._request("train", partition, partitions, {"lr": lr, **self._config(number)})
        self._load(content)
        values = _numbers(content)
        name = next((name for name in _TRAIN_LOSS if name in values), None)
        name = name or _only(values, "train", "loss") or _only(values, "loss")
        return math.nan if name is None else values[name]

    def _report_negative(self) -> None:
        """Print which arrays have values below 0 for the first time, because the rule has made them so:
        a variance cannot have them."""
        wrong = sorted(
            name for name, array in self._present() if name in self._positive and (array < 0).any()
        )
        self._positive -= {*wrong}
        if wrong:
            sys.stderr.write(
                f"flower: the rule has made values of {', '.join(wrong)} negative, which were above 0 "
                "in all models of the app. If they are statistics, such as variances, they must not be "
                f"summed like parameters. {_NET}, with a torch module whose buffers they are\n"
            )

    def _initial_arrays(self, initial: Any) -> tuple[dict[str, Any], set[str]]:
        """Arrays by name, and the names of those that are buffers."""
        if initial is None:
            if not _has_client_fn(self._app):
                raise ValueError(
                    f"net is missing: an app of the message API provides no initial model. {_NET}"
                )
            try:
                content = self._request("get_parameters", 0, self._partitions or 1, {})
            except NotImplementedError as error:
                raise ValueError(
                    f"net is missing, and the client has no get_parameters. {_NET}"
                ) from error
            self._contexts.clear()  # the number of partitions may be unknown here
            found = {name: array.numpy() for name, array in _arrays(content).items()}
            return found, _statistics(found)
        made = initial
        if callable(initial):
            made = initial(dict(self._run_config)) if len(_required(initial)) == 1 else initial()
        if isinstance(made, torch.nn.Module):
            state = made.state_dict()
            return {name: t.detach().cpu().numpy() for name, t in state.items()}, {
                name for name, _ in made.named_buffers()
            }
        if isinstance(made, Mapping):
            found = {str(name): np.asarray(array) for name, array in made.items()}
            return found, _statistics(found)
        if isinstance(made, list | tuple):
            found = {str(k): np.asarray(array) for k, array in enumerate(made)}
            return found, _statistics(found)
        raise ValueError(
            f"net returns {type(made).__name__}, expected a torch module, or a list or dict of arrays"
        )

    def _evaluate(self, partition: int, partitions: int) -> tuple[float, float, float]:
        """Loss, accuracy and number of examples that the app reports. A missing loss is 1 − accuracy, a
        missing accuracy NaN, a missing number of examples 1."""
        try:
            content = self._request("evaluate", partition, partitions, self._config(0))
        except NotImplementedError as error:
            raise ValueError(f"the client has no evaluate: add one, or {_EVALUATE}") from error
        values = _numbers(content)
        examples = next((values[name] for name in _EXAMPLES if name in values), 1.0)
        if not 0 <= examples < math.inf:
            raise ValueError(f"the app reports {examples:g} examples, expected a number from 0 on")
        return (*self._loss_and_accuracy(values), examples)

    def _evaluate_globally(self) -> tuple[float, float, float]:
        """Loss and accuracy of the function `evaluate`, and 1 as the number of examples."""
        required = len(_required(self._evaluate_fn))
        if required == 2:
            record = flower.ArrayRecord({name: flower.Array(array) for name, array in self._present()})
            reported = self._evaluate_fn(0, record)
        else:
            reported = self._evaluate_fn(0, [array for _, array in self._present()], self._config(0))
        values: dict[str, float] = {}
        if isinstance(reported, tuple) and len(reported) == 2 and isinstance(reported[1], Mapping):
            values[_LOSS[0]], reported = float(reported[0]), reported[1]
        if not isinstance(reported, Mapping):
            raise ValueError(
                f"evaluate returns {type(reported).__name__}, expected a MetricRecord, or the loss and "
                "a dict of metrics"
            )
        return (*self._loss_and_accuracy(_only_numbers(reported) | values), 1.0)

    def _loss_and_accuracy(self, values: Mapping[str, float]) -> tuple[float, float]:
        """A missing accuracy is NaN, a missing loss is 1 − accuracy. Raises ValueError if several
        metrics may be the loss or the accuracy."""
        named_loss, named_accuracy = self._metrics
        loss = _find("loss", named_loss, _LOSS, values)
        accuracy = _find("accuracy", named_accuracy, _ACCURACY, values)
        accuracy = math.nan if accuracy is None else accuracy
        if not (math.isnan(accuracy) or 0 <= accuracy <= 1):
            raise ValueError(
                f"the app reports the accuracy {accuracy:g}, expected a share from 0 to 1: divide it by "
                "100, or name another metric, as in accuracy_metric: NAME"
            )
        return 1 - accuracy if loss is None else loss, accuracy

    def _config(self, number: int) -> dict[str, Any]:
        """Number of the training under the names that apps use, and `app_config`. `number`: 0 for an
        evaluation."""
        numbers = dict.fromkeys(("server-round", "server_round", "current_round"), number)
        own = {key: number if value == _ROUND else value for key, value in self._app_config.items()}
        return numbers | own

    def _request(
        self, kind: str, partition: int, partitions: int, config: Mapping[str, Any]
    ) -> flower.RecordDict:
        """Send a message with the present arrays; return the reply. Raises NotImplementedError if the
        app's client does not support this kind."""
        context = self._context(partition, partitions)
        try:
            reply = self._app(_message(kind, partition, self._content(kind, config)), context)
        except KeyError as error:
            key = next(iter(error.args), None)
            if isinstance(key, str) and sys.version_info >= (3, 11):  # older ones have no notes
                error.add_note(
                    f"If a strategy sends {key} in its config, write app_config: {key}=VALUE; if it "
                    "belongs to the run config, write it in run_config"
                )
            raise
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
        """In the format of NumPyClient and Client, or of the message API."""
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
        record = _arrays(content)
        names = [*self._places] if set(record) == set(self._places) else [*record]
        arrays = [record[name].numpy() for name in names]
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
                if name in self._positive and not (array > 0).all():
                    self._positive.discard(name)
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))


def _statistics(arrays: Mapping[str, Any]) -> set[str]:
    """BatchNorm's running means and variances among arrays without a torch module: a single whole
    number, the count of batches, follows the two in the order of a module's state."""
    names = list(arrays)
    found: set[str] = set()
    for mean, variance, count in zip(names, names[1:], names[2:], strict=False):
        a, b, c = arrays[mean], arrays[variance], arrays[count]
        is_count = (c.ndim, c.dtype.kind, a.dtype.kind, b.dtype.kind) == (0, "i", "f", "f")
        if is_count and a.ndim == 1 and a.shape == b.shape and (b >= 0).all():
            found |= {mean, variance}
    return found


def client_app(candidate: Any) -> Any:
    """`candidate`, or what it returns if it is a function. Raises ValueError if that is no ClientApp."""
    app = candidate
    if not isinstance(candidate, ClientApp) and callable(candidate) and not _required(candidate):
        app = candidate()
    if not isinstance(app, ClientApp):
        raise ValueError(
            f"app is {type(app).__name__}, expected a Flower ClientApp, or a function without "
            "arguments that returns one"
        )
    return app


def check_app(candidate: Any, evaluate: Any, app_config: Mapping[str, Any]) -> None:
    """Raise ValueError if `candidate` is not a ClientApp that trains, that can be evaluated, and that
    does without Flower's server. `evaluate`: function that evaluates the global model; None if the app
    does. `app_config`: sent with each message."""
    app = client_app(candidate)
    mods = {str(getattr(mod, "__name__", "")) for mod in getattr(app, "_mods", ())}
    for mod in sorted(mods & _SECURE_MODS):
        raise ValueError(
            f"app has the mod {mod}, whose other half is Flower's server: remove the mod; for secure "
            "aggregation here, add privacy: {secure: ...} to the topology (docs/guide/privacy.md)"
        )
    for mod in sorted(mods & _CLIPPING_MODS):
        if _CLIPPING_NORM not in app_config:
            raise ValueError(
                f"app has the mod {mod}, which needs the bound that a strategy sends: write app_config: "
                f"{_CLIPPING_NORM}=10.0, or remove the mod and write local: {{clip: 10}}"
            )
    if evaluate is not None and not (callable(evaluate) and len(_required(evaluate)) in (2, 3)):
        raise ValueError(
            f"evaluate is {evaluate!r:.80}, expected a function of (server_round, arrays), or of "
            "(server_round, parameters, config)"
        )
    if _has_client_fn(app):
        return
    functions = getattr(app, "_registered_funcs", {})
    if "train.default" not in functions:
        found = ", ".join(functions) or "none"
        raise ValueError(
            f"app has no function @app.train(), which devices need for training: add it (found: {found})"
        )
    if evaluate is None and "evaluate.default" not in functions:
        raise ValueError(f"app has no function @app.evaluate(): add one, or {_EVALUATE}")


def _required(function: Any) -> list[str]:
    """Parameters that have no default value."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def _has_client_fn(app: Any) -> bool:
    """The app was made from a client_fn, not with the message API. Flower has no public attribute that
    shows this."""
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


def _numbers(content: flower.RecordDict) -> dict[str, float]:
    """Metrics of a reply that are single numbers."""
    values: dict[str, float] = {}
    for record in (*content.config_records.values(), *content.metric_records.values()):
        values |= _only_numbers(record)
    return values


def _only_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _only(values: Iterable[str], *parts: str) -> str | None:
    """The only one that contains all `parts`; None if there is none, or several."""
    found = [name for name in values if all(part in name.lower() for part in parts)]
    return found[0] if len(found) == 1 else None


def _find(
    what: Literal["loss", "accuracy"],
    named: str | None,
    usual: Sequence[str],
    values: Mapping[str, float],
) -> float | None:
    """The loss or accuracy in `values`; None if there is none. `named`: by the topology. `usual`: by
    apps. Raises ValueError if `named` is missing, or several metrics may be it."""
    there = ", ".join(values) or "none"
    if named is not None:
        if named in values:
            return values[named]
        raise ValueError(f"the app reports no {named}, which {what}_metric names; its numbers: {there}")
    if name := next((name for name in usual if name in values), None):
        return values[name]
    part = _PARTS[what]
    if name := _only(values, part):
        return values[name]
    if several := [name for name in values if part in name.lower()]:
        raise ValueError(
            f"the app reports {', '.join(several)}: say which is the {what}, as in {what}_metric: "
            f"{several[0]}"
        )
    return None
