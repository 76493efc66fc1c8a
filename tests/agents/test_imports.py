"""The garbage collector is left as it was found."""

from __future__ import annotations

import gc

import pytest

from agents.imports import without_garbage_collection


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
