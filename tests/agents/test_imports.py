"""The garbage collector is left as it was found."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from agents.imports import frozen, without_garbage_collection

FROZEN_FOR_A_WHILE = """
import gc
from agents.imports import frozen
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
