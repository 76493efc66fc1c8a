"""Adapters of the conformance kit for rules of Flower, APPFL and FLGo, whose own code aggregates."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from fl_conformance import ClientUpdate, Setting

_MODULE_KEY = "weight"


def _take(setting: Setting, rule: str, *variants: str) -> None:
    """Raise NotImplementedError for another rule, or for a parameter that the framework lacks."""
    if setting.rule != rule:
        raise NotImplementedError(f"this adapter has {rule} only")
    if other := [key for key in setting.parameters if key not in variants]:
        raise NotImplementedError(f"the framework has no {other[0]}")


class _Presence:
    """Ignores updates of absent clients and repeated ones, as a framework's transport does."""

    def begin(self, setting: Setting) -> None:
        self.present, self.seen = set(setting.present), set[int]()

    def is_valid(self, update: ClientUpdate) -> bool:
        """Return whether the framework would hand the update to its aggregator."""
        valid = update.client in self.present and update.dispatch not in self.seen
        self.seen.add(update.dispatch)
        return valid

    def join(self, client: str, at: float) -> None:
        self.present.add(client)

    def leave(self, client: str, at: float, memory: object = None) -> None:
        self.present.discard(client)


class FlowerFedAvg(_Presence):
    """`flwr.serverapp.strategy.FedAvg`: the weights are its `num-examples`, which here are p_i."""

    def start(self, setting: Setting) -> None:
        _take(setting, "fedavg")
        if any(name in setting.parameters for name in ("sample", "round_timeout")):
            raise NotImplementedError("rounds of all clients only")
        self.begin(setting)
        self.app = import_module("flwr.app")
        self.strategy = import_module("flwr.serverapp.strategy").FedAvg()
        self.importance = {name: client.importance for name, client in setting.clients.items()}
        self.w: Any = setting.model
        self.waiting, self.replies = set(setting.present), list[Any]()

    def receive(self, update: ClientUpdate) -> None:
        if not self.is_valid(update):
            return
        metrics = self.app.MetricRecord({"num-examples": self.importance[update.client]})
        arrays = self.app.ArrayRecord([update.trained])
        content = self.app.RecordDict({"arrays": arrays, "metrics": metrics})
        self.replies.append(SimpleNamespace(content=content, has_error=lambda: False))
        self.waiting.discard(update.client)
        self._end_round()

    def leave(self, client: str, at: float, memory: object = None) -> None:
        super().leave(client, at, memory)
        self.waiting.discard(client)
        self._end_round()

    def _end_round(self) -> None:
        if not self.waiting and self.replies:
            arrays, _ = self.strategy.aggregate_train(1, self.replies)
            self.w = arrays.to_numpy_ndarrays()[0]
            self.replies, self.waiting = [], set(self.present)

    def model(self, at: float, client: str | None = None) -> Any:
        return self.w


class _Appfl(_Presence):
    """An aggregator of APPFL, with `num_clients: 1`, which makes its own factor 1/N equal to 1."""

    def begin_aggregator(self, setting: Setting, name: str, **options: Any) -> None:
        """Make the framework's aggregator `name`."""
        self.begin(setting)
        self.torch = import_module("torch")
        config = import_module("omegaconf").DictConfig({"num_clients": 1, **options})
        model = self.torch.nn.Linear(len(setting.model), 1, bias=False, dtype=self.torch.float64)
        model.weight.data[:] = self.torch.tensor(setting.model)
        self.aggregator = getattr(import_module("appfl.algorithm.aggregator"), name)(model, config)

    def receive(self, update: ClientUpdate) -> None:
        if self.is_valid(update):
            local = {_MODULE_KEY: self.torch.tensor(np.array([update.trained]))}
            self.aggregator.aggregate(update.client, local)

    def model(self, at: float, client: str | None = None) -> Any:
        return self.aggregator.get_parameters(client)[_MODULE_KEY][0].numpy()


class AppflFedAsync(_Appfl):
    def start(self, setting: Setting) -> None:
        _take(setting, "fedasync", "mixing", "staleness", "a", "b")
        name = setting.parameters.get("staleness", "polynomial")
        defaults = {"a": 0.5} if name == "polynomial" else {}
        given = {key: setting.parameters[key] for key in ("a", "b") if key in setting.parameters}
        alpha = setting.parameters.get("mixing", 0.6)
        arguments = {"staleness_fn": name, "staleness_fn_kwargs": defaults | given}
        self.begin_aggregator(setting, "FedAsyncAggregator", alpha=alpha, **arguments)


class AppflFedBuff(_Appfl):
    def start(self, setting: Setting) -> None:
        _take(setting, "fedbuff", "buffer_size", "server_lr", "staleness", "reply")
        size, lr = setting.parameters["buffer_size"], setting.parameters.get("server_lr", 1.0)
        discount = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
        options = discount if "staleness" in setting.parameters else {}
        self.begin_aggregator(setting, "FedBuffAggregator", K=size, alpha=lr / size, **options)


def _flgo_model(length: int) -> Any:
    """Return a class of FLGo models with one parameter vector of this length."""
    module, torch = import_module("flgo.utils.fmodule").FModule, import_module("torch")

    def create(self: Any) -> None:
        module.__init__(self)
        self.weight = torch.nn.Parameter(torch.zeros(length))

    return type("Model", (module,), {"__init__": create})


class _Flgo(_Presence):
    """A server of FLGo, whose `package_handler` is called with one update at a time."""

    def begin_server(self, setting: Setting, module: str, **options: Any) -> None:
        """Make the framework's server, without its clients and data."""
        self.begin(setting)
        code = import_module(f"flgo.algorithm.{module}")
        self.make = _flgo_model(len(setting.model))
        self.server = code.Server.__new__(code.Server)
        vars(self.server).update(options, model=self._filled(setting.model), current_round=0, buffer=[])
        self.server.aggregate = lambda models: models[0]  # the mean of one model

    def _filled(self, vector: Any, version: int = 0) -> Any:
        model = self.make()
        model.weight.data[:] = model.weight.new_tensor(vector)
        model._round = version
        return model

    def receive(self, update: ClientUpdate) -> None:
        if not self.is_valid(update):
            return
        vector = update.trained if update.kind == "model" else update.vector
        package = {"model": [self._filled(vector, update.base_version)], "__cid": [update.client]}
        self.server.current_round += bool(self.server.package_handler(package))

    def model(self, at: float, client: str | None = None) -> Any:
        return self.server.model.weight.detach().numpy()


class FlgoFedAsync(_Flgo):
    def start(self, setting: Setting) -> None:
        _take(setting, "fedasync", "mixing", "staleness", "a", "b")
        given = setting.parameters
        flag = {"polynomial": "poly"}.get(given.get("staleness", "polynomial"), given.get("staleness"))
        options = {"flag": flag, "alpha": given.get("mixing", 0.6), "poly_a": 0.5}
        self.begin_server(setting, "fedasync", hinge_a=given.get("a"), hinge_b=given.get("b"), **options)


class FlgoFedBuff(_Flgo):
    def start(self, setting: Setting) -> None:
        _take(setting, "fedbuff", "buffer_size", "server_lr", "staleness", "reply")
        if "staleness" not in setting.parameters:
            raise NotImplementedError("the framework always discounts")
        ratio = setting.parameters["buffer_size"] / len(setting.clients) + 1e-9
        options = {"buffer_ratio": ratio, "num_clients": len(setting.clients)}
        self.begin_server(setting, "fedbuff", eta=setting.parameters.get("server_lr", 1.0), **options)
