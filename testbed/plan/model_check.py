"""Check of a task's model before anything is launched, and the work of its training step."""

from __future__ import annotations

import functools
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents import shards
from agents.config import InitialModel, LocalTraining
from agents.pipeline.differential import rounding_growth
from agents.shards import Shard, model_inputs
from agents.tasks.interface import Task, unfit_classes, unfit_inputs
from agents.texts import name_list, quantity
from testbed import user_code
from testbed.data.datasets import DATASETS
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError
from testbed.host import cache
from testbed.speed import KINDS, Work
from testbed.topology import Topology
from testbed.user_code import StandIn, TaskStandIn

if TYPE_CHECKING:
    import torch

# Check of a task's model before anything is launched: whether the model can be exchanged, and how large
# it is.
#
# Building a model needs PyTorch, and importing PyTorch takes a second. So the result is cached if the
# model passes the check. The cached result is used only for the same source files, parameters and
# version of PyTorch.

_TRIED = 64
"""Maximum number of samples in a trial step, and maximum number of further samples that are added so
that every label occurs."""


def check(topology: Topology) -> int:
    """Return the number of the model's parameters that are trained and sent, buffers included.

    Raises BadInputError if the parameters are not float32, if the model has other state that changes, if
    the topology has privacy settings and the model has buffers, or if a user's task names an unknown
    dataset.
    """
    count, _, buffers = _counts(topology)
    if buffers and topology.privacy is not None:
        message = (
            f"the model of {topology.task.name} has buffers, such as BatchNorm's, which would be sent "
            "without protection: use a model without buffers, or remove this"
        )
        raise topology.source.error([topology.source.problem(("privacy",), message, at_key=True)])
    _check_rounding(topology, count)
    return count


def _check_rounding(topology: Topology, size: int) -> None:
    """Raise BadInputError if rounding may lengthen an update by more than half of the clipping bound.

    With differential privacy at the server, the server's noise must hide the additional length, too.
    """
    secure, differential = topology.secure, topology.differential
    if secure is None or differential is None or differential.at != "server":
        return
    most = rounding_growth(secure.grid.step, size)
    if most > differential.clip / 2:
        message = (
            f"rounding may make an update of {size:,} parameters longer by {most:.2g}, which is more "
            f"than half of clip ({differential.clip:g}): raise bits, or lower range"
        )
        raise topology.source.error([topology.source.problem(("privacy", "secure", "bits"), message)])


def buffers(topology: Topology) -> int:
    """Number of values; the result of `check` includes it. Raises the same errors as `check`."""
    return _counts(topology)[2]


def has_frozen_parameters(topology: Topology) -> bool:
    """Raises the same errors as `check`."""
    return _counts(topology)[1] > 0


def _counts(topology: Topology) -> tuple[int, int, int]:
    """Numbers of parameters that are trained and sent (buffers included), of other parameters, and of
    values in buffers."""
    task: Task = topology.task.build()
    dataset = task.dataset
    if topology.task.data is None and isinstance(dataset, str) and dataset not in DATASETS:
        message = (
            f"{topology.task.name} names the dataset {dataset!r}, expected {', '.join(DATASETS)}, a "
            "method dataset, or data in the topology"
        )
        if not dataset:
            message = (
                f"{topology.task.name} has no dataset: name one, as in dataset: ClassVar[str] = "
                '"digits", add a method dataset that returns it, or give data in the topology, as in '
                "data: {path: mine.parquet}"
            )
        raise topology.source.error([topology.source.problem(("task", "name"), message)])
    frozen = topology.task.frozen
    mark = fingerprint(task, frozen)
    good = None if mark is None else cache.folder() / "models" / mark
    if good is not None:
        with suppress(OSError, ValueError):
            learned, others, buffers = map(int, good.read_text(encoding="utf-8").split())
            return learned, others, buffers
    try:
        if isinstance(task, StandIn):
            count, others, buffers, names = user_code.ask(task, "extent", frozen=frozen)
        else:
            from agents.models import flat  # imports torch, which takes a second

            count, others, buffers, names = flat.extent(task, frozen)
    except ValueError as error:
        problem = topology.source.problem(("task", "name"), f"{topology.task.name} cannot run: {error}")
        raise topology.source.error([problem]) from error
    _check_patterns(topology, names)
    if good is not None:
        cache.keep(good, f"{count} {others} {buffers}\n")
    return count, others, buffers


