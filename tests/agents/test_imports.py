"""The garbage collector is left as it was found, and what an import leaves out can be had later."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from agents.process import frozen, without_garbage_collection, without_meta_kernels

FROZEN_FOR_A_WHILE = """
import gc
from agents.process import frozen
gc.disable()
try:
    with frozen():
        print(gc.get_freeze_count() > 0)
        cycle = []
        cycle.append(cycle)
        del cycle
        raise KeyError
except KeyError:
    print(gc.get_freeze_count(), gc.collect())
"""

META_KERNELS = """
import sys
from agents.process import without_meta_kernels
with without_meta_kernels():
    import torch
    if sys.argv[1:]:
        from torch._meta_registrations import device_hint
from agents.tasks import TASKS
task = TASKS["cifar10-cnn"]()
model = task.model()
task.loss(model(torch.rand(2, 3, 32, 32)), torch.tensor([1, 2])).mean().backward()
print("torch._decomp" in sys.modules)
torch.optim.Adam(model.parameters()).step()
kernels = sys.modules["torch._meta_registrations"]
print("torch._decomp" in sys.modules, torch._meta_registrations is kernels)
print(*model.to("meta")(torch.rand(2, 3, 32, 32, device="meta")).shape)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_restored_after_a_failed_import(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), without_garbage_collection():
            _fail(gc.isenabled())
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def _fail(collecting: bool) -> None:
    assert not collecting
    raise ImportError


def test_objects_are_frozen_for_a_while_unless_they_are_for_longer() -> None:
    """What became garbage meanwhile is collected at the end. In this process, the tests' imports are
    frozen."""
    command = [sys.executable, "-c", FROZEN_FOR_A_WHILE]
    assert subprocess.check_output(command, text=True).split() == ["True", "0", "0"]
    with frozen():
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("read", [[], ["read"]])
def test_meta_kernels_are_imported_when_they_are_needed(read: list[str]) -> None:
    """By torch.optim, or while PyTorch itself is imported, as another version of it may do."""
    command = [sys.executable, "-c", META_KERNELS, *read]
    said = subprocess.check_output(command, text=True).splitlines()
    assert said == [str(bool(read)), "True True", "2 10"]


def test_nothing_is_left_out_of_a_torch_that_is_imported_already() -> None:
    kernels = importlib.import_module("torch._meta_registrations")
    with without_meta_kernels():
        assert sys.modules["torch._meta_registrations"] is kernels
    assert sys.modules["torch._meta_registrations"] is kernels
