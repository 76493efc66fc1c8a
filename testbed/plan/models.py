"""The model that a run begins with, and the models that one has kept, as plain state dicts.

Where a topology gives `task.initial`, or some parameters do not train, the run directory gets
`start.safetensors`: the module's whole state by name. Every process of the run builds its module from
it, so that all have the same, and the directory needs no other file to be understood.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import agents.own_code
from agents.aggregator.actions import Save
from agents.disk import files
from agents.models.flat import FlatModule, first_module, schema_hash
from agents.models.flat import write_start as write_start_of
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.wire import payloads
from testbed.errors import BadInputError
from testbed.own_code import stand_ins
from testbed.own_code.stand_ins import StandIn
from testbed.plan.agent_configs import start_of
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, load

State = Mapping[str, torch.Tensor]

_MAX_BYTES = 2**33
_OF_RUN = {"w"}, {"w", "floats", "integers"}
"""Names in a file of a model that a run has kept; with buffers."""
_NAMED = 3
"""Of many differences, so many are told."""


def check_initial(topology: Topology) -> None:
    """Raise BadInputError, at `task.initial`, where that file does not fit the task's model."""
    if topology.task.initial is not None:
        _write_start(topology, None)


def write_start(topology: Topology, directory: RunDirectory) -> None:
    """Write the state that the run begins with. Raises BadInputError as `check_initial`."""
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
            wrong = stand_ins.ask(task, "start", **facts)
        else:
            wrong = write_start_of(task, topology.seed, settings.frozen, initial, to)
    if wrong:
        more = f"; {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise _problem(topology, f"{settings.initial}: {'; '.join(wrong[:_NAMED])}{more}")


def _problem(topology: Topology, message: str) -> BadInputError:
    return topology.source.error([topology.source.problem(("task", "initial"), message)])


def _save_initial(topology: Topology, path: Path, to: str) -> None:
    """Save the state in a file, a model that a run has kept or a state dict by name, as safetensors.
    Raises BadInputError."""
    try:
        save_file({name: t.contiguous() for name, t in _initial(path).items()}, to)
    except BadInputError as error:  # of the run that it is from
        raise _problem(topology, str(error)) from error
    except Exception as error:
        raise _problem(
            topology,
            f"{path}: {_reason(error)}. Expected safetensors, or a state dict that torch.save wrote",
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
    return state_of(RunDirectory(path.parent.parent), path) if of_run else load_file(path)


def _pickled(path: Path) -> State:
    """A state dict that `torch.save` wrote; nothing but tensors is unpickled."""
    with files.open_regular(path) as file:
        found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ValueError("no map of names to tensors: save module.state_dict()")
    if sparse := [name for name, value in found.items() if value.layout != torch.strided]:
        raise ValueError(f"{sparse[0]} is sparse: save it as a dense tensor")
    return found


def kept(directory: RunDirectory, version: int | None = None) -> Path:
    """The file of a model that the run has kept; the final one by default. Raises BadInputError."""
    path = directory.models / f"{Save(version or 0, final=version is None).name}.safetensors"
    if not path.is_file():
        names = sorted(each.stem for each in directory.models.glob("*.safetensors"))
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise BadInputError(f"{directory.run} has no model {path.stem}: {has}")
    return path


def state_of(directory: RunDirectory, file: Path) -> dict[str, torch.Tensor]:
    """The state dict of a model that the run in `directory` has kept in `file`.

    Raises BadInputError where one of both cannot be read, or the task is another now.
    """
    state = module_of(directory, file).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}  # each with a storage of its own


def task_of(topology: Topology, directory: RunDirectory) -> Task:
    """The task of a run; a user's own is imported from the run's copy of the code."""
    agents.own_code.use_folder(str(directory.code) if directory.code.is_dir() else None)
    return agents.own_code.build(topology.task.named, TASKS, Task)


def module_of(directory: RunDirectory, file: Path) -> torch.nn.Module:
    """The module with a model that the run has kept; raises as `state_of`."""
    if not directory.topology.is_file():
        raise BadInputError(
            f"{file} is a model of a run, and {directory.topology}, which says of which task, is not "
            "there: take it where the run left it, or save it by name (testbed export --model)"
        )
    topology = load(directory.topology)
    try:
        vector, metadata, buffers = payloads.unpack(files.read(file, _MAX_BYTES))
        start = start_of(topology, directory)
        module = first_module(task_of(topology, directory), topology.seed, start)
        if metadata.get("schema") != schema_hash(module):
            raise ValueError(f"its parameters are not those of {topology.task.name}, as that is now")
        FlatModule(module, trained=False).load(vector, buffers)
    except (OSError, ValueError, RuntimeError, SafetensorError, payloads.WireError) as error:
        raise BadInputError(f"{file} cannot be read as a model of {directory.path}: {error}") from error
    return module
