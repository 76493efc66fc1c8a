"""Speed of a machine in the kinds of work that training consists of, and in a training step.

This file needs only Python 3.9 or newer and PyTorch, nothing of the testbed. Copy it to a Raspberry Pi
or a laptop and run it there (`testbed profiles --script FILE` writes it to FILE). It takes about a
minute.

    python3 device_benchmark.py my-pi      prints an entry for profiles.yaml, and writes it to my-pi.yaml

Then, on the testbed's machine, `testbed profiles --add my-pi.yaml` adds the entry to the profiles.yaml
beside a topology. All cores work at once, as they do in training; close other programs first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIZE = 1024
"""Rows of a square matrix. Three double-precision matrices of 8 MB each do not fit into the caches of
one core."""
LEAST_RUNS = 3
"""Runs of a piece of work, even if each run takes long."""
KIND_PART = 0.25
"""Share of the time for double-precision products on one core."""
_QUIET = 0.3
"""Load of other programs, in cores, that is accepted without a remark."""
_STEADY = 1.1
"""Ratio of step times at the end to step times at the beginning that is accepted without a remark."""
_DISTURBED = 0.5
"""Relative error of the predicted step time. A larger error means that something disturbed the
measurements."""

WORK = {
    "convolution": 3 * 2 * (4 * 128 * 28 * 28) * (128 * 3 * 3) / 1e9,
    "depthwise": 3 * 2 * (4 * 128 * 28 * 28) * (3 * 3) / 1e9,
    "matrix": 3 * 2 * SIZE**3 / 1e9,
    "memory": 0.12845,
}
"""In one `piece` of each kind (`testbed.speed`), forward and backward: GB for `memory`,
Gflop for the other kinds."""
STEP = {"convolution": 5.6938, "depthwise": 0.056623, "matrix": 0.025657, "memory": 0.15871}
"""In one training step (the function `step`), in the same units as `WORK`."""


def piece(kind: str) -> Callable[[], object]:
    import torch

    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).requires_grad_()

    def backward(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
        gradient = torch.rand_like(run(*inputs))
        return lambda: torch.autograd.grad(run(*inputs), inputs, gradient)

    functional = torch.nn.functional
    if kind == "convolution":
        x, w = rand(4, 128, 28, 28), rand(128, 128, 3, 3)
        return backward(lambda x, w: functional.conv2d(x, w, padding=1), x, w)
    if kind == "depthwise":
        x, w = rand(4, 128, 28, 28), rand(128, 1, 3, 3)
        return backward(lambda x, w: functional.conv2d(x, w, padding=1, groups=128), x, w)
    if kind == "matrix":
        return backward(torch.mm, rand(SIZE, SIZE), rand(SIZE, SIZE))
    if kind == "memory":
        x, w = rand(16, 64, 56, 56), rand(64)
        return backward(
            lambda x, w: functional.relu(functional.batch_norm(x, None, None, w, training=True)), x, w
        )
    raise ValueError(f"unknown kind of work {kind}: expected one of {', '.join(WORK)}")


def double_product() -> Callable[[], object]:
    """Multiply two double-precision matrices: 2 × SIZE³ operations."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand((SIZE, SIZE), dtype=torch.float64, generator=generator) for _ in range(2))
    product = torch.empty((SIZE, SIZE), dtype=torch.float64)
    return lambda: torch.mm(left, right, out=product)


def step() -> Callable[[], object]:
    """One training step of a small network, which contains every kind of work that training consists of.
    The batch has 16 images of 64 × 64 pixels."""
    import torch
    from torch import nn

    def block(
        channels: int, out: int, size: int = 3, stride: int = 1, groups: int = 1
    ) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(out), nn.ReLU()]

    torch.manual_seed(0)
    network = nn.Sequential(
        *block(3, 32, stride=2),
        *block(32, 64),
        *block(64, 64, groups=64),
        *block(64, 128, size=1, stride=2),
        *block(128, 128),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    x, y = torch.rand(16, 3, 64, 64), torch.zeros(16, dtype=torch.int64)

    def run() -> None:
        loss: Any = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.0)

    return run


