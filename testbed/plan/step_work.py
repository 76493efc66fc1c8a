"""Work of a training step of a task: operations and memory traffic, counted while the step runs once.

Counting takes a second, because it imports PyTorch. So the result is cached. The cached result is used
only for the same source files, parameters, batch size and version of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agents.config import InitialModel
from agents.shards import model_inputs
from agents.tasks.interface import Task
from testbed.data.datasets import DATASETS
from testbed.host import cache
from testbed.plan.model_check import fingerprint
from testbed.speed.kinds import KINDS, Work
from testbed.user_code.stand_ins import StandIn

if TYPE_CHECKING:
    import torch


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

    from agents.models import generators
    from agents.models.flat import build

    with generators.unchanged():
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
