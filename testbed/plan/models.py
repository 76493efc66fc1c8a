"""The model that a run begins with, and the models that a run saved, as plain state dicts.

If a topology gives `task.initial`, or if some parameters are not trained, the run directory gets
`start.safetensors`. This file has the module's whole `state_dict`. Every process of the run builds its
module from this file, so all processes have the same module. The run directory can then be read without
the file of `task.initial`.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import agents.user_code
from agents.aggregator.actions import Save
from agents.disk import files
from agents.models.flat import FlatModule, first_module, schema_hash
from agents.models.flat import write_start as write_start_of
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.wire import payloads
from testbed import user_code
from testbed.errors import BadInputError
from testbed.plan.agent_configs import initial_model
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, load
from testbed.user_code import StandIn

State = Mapping[str, torch.Tensor]

_MAX_BYTES = 2**33
_OF_RUN = {"w"}, {"w", "floats", "integers"}
"""Names of the tensors in a saved model, without buffers and with buffers."""
_NAMED = 3


def check_initial(topology: Topology) -> None:
    """Raise BadInputError if the file of `task.initial` does not fit the task's model."""
    if topology.task.initial is not None:
        _write_start(topology, None)


def write_start(topology: Topology, directory: RunDirectory) -> None:
    """Raises BadInputError if the file of `task.initial` does not fit the model."""
    with files.atomic_write(directory.start) as partial:
        _write_start(topology, str(partial.absolute()))
        partial.chmod(0o644)  # a container reads it as another user


def _write_start(topology: Topology, to: str | None) -> None:
    settings = topology.task
    task: Task = settings.build()
    with tempfile.TemporaryDirectory(prefix="testbed-initial-") as folder:
        initial = None
        if settings.initial is not None:
            initial = str(Path(folder, "initial.safetensors"))
            _save_initial(topology, Path(settings.initial), initial)
        if isinstance(task, StandIn):
            facts = {"seed": topology.seed, "frozen": settings.frozen, "initial": initial, "to": to}
            wrong = user_code.ask(task, "start", **facts)
        else:
            wrong = write_start_of(task, topology.seed, settings.frozen, initial, to)
    if wrong:
        more = f"; {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise _problem(topology, f"{settings.initial}: {'; '.join(wrong[:_NAMED])}{more}")


def _problem(topology: Topology, message: str) -> BadInputError:
    return topology.source.error([topology.source.problem(("task", "initial"), message)])


def _save_initial(topology: Topology, path: Path, to: str) -> None:
    """Write as safetensors to the file `to`. Raises BadInputError if `path` cannot be read.

    `path`: a model that a run saved, safetensors with one tensor per name, or a `torch.save` file.
    """
    try:
        save_file({name: t.contiguous() for name, t in _initial(path).items()}, to)
    except BadInputError as error:  # the error is about the run that wrote the file
        raise _problem(topology, str(error)) from error
    except Exception as error:
        raise _problem(
            topology,
            f"{path}: {_reason(error)}. Expected safetensors, or a state dict written by torch.save",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ValueError | RuntimeError | SafetensorError | pickle.UnpicklingError):
        return next(iter(str(error).splitlines()), "it cannot be read")
    return f"it cannot be read ({error!r:.80})"


def _initial(path: Path) -> State:
    if path.suffix != ".safetensors":
        return _pickled(path)
    with files.open_regular(path), safe_open(path, framework="pt") as file:
        of_run = {*file.keys()} in _OF_RUN and "schema" in (file.metadata() or {})
    return saved_state(RunDirectory(path.parent.parent), path) if of_run else load_file(path)


def _pickled(path: Path) -> State:
    """Only tensors are unpickled."""
    with files.open_regular(path) as file:
        found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ValueError("not a mapping of names to tensors: save module.state_dict()")
    if sparse := [name for name, value in found.items() if value.layout != torch.strided]:
        raise ValueError(f"{sparse[0]} is sparse: save it as a dense tensor")
    return found


def saved_model(directory: RunDirectory, version: int | None = None) -> Path:
    """`version`: None for the final model. Raises BadInputError if there is no such file."""
    path = directory.models / f"{Save(version or 0, final=version is None).name}.safetensors"
    if not path.is_file():
        names = sorted(each.stem for each in directory.models.glob("*.safetensors"))
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise BadInputError(f"{directory.run} has no model {path.stem}: {has}")
    return path


def saved_state(directory: RunDirectory, file: Path) -> dict[str, torch.Tensor]:
    """Raises BadInputError if the run or the file cannot be read, or if the task has changed since the
    run."""
    state = saved_module(directory, file).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}  # without shared storage


def run_task(topology: Topology, directory: RunDirectory) -> Task:
    """A user's own task is imported from the run's copy of the code."""
    agents.user_code.use_folder(str(directory.code) if directory.code.is_dir() else None)
    return agents.user_code.build(topology.task.named, TASKS, Task)


def saved_module(directory: RunDirectory, file: Path) -> torch.nn.Module:
    """Raises the same errors as `saved_state`."""
    if not directory.topology.is_file():
        raise BadInputError(
            f"{file} is a model of a run, but {directory.topology}, which names its task, does not "
            "exist: use the file in the run's directory, or convert it with testbed export --model"
        )
    topology = load(directory.topology)
    try:
        vector, metadata, buffers = payloads.unpack(files.read(file, _MAX_BYTES))
        start = initial_model(topology, directory)
        module = first_module(run_task(topology, directory), topology.seed, start)
        if metadata.get("schema") != schema_hash(module):
            raise ValueError(f"its parameters do not match the present code of {topology.task.name}")
        FlatModule(module, trained=False).load(vector, buffers)
        if not all(tensor.isfinite().all() for tensor in module.state_dict().values()):
            raise ValueError("it has values that are not finite")
    except (OSError, ValueError, RuntimeError, SafetensorError, payloads.WireError) as error:
        raise BadInputError(f"{file} cannot be read as a model of {directory.path}: {error}") from error
    return module
