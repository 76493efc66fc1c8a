"""How long small pieces of work take on one core: of each kind that training consists of, and products
of double-precision matrices (`testbed.plan.calibration` makes speeds of it).

    python3 -m agents.core_speed SECONDS     prints it as JSON

All on one thread, and in CPU time, as that is what a device gets a share of: work of others on the host
does not count.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZE = 1024
"""Rows of a matrix: three of 8 MB each do not fit into the caches that a core has for itself."""
_MIN_RUNS = 3
"""However long one takes."""
_KIND_PART = 0.25
"""Of the seconds for the double-precision products, for each kind of work in training."""


@dataclass(frozen=True, slots=True)
class Times:
    """CPU seconds."""

    products: list[float]
    """Of each product of two matrices of SIZE rows and columns."""
    kinds: Mapping[str, float]
    """Of a piece of each kind, the median."""
    cpu: str
    """Model of the processor."""
    torch: str
    """Version."""


def measure(seconds: float) -> Times:
    """Measure for about twice as many `seconds`."""
    import torch  # late: a second, that a calibration from the cache does not need

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        shape = (SIZE, SIZE)
        left, right = (torch.rand(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        product = torch.empty(shape, dtype=torch.float64)
        products = _times(lambda: torch.mm(left, right, out=product), seconds)
        made = {kind: make() for kind, make in pieces().items()}
        kinds = {kind: median(_times(run, _KIND_PART * seconds)) for kind, run in made.items()}
    finally:
        torch.set_num_threads(threads)
    return Times(products, kinds, cpu_model(), torch.__version__)


def pieces() -> dict[str, Callable[[], Callable[[], object]]]:
    """Of each kind of work, what makes a piece to run, as a network's training has it: forward and
    backward."""
    import torch

    def rand(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.rand(shape, generator=generator).requires_grad_()

    def backward(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
        gradient = torch.rand_like(run(*inputs))
        return lambda: torch.autograd.grad(run(*inputs), inputs, gradient)

    functional = torch.nn.functional
    return {
        "convolution": lambda: backward(
            lambda x, w: functional.conv2d(x, w, padding=1), rand(4, 128, 28, 28), rand(128, 128, 3, 3)
        ),
        "depthwise": lambda: backward(
            lambda x, w: functional.conv2d(x, w, padding=1, groups=128),
            rand(4, 128, 28, 28),
            rand(128, 1, 3, 3),
        ),
        "matrix": lambda: backward(torch.mm, rand(SIZE, SIZE), rand(SIZE, SIZE)),
        "memory": lambda: backward(
            lambda x, w: functional.relu(functional.batch_norm(x, None, None, w, training=True)),
            rand(16, 64, 56, 56),
            rand(64),
        ),
    }


def _times(run: Callable[[], object], seconds: float) -> list[float]:
    """CPU seconds of each of the runs that fit into `seconds`."""
    run()  # sets the library up
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < _MIN_RUNS or time.monotonic() < end:
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return times


def cpu_model() -> str:
    """As the kernel calls it; on Arm the kernel names the board, if anything."""
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(float(sys.argv[1])))) + "\n")
