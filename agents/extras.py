"""Optional packages, and the extra of the testbed's package that installs each."""

from __future__ import annotations

import importlib.util
import sys

EXTRAS = {
    "amqtt": "broker",
    "datasets": "datasets",
    "distributed": "dask",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "flwr_datasets": "datasets",
    "huggingface_hub": "datasets",
    "mlflow": "mlflow",
    "peft": "bert",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "transformers": "bert",
    "wandb": "wandb",
}
"""Package as it is imported -> extra, as in `edge-fl-testbed[bert]`."""


def install_command(package: str) -> str:
    return f"{sys.executable} -m pip install 'edge-fl-testbed[{EXTRAS[package]}]'"


def missing(package: str) -> str | None:
    """Return what is missing and the command that installs it; None if `package` is installed."""
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: run {install_command(package)}"
