"""Plain values become typed ones, in several threads at once."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading
from dataclasses import make_dataclass, field
from agents.checks import convert

sys.setswitchinterval(1e-6)
for _ in range(30):
    inner = make_dataclass("Inner", [(f"f{k}", int, field(default=0)) for k in range(40)])
    lists = [(f"g{k}", list[inner] | None, field(default=None)) for k in range(20)]
    outer = make_dataclass("Outer", lists)
    barrier = threading.Barrier(4)

    def first_use():
        barrier.wait()
        assert convert({"g3": [{"f7": 2}]}, outer).g3[0].f7 == 2

    threads = [threading.Thread(target=first_use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_use_a_class_for_the_first_time_at_once() -> None:
    """Without the lock, msgspec 0.22 ends the process with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], check=False)
    assert done.returncode == 0
