"""Cost of a flooding client to the others in a live run: `python -m benchmarks.flood`.

Local processes: eight devices answer models of one number. A ninth device, with more CPU time than any
of them, floods from the middle of the run (messages of 40 kB, as fast as it can), until the aggregator
ends its client. Prints updates per second of the eight before and after, and in each second after.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from agents import events
from testbed.rundir.live_files import RecordFollower
from testbed.runtimes.process import runtime
from tests.chaos import FAULTS
from tests.running import Finished, started, write_topology

_MIDDLE, _END, _FIRST = 12, 24, 2
"""Seconds of the run; those before `_FIRST` are left out."""
_FLOODS = "flood"


def _wall_clock(runs: Path, up: subprocess.Popen[str]) -> float:
    """Wait for the start of the run clock; return its wall-clock time."""
    while up.poll() is None:
        for path in runs.glob("*/events.jsonl"):
            for record in RecordFollower(path).read():
                if isinstance(record, events.RunStarted):
                    return record.wall_clock
        time.sleep(0.05)
    raise RuntimeError(up.communicate()[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(FAULTS)
        runs = folder / "runs"
        runs.mkdir()
        local = {"steps": 1, "lr": 0.1}
        topology = write_topology(
            folder,
            task={"name": "quadratic", "centers": [[float(n)] for n in range(9)], "local": local},
            rule={"name": "fedbuff", "buffer_size": 4, "server_lr": 0.01},
            devices=[
                {"name": "honest", "count": 8, "cpu": 0.1, "timing": "20ms"},
                {"name": _FLOODS, "cpu": 0.2, "timing": "20ms"},
            ],
            stop={"after": f"{_END}s"},
            evaluate={"every": f"{2 * _END}s"},
        )
        paths = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        command = ("up", topology, "--runtime", "process", "--runs", runs)
        with started(*command, environment={"PYTHONPATH": paths}) as up:
            begin = _wall_clock(runs, up)
            time.sleep(max(0.0, begin + _MIDDLE - time.time()))
            (run,) = runs.iterdir()
            for info in runtime.find():
                if (info.run, info.component) == (run.name, _FLOODS):
                    info.process.send_signal(signal.SIGUSR2)
            up.communicate()
        finished = Finished.only_one_in(runs)
    shut_out = [r.at - _MIDDLE for r in finished.records if isinstance(r, events.Acted)]
    counts = Counter(int(update.applied) for update in finished.updates if update.client != _FLOODS)
    before = sum(counts[second] for second in range(_FIRST, _MIDDLE)) / (_MIDDLE - _FIRST)
    after = [counts[second] for second in range(_MIDDLE, _END)]
    mean = sum(after) / len(after)
    print(f"shut out after {shut_out[0]:.1f} s" if shut_out else "not shut out")
    print(f"updates/s of the others: before {before:.0f}, after {mean:.0f}, ratio {mean / before:.2f}")
    print("in each second:", *after)


if __name__ == "__main__":
    main()
