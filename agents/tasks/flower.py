"""A Flower ClientApp as the client, unchanged (docs/guide/flower.md): own code, of Flower's making."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agents import user_code
from agents.shards import Shard
from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PAIR = re.compile(r"[^\s=]+=(?:'[^']*'|\"[^\"]*\"|\S+)")


@dataclass(frozen=True)
class Flower(Task):
    """A Flower ClientApp trains and evaluates, on the data that it loads for its partition: the k-th
    device of the topology, counted from 0, is partition k. A training is one step, whatever the app
    does in it."""

    dataset: ClassVar[None] = None
    fits: ClassVar[bool] = True

    app: str
    """`module:name` of the ClientApp, or of a function without arguments that returns it."""
    net: str | None = None
    """`module:name` of a class or a function without arguments that returns the initial model: a torch
    module, or a list or dict of NumPy arrays; None: what partition 0's NumPyClient has as parameters."""
    run_config: str = ""
    """As for `flwr run --run-config`: `lr=0.1 local-epochs=2`. It goes before what a pyproject.toml in
    the code has under `[tool.flwr.app.config]`."""

    def __post_init__(self) -> None:
        for key, name in self._references().items():
            if not _REFERENCE.fullmatch(name):
                raise ValueError(
                    f"{key} is {name!r}, expected module:name such as my_app.client_app:app"
                )
        _pairs(self.run_config)

    def check(self, clients: int) -> None:
        """Raise ValueError where Flower is not installed, or `app` or `net` is no such thing."""
        if importlib.util.find_spec("flwr") is None:
            raise ValueError(
                "app needs Flower, which is not installed here: python -m pip install flwr, and name it "
                "under requirements"
            )
        from agents.tasks.flower_module import client_app

        found = {key: _found(key, name) for key, name in self._references().items()}
        client_app(found["app"])

    def shards_for(self, clients: int) -> Sequence[Shard]:
        """Shard k has the one sample (k, clients): the partition, and how many there are."""
        label = np.zeros(1, np.int64)
        return [Shard(np.array([[k, clients]], np.float32), label) for k in range(clients)]

    def model(self) -> torch.nn.Module:
        """The arrays of Flower's model: floating ones as parameters, but for a torch module's buffers.
        Called with partitions, as `shards_for` has them, it has the app evaluate them."""
        from agents.tasks.flower_module import FlowerModule

        found = {key: _found(key, name) for key, name in self._references().items()}
        return FlowerModule(found["app"], found.get("net"), self._run_config())

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What the app's evaluation says, weighted so that the mean is that over all examples."""
        return outputs[:, 0]

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """The accuracy of each partition, weighted likewise; NaN where the app gives none."""
        return outputs[:, 1]

    def fit(self, module: torch.nn.Module, shard: Shard, lr: float) -> float:
        """Have the app train the arrays of `module` on the partition; its loss, or NaN."""
        return float(module.fit(int(shard.x[0, 0]), int(shard.x[0, 1]), lr))  # type: ignore[operator]

    def _references(self) -> dict[str, str]:
        """What is named of the code, by parameter."""
        return {"app": self.app} | ({} if self.net is None else {"net": self.net})

    def _run_config(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        folder = user_code.folder()
        if folder is not None and (project := Path(folder, "pyproject.toml")).is_file():
            tools = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
            found |= _flat(tools.get("flwr", {}).get("app", {}).get("config", {}))
        return found | _pairs(self.run_config)


def _found(key: str, reference: str) -> Any:
    """What the parameter `key` names of own code. Raises ValueError where there is no such thing."""
    try:
        return user_code.load_attribute(reference)
    except LookupError as error:
        if user_code.is_from_user_code(error):
            raise
        raise ValueError(f"{key}: {error}") from error


def _pairs(text: str) -> dict[str, Any]:
    """`lr=0.1 name='x'` as a dict. Raises ValueError."""
    if _PAIR.sub("", text).strip():
        raise ValueError(f"run_config is {text!r}, expected key=value pairs such as lr=0.1 epochs=2")
    lines = (pair.partition("=") for pair in _PAIR.findall(text))
    try:
        return _flat(tomllib.loads("\n".join(f'"{key}" = {value}' for key, _, value in lines)))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"run_config is {text!r}, expected values as in TOML, such as lr=0.1 name='x' ({error})"
        ) from error


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """With the keys of inner tables joined by dots, as Flower has them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return flat