def times(
    run: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Call `run` repeatedly for `seconds`. Return the seconds of each call."""
    run()  # initializes the library
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < LEAST_RUNS or time.monotonic() < end:
        begin = clock()
        run()
        found.append(clock() - begin)
    return found


def measure(seconds: float, tell: Callable[[str], object]) -> dict[str, Any]:
    """Measure this machine with all its cores, for about `seconds` per kind of work. Call `tell` with a
    line on each result.

    In the result, `memory` is in bytes, `gflops` in Gflop/s, `speeds` in Gflop/s (memory in GB/s),
    `step` and `predicted` in seconds, and `busy` in cores. `slower` is the ratio of step times at the
    end to step times at the beginning.
    """
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    busy = _load()
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        speeds = {}
        for kind, amount in WORK.items():
            speeds[kind] = amount / statistics.median(times(piece(kind), seconds))
            tell(f"{kind}: {speeds[kind]:.3g} {'GB/s' if kind == 'memory' else 'Gflop/s'}")
        gflops = 2 * SIZE**3 / 1e9 / statistics.median(times(double_product(), seconds))
        tell(f"double-precision products: {gflops:.3g} Gflop/s")
        took = times(step(), seconds)
    finally:
        torch.set_num_threads(threads)
    predicted = sum(STEP[kind] / speeds[kind] for kind in WORK)
    third = max(1, len(took) // 3)
    slower = statistics.median(took[-third:]) / statistics.median(took[:third])
    return {
        "model": model(),
        "cores": cores,
        "memory": memory(),
        "gflops": gflops,
        "speeds": speeds,
        "step": statistics.median(took),
        "predicted": predicted,
        "slower": slower,
        "busy": busy,
        "torch": torch.__version__,
    }


def core(seconds: float) -> dict[str, Any]:
    """In the result, `gflops` has the speed of each double-precision product in Gflop/s. The products
    take about `seconds` together. `training` has the speed in each kind of work, in Gflop/s (memory in
    GB/s).

    All times are CPU times, because a device gets a share of CPU time. Other work on this machine then
    does not count.
    """
    import torch  # late: takes a second, and a cached calibration does not need it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = times(double_product(), seconds, time.thread_time)
        kinds = {kind: times(piece(kind), KIND_PART * seconds, time.thread_time) for kind in WORK}
    finally:
        torch.set_num_threads(threads)
    return {
        "gflops": [2 * SIZE**3 / each / 1e9 for each in products],
        "training": {kind: WORK[kind] / statistics.median(took) for kind, took in kinds.items()},
        "cpu": processor(),
        "torch": torch.__version__,
    }


def profile_text(name: str, found: dict[str, Any]) -> str:
    """Format the result of `measure` as a profiles file with one device."""
    training = ", ".join(f"{kind}: {speed:.3g}" for kind, speed in found["speeds"].items())
    today = datetime.datetime.now(datetime.timezone.utc).date()  # noqa: UP017  (Python before 3.11)
    lines = [
        "devices:",
        f"  {name}:",
        f"    description: {json.dumps(found['model'], ensure_ascii=False)}",
        f"    gflops: {found['gflops']:.3g}",
        f"    cores: {found['cores']}",
        *([f"    memory: {found['memory'] >> 20}MiB"] if found["memory"] else []),
        f"    training: {{{training}, error: {_error(found):.2g}}}",
        f"    source: measured, {today}, PyTorch {found['torch']}, {found['cores']} threads. A training",
        f"      step took {1e3 * found['step']:.3g} ms; these speeds predict "
        f"{1e3 * found['predicted']:.3g} ms. gflops",
        "      are of double-precision products in PyTorch, not of HPL",
    ]
    return "\n".join(lines) + "\n"


def _error(found: dict[str, Any]) -> float:
    """Share of the measured step time."""
    return float(abs(found["predicted"] / found["step"] - 1))


def remarks(found: dict[str, Any]) -> list[str]:
    """One sentence for each reason to doubt the figures."""
    said = []
    if found["busy"] > _QUIET:
        said.append(
            f"Other programs used {found['busy']:.1f} cores just before, so the figures are too low: "
            "measure again without them."
        )
    if found["slower"] > _STEADY:
        said.append(
            f"Steps took {found['slower']:.2f} times as long at the end as at the beginning: heat, or "
            "other programs. If it is heat, add thermal: {after: ..., to: ...}; else measure again."
        )
    if (error := _error(found)) > _DISTURBED:
        said.append(
            f"These speeds predict a step time that is off by {error:.0%}: other programs, or heat, "
            "disturbed the measurements. Measure again, for longer (--seconds)."
        )
    return said


def _load() -> float:
    """Programs that ran or waited for a core during the last minute, on average; 0 if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return 0.0


def model() -> str:
    """Name of the board, or of the processor if the kernel does not know the board."""
    board = Path("/proc/device-tree/model")
    if board.is_file():
        return board.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    return processor()


def processor() -> str:
    """On Arm, the kernel may name only the board."""
    facts: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    named = (facts.get(key) for key in ("model name", "Model", "Hardware"))
    return next(filter(None, named), None) or platform.processor() or platform.machine()


def memory() -> int:
    """Bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine for a device profile.")
    parser.add_argument("--core", action="store_true", help="measure one core only, and print JSON")
    parser.add_argument(
        "name", nargs="?", help="name of the profile: lower-case letters, digits and -, such as my-pi"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per kind of work (8)")
    chosen = parser.parse_args()
    if chosen.core:
        sys.stdout.write(json.dumps(core(chosen.seconds)) + "\n")
        return
    if chosen.name is None:
        parser.error("name the profile")
    found = measure(chosen.seconds, lambda line: print(line, file=sys.stderr))  # noqa: T201
    text = profile_text(chosen.name, found)
    Path(f"{chosen.name}.yaml").write_text(text, encoding="utf-8")
    for line in remarks(found):
        print(line, file=sys.stderr)  # noqa: T201
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
