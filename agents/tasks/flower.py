"""The task `flower`: an unchanged Flower ClientApp as the client (docs/guide/flower.md)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agents import extras, user_code
from agents.config import Count
from agents.shards import Shard
from agents.tasks.interface import Task

if sys.version_info >= (3, 11):
    import tomllib
else:  # Flower requires it there
    import tomli as tomllib

if TYPE_CHECKING:
    import torch

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PAIR = re.compile(r"[^\s=]+=(?:'[^']*'|\"[^\"]*\"|\S+)")


@dataclass(frozen=True)
class Flower(Task):
    """Training and evaluation by a Flower ClientApp, which loads the data of a partition itself. Device
    k of the topology, counted from 0, has partition k. One training of the app counts as one local
    step."""

    dataset: ClassVar[None] = None
    fits: ClassVar[bool] = True
    needs_whole_set: ClassVar[bool] = True  # weights are relative to the mean of a batch

    app: str
    """`module:name` of the ClientApp, or of a function without arguments that returns the ClientApp."""
    net: str | None = None
    """`module:name` of a class or a function that returns the initial model: a torch module, or a list
    or dict of NumPy arrays. It is called with the app's run_config if it requires one argument,
    otherwise without arguments. None if the model consists of the parameters of partition 0's
    NumPyClient."""
    run_config: str = ""
    """Configuration of the app, in the format of `flwr run --run-config`, such as `lr=0.1
    local-epochs=2`. These values override `[tool.flwr.app.config]` in the code's pyproject.toml."""
    evaluate: str | None = None
    """`module:name` of a function that evaluates the global model once, as Flower's `evaluate_fn` does:
    `f(server_round, arrays)` returns a MetricRecord, and `f(server_round, parameters, config)` returns
    the loss and a dict. None if the app evaluates every partition."""
    app_config: str = ""
    """Config that a strategy would send with each message, as key=value pairs such as `proximal-mu=0.1`.
    The value '{round}' is replaced by the number of the device's training, counted from 1."""
    loss_metric: str | None = None
    """Name of the metric that is the loss of an evaluation; None to use the metric with a common name,
    such as `eval_loss`."""
    accuracy_metric: str | None = None
    """Name of the metric that is the accuracy of an evaluation, a share from 0 to 1; None to use the
    metric with a common name, such as `accuracy`."""
    partitions: Count | None = None
    """Number of partitions that the app divides its data into, at least the number of devices; None for
    the number of devices."""

    def __post_init__(self) -> None:
        for key, name in self._references().items():
            if not _REFERENCE.fullmatch(name):
                raise ValueError(
                    f"{key} is {name!r}, expected module:name such as my_app.client_app:app"
                )
        _pairs("run_config", self.run_config)
        _pairs("app_config", self.app_config)

    def check(self, clients: int) -> None:
        """Raise ValueError if Flower is not installed, `app` is not a ClientApp that trains and can be
        evaluated, `net` or `evaluate` do not exist, or there are too few partitions."""
        if message := extras.missing("flwr"):
            raise ValueError(f"app needs Flower. {message}, and add flwr to requirements")
        if self.partitions is not None and self.partitions < clients:
            raise ValueError(
                f"partitions is {self.partitions}, expected at least {clients}, one for each device"
            )
        from agents.tasks.flower_module import check_app

        objects = {key: _load_object(key, name) for key, name in self._references().items()}
        check_app(objects["app"], objects.get("evaluate"), _pairs("app_config", self.app_config))

    def shards_for(self, clients: int) -> Sequence[Shard]:
        """Return one shard per client. Shard k has one sample: (k, clients), the partition's number and
        the number of partitions."""
        label, count = np.zeros(1, np.int64), self.partitions or clients
        return [Shard(np.array([[k, count]], np.float32), label) for k in range(clients)]

    def model(self) -> torch.nn.Module:
        """Return a module with the arrays of Flower's model: floating-point arrays are parameters,
        unless they are buffers of a torch module. A call of the module with samples of `shards_for`
        evaluates their partitions with the app."""
        from agents.tasks.flower_module import FlowerModule

        objects = {key: _load_object(key, name) for key, name in self._references().items()}
        return FlowerModule(
            objects["app"],
            objects.get("net"),
            self._run_config(),
            evaluate=objects.get("evaluate"),
            app_config=_pairs("app_config", self.app_config),
            metrics=(self.loss_metric, self.accuracy_metric),
            partitions=self.partitions,
        )

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss that the app reports for each partition, scaled so that the mean over
        partitions is the mean over all examples. If the app reports an accuracy and no loss, the loss is
        1 − accuracy. If the app reports neither, the loss is NaN."""
        return outputs[:, 0]

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Return the accuracy that the app reports for each partition, scaled so that the mean over
        partitions is the mean over all examples. The result is NaN if the app reports no accuracy."""
        return outputs[:, 1]

    def fit(self, module: torch.nn.Module, shard: Shard, lr: float) -> float:
        """Let the app train the arrays of `module` on the partition of `shard`. Return the loss that the
        app reports; NaN if it reports no loss."""
        return float(module.fit(int(shard.x[0, 0]), int(shard.x[0, 1]), lr))  # type: ignore[operator]

    def _references(self) -> dict[str, str]:
        """Return the references to user code, by the names of the parameters that contain them."""
        named = {"app": self.app, "net": self.net, "evaluate": self.evaluate}
        return {key: name for key, name in named.items() if name is not None}

    def _run_config(self) -> dict[str, Any]:
        """Return the app's configuration: the values of pyproject.toml, overridden by the values of
        `run_config`."""
        config: dict[str, Any] = {}
        folder = user_code.folder()
        if folder is not None and (project := Path(folder, "pyproject.toml")).is_file():
            tools = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
            config |= _flat(tools.get("flwr", {}).get("app", {}).get("config", {}))
        return config | _pairs("run_config", self.run_config)


def _load_object(key: str, reference: str) -> Any:
    """Return the object of user code that the parameter `key` refers to. Raises ValueError if there is
    no such object."""
    try:
        return user_code.load_attribute(reference)
    except LookupError as error:
        if user_code.is_from_user_code(error):
            raise
        raise ValueError(f"{key}: {error}") from error


def _pairs(parameter: str, text: str) -> dict[str, Any]:
    """Convert key=value pairs such as `lr=0.1 name='x'` to a dict. `text` is the value of `parameter`.
    Raises ValueError if the text is invalid."""
    if _PAIR.sub("", text).strip():
        raise ValueError(f"{parameter} is {text!r}, expected key=value pairs such as lr=0.1 epochs=2")
    lines = (pair.partition("=") for pair in _PAIR.findall(text))
    try:
        return _flat(tomllib.loads("\n".join(f'"{key}" = {value}' for key, _, value in lines)))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{parameter} is {text!r}, expected TOML values such as lr=0.1 name='x' ({error})"
        ) from error


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested tables: join their keys with dots, as Flower does."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return flat
