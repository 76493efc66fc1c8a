"""A client's use of its GPU, with stand-ins for the GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agents.client import resources
from agents.config import BrokerAccess, ClientConfig, ClientSetup, LocalTraining, Named

CPU = ClientConfig(
    setup=ClientSetup(
        run="r", client="pi", seed=0, rule=Named("fedbuff", {}), local=LocalTraining(steps=1)
    ),
    broker=BrokerAccess("127.0.0.1", 1, "pi", "secret"),
    task=Named("digits-logreg", {}),
    shard="",
    threads=1,
    parameters=1,
)
GPU = replace(CPU, device="cuda", gpu_memory=2 * 2**30)
A2 = SimpleNamespace(name="NVIDIA A2", total_memory=16 * 2**30, multi_processor_count=5)


def test_client_without_a_gpu_is_not_limited() -> None:
    resources.prepare_gpu(CPU)
    with pytest.raises(torch.OutOfMemoryError), resources.exit_when_out_of_memory(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")


def test_client_that_finds_no_gpu_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"client pi: PyTorch 2\S+ finds no GPU here .*`testbed"):
        resources.prepare_gpu(GPU)


def test_pytorch_memory_is_limited_to_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[float] = []
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_properties": lambda _: A2,
        "set_per_process_memory_fraction": taken.append,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    resources.prepare_gpu(GPU)
    assert taken == [0.125]
    told = "client pi: trains on NVIDIA A2, 5 multiprocessors, 2048 of 16384 MiB\n"
    assert capsys.readouterr().err == told
    resources.prepare_gpu(replace(GPU, gpu_memory=None))
    assert taken == [0.125]
    assert resources.memory_fraction(32 * 2**30, 16 * 2**30) == 1.0


def test_out_of_gpu_memory_is_reported() -> None:
    with pytest.raises(SystemExit) as ended, resources.exit_when_out_of_memory(GPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
    assert str(ended.value) == (
        "client pi: out of GPU memory of its 2048 MiB: CUDA out of memory. Tried to allocate 2 GiB. "
        "Raise gpu.memory in the topology, or lower batch_size"
    )
    with pytest.raises(RuntimeError, match="another"), resources.exit_when_out_of_memory(GPU):
        raise RuntimeError("another")