def try_step(topology: Topology, prepared: Prepared) -> None:
    """Try a training step of a user's task on some samples, and an evaluation on others.

    The samples contain every label if there are not too many labels. If the task has its own `fit`,
    `fit` is tried on the shard of one device instead of the training step. Raises BadInputError if a
    trial fails.
    """
    task = topology.task.build()
    if not isinstance(task, TaskStandIn):
        return
    client = _smallest_client(topology, prepared)
    trained = prepared.shard(client) if task.fits else _sample_shard(prepared.train)
    sets = (
        ("run", trained, True),
        ("be evaluated on the test set", _sample_shard(prepared.test), False),
    )
    for purpose, samples, trains in sets:
        try:
            _ask_step(topology, task, samples, client, trains=trains)
        except ValueError as error:
            message = f"{topology.task.name} cannot {purpose}: {error}"
            problem = topology.source.problem(("task", "name"), message)
            raise topology.source.error([problem]) from error
    if not task.fits:
        _try_single(topology, task, prepared)


def _smallest_client(topology: Topology, prepared: Prepared) -> str:
    samples = prepared.samples
    idle = {*topology.idle_devices(samples)}
    return min((name for name in samples if name not in idle), key=samples.__getitem__)


def _try_single(topology: Topology, task: TaskStandIn, prepared: Prepared) -> None:
    """BatchNorm refuses such a mini-batch. Raises BadInputError if the step fails."""
    sends_gradients = topology.rule.build().client_side.kind == "gradient"
    samples = prepared.samples
    for group in topology.devices:
        local = group.local.build()
        training = replace(local, steps=1, epochs=None) if sends_gradients else local
        for name in group.device_names:
            size = samples[name]
            batches, last = local.batches(size)
            if local.first_batch(size) != 1 and (last != 1 or training.count(size) < batches):
                continue
            own = prepared.indices[name]
            try:
                _ask_step(topology, task, prepared.train.subset(own[:1]), name, trains=True)
            except (ValueError, BadInputError) as error:
                message = (
                    f"{topology.task.name} cannot train on a single sample, and the last mini-batch of "
                    f"{name} has only one: it has {quantity(size, 'sample')}, and batch_size is "
                    f"{local.batch_size}. {_without_single(local, size)}\n{error}"
                )
                problem = topology.source.problem(("task", "local"), message)
                raise topology.source.error([problem]) from error
            return


def _without_single(local: LocalTraining, samples: int) -> str:
    """Return what to change."""
    if local.batch_size == 1:
        return "Raise batch_size"
    if samples == 1:
        return "Write last_batch: drop, with which the device waits and does not train"
    return "Write last_batch: drop or last_batch: merge, or choose another batch_size"


def _sample_shard(whole: Shard) -> Shard:
    """If there are more than `_TRIED` labels, some labels are left out."""
    _, first = np.unique(whole.y, return_index=True, axis=0)
    firsts = np.arange(min(len(whole), _TRIED))
    return whole.subset(np.unique(np.concatenate([firsts, np.sort(first)[-_TRIED:]])))


def _ask_step(
    topology: Topology, task: TaskStandIn, samples: Shard, client: str, *, trains: bool
) -> None:
    """Try a step or the task's `fit`. Raises ValueError if the task refuses the samples, BadInputError
    if the task's code raises an exception."""
    with tempfile.TemporaryDirectory(prefix="testbed-step-") as folder:
        file = Path(folder, "samples.safetensors")
        shards.save(samples, file)
        facts = {"samples": str(file), "seed": topology.seed, "trains": trains}
        number, lr = topology.device_names.index(client), topology.task.local.build().lr
        user_code.ask(task, "step", **facts, client=client, index=number, lr=lr)


def check_data(topology: Topology, prepared: Prepared) -> None:
    """Raise BadInputError if the task's model and loss do not accept the topology's own data."""
    task: Task = topology.task.build()
    if topology.task.data is None or isinstance(task, StandIn):  # a user's task: see `try_step`
        return
    import torch

    from agents.models import flat

    with flat.unchanged_generators():
        module = task.model().eval()
    train = prepared.train
    some = train.subset(np.arange(min(2, len(train))))
    x, y = model_inputs(torch.from_numpy(some.x), some.scale), torch.from_numpy(some.y)
    key = "input"
    try:
        outputs = module(x)
        key = "label"
        for where, labels in (("", train.y), ("of the test set, ", prepared.test.y)):
            if type(task).loss is Task.loss and (message := unfit_classes(labels, outputs.shape)):
                raise ValueError(where + message)
        task.loss(outputs, y)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = str(error).partition("\n")[0]
        refused = unfit_inputs(x, reason) if key == "input" else f"does not take these labels: {reason}"
        message = f"{topology.task.name} {refused}"
        raise topology.source.error([topology.source.problem(("task", "data", key), message)]) from error


