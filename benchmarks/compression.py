"""Speed of compressing and expanding an update: GB of float32 per CPU second, with one thread.

python -m benchmarks.compression
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from agents.pipeline.compression import METHODS

_SIZES = (28_938, 550_000, 11_000_000)
_TURNS = 5


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of several turns."""
    times = []
    for _ in range(_TURNS):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return min(times)


def main() -> None:
    print(f"{'parameters':>10}  {'method':8}{'compress':>12}{'expand':>12}")
    for size in _SIZES:
        vector = np.random.default_rng(0).normal(size=size).astype(np.float32)
        for name, method in METHODS.items():
            own = method()
            packed = own.compress(vector)
            times = _seconds(partial(own.compress, vector)), _seconds(packed.dense)
            rates = "".join(f"{vector.nbytes / 1e9 / seconds:>7.2f} GB/s" for seconds in times)
            print(f"{size:>10,}  {name:8}{rates}")


if __name__ == "__main__":
    main()