def _check_patterns(topology: Topology, names: Sequence[str]) -> None:
    """Raise BadInputError for a pattern of `task.frozen` that matches no parameter."""
    problems = [
        topology.source.problem(
            ("task", "frozen", index),
            f"found {pattern!r}, which matches no parameter of {topology.task.name}; its parameters are "
            f"{name_list(names)}",
        )
        for index, pattern in enumerate(topology.task.frozen)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise topology.source.error(problems)


@functools.cache
def _torch_version() -> str:
    """Read once, because its metadata is long: 7 ms."""
    return metadata.version("torch")


def fingerprint(task: Task, frozen: Sequence[str] = ()) -> str | None:
    """Return a hash that changes if the task's model may have changed, or if other parameters are
    frozen; None if the source code cannot be read."""
    try:
        if isinstance(task, StandIn):
            code, _, name = task.stands_for
            texts = [code.digest.encode(), name.encode()]
        else:
            sources = sorted(Path(inspect.getfile(type(task))).parent.glob("*.py"))
            texts = [path.read_bytes() for path in sources]
        if (checks := find_spec("agents.models.flat")) is not None and checks.origin is not None:
            texts.append(Path(checks.origin).read_bytes())  # the checks themselves may have changed
    except (OSError, TypeError):  # for example a class from a notebook
        return None
    facts = [
        repr((task, *frozen)) if frozen else repr(task),
        type(task).__qualname__,
        _torch_version(),
    ]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:16]


# Work of a training step of a task: operations and memory traffic, counted while the step runs once.
#
# Counting takes a second, because it imports PyTorch. So the result is cached. The cached result is used
# only for the same source files, parameters, batch size and version of PyTorch.


def count_step_work(task: Task, batch_size: int, frozen: Sequence[str] = ()) -> Work | None:
    """Return None if the shape of the task's inputs is unknown, if the task is a user's own, or if the
    step fails."""
    if isinstance(task, StandIn):
        return None
    mark = fingerprint(task, frozen)
    path = None if mark is None else cache.folder() / "work" / f"{mark}-{batch_size}.json"
    if path is not None:
        with suppress(OSError, ValueError):
            return Work.model_validate_json(path.read_bytes())
    try:
        found = _count_step(task, batch_size, frozen)
    except Exception:  # noqa: BLE001  # a user's code: the run itself will say what is wrong
        return None
    if path is not None and found is not None:
        cache.keep(path, found.model_dump_json())
    return found


def _count_step(task: Task, batch_size: int, frozen: Sequence[str]) -> Work | None:
    import torch

    from agents.models import flat
    from agents.models.flat import build

    with flat.unchanged_generators():
        module = build(task, InitialModel(frozen=tuple(frozen)))
    if task.dataset is None:
        shard = task.shards_for(1)[0]
        x = model_inputs(torch.from_numpy(shard.x[:batch_size]), shard.scale)
        y = torch.from_numpy(shard.y[:batch_size])
    else:
        known = DATASETS[str(task.dataset)]  # never a method of own code: see `count_step_work`
        if known.shape is None:
            return None
        x = torch.zeros(batch_size, *known.shape, dtype=torch.int64 if known.tokens else torch.float32)
        y = torch.zeros(batch_size, dtype=torch.int64)
    return count_work(lambda: gradient_step(module, x, y, task.loss))


def gradient_step(
    module: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The learning rate is 0."""
    import torch

    loss(module(x), y).mean().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.0)


def count_work(run: Callable[[], object]) -> Work:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    giga = dict.fromkeys(KINDS, 0.0)

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            operation = func.overloadpacket
            if operation is aten.convolution:
                add_convolution(args[0], args[1], out, args[6], args[8], products=1)
            elif operation is aten.convolution_backward:
                add_convolution(args[1], args[2], args[0], args[7], args[9], products=sum(args[10][:2]))
            elif operation in flop_registry:
                giga["matrix"] += flop_registry[operation](*args, **(kwargs or {}), out_val=out) / 1e9
            elif func.namespace == "aten" and not (func.is_view or operation is aten._unsafe_view):
                tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)]
                giga["memory"] += sum(each.numel() * each.element_size() for each in tensors) / 1e9
            return out

    def add_convolution(
        x: Any, weight: Any, out: Any, transposed: Any, groups: int, products: int
    ) -> None:
        # torch's own formula is not used, because it ignores groups in a backward pass.
        outputs = x.numel() if transposed else out.numel()
        flop = 2 * outputs * weight[0].numel() * products
        giga["depthwise" if groups > 1 else "convolution"] += flop / 1e9

    with Counter():  # type: ignore[no-untyped-call]
        run()
    return Work(**giga)
