"""Shared links in containers compared with virtual time: updates of each device, and each transfer.

    python -m benchmarks.segments [TOPOLOGY] [--seeds N] [--loads 0% 50%] [--queue 64kB]

Each load is traffic of that share of each root segment's rate, in both directions. A run in containers
takes about two minutes with topologies/network-tree.yaml, so three seeds take 12 minutes. The machine
has to be quiet. Runs stay in `runs/`. Datasets other than the digits come from TESTBED_DATA.

- Updates: number, and time per update, of each device, against runs in virtual time with the same seed.
  Which transfers meet on a link depends on milliseconds. So virtual time is the mean of several runs, in
  which round trips differ by tenths of a millisecond, and their spread gives the interval.
- Transfers: each download and upload, against a network in virtual time in which all transfers begin at
  the same moments as in containers. So no difference is due to other moments.
- What virtual time does not have: packets that the queues of links and segments dropped (of devices, not
  of background traffic), and packets that TCP sent again.

Ratios are sums in containers ÷ sums in virtual time, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

import testbed
from agents.models.flat import first_model
from agents.router.segments import FIRST_LEAF, INTERFACES
from agents.timing.nanoseconds import from_seconds, to_seconds
from analysis import summary
from analysis.load import Run, load
from benchmarks.command import exit_code_of
from testbed.plan import Plan
from testbed.plan.costs import message_sizes
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL
from testbed.segments.simulated import SegmentTraffic
from testbed.topology import Topology, parse
from testbed.view import View
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.timing import DEVICE, LINK, EventQueue

_TOPOLOGY = Path(__file__).parent.parent / "topologies" / "network-tree.yaml"
_RUNS = Path("runs")
_SAMPLE_SECONDS = 10.0
"""Seconds between two readings of the containers' counters."""
_SIMULATED = 8
"""Number of runs in virtual time per run in containers."""
_BEGUN_SECONDS = 2.0
"""Time from which transfers count. In containers, background traffic begins some tenths of a second
after the run clock, when the controller has heard of it."""
_LOSSES = (
    "packets dropped by devices' links",
    "packets dropped by segments",
    "packets that TCP sent again",
    "timeouts of TCP",
)
_WAYS = {"download": ("dispatched", "downloaded"), "upload": ("sent", "arrived")}
"""Columns of a run's updates with the begin and the end of each transfer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.segments", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("topology", nargs="?", type=Path, default=_TOPOLOGY)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds per load")
    parser.add_argument("--loads", nargs="+", default=["0%", "50%"], metavar="SHARE")
    parser.add_argument("--queue", metavar="SIZE", help="length of the queue of each segment")
    wanted = parser.parse_args()
    sys.exit(exit_code_of(functools.partial(_compare, wanted)))


def _compare(wanted: argparse.Namespace) -> None:
    data = os.environ.get("TESTBED_DATA")
    options = Options("docker", data_root=None if data is None else Path(data))
    topology = yaml.safe_load(wanted.topology.read_text(encoding="utf-8"))
    columns = {}
    for share in wanted.loads:
        found = []
        for seed in range(1, wanted.seeds + 1):
            print(f"background {share}, seed {seed}", file=sys.stderr)
            changed = loaded({**topology, "seed": seed}, share, wanted.queue)
            found.append(measure(changed, options, _RUNS))
        columns[f"background {share}"] = figures(found)
    for line in table(columns):
        print(line)


def loaded(topology: dict[str, Any], share: str, queue: str | None) -> dict[str, Any]:
    """Return `topology` with constant traffic of `share` on its root segments, and with queues of the
    size `queue`; None for the topology's queues."""
    network = {name: dict(one) for name, one in topology["network"].items()}
    for one in network.values():
        if "parent" not in one and share != "0%":
            one["background"] = [{"kind": "constant", "up": share, "down": share}]
        if queue is not None:
            one["queue"] = queue
    return {**topology, "network": network}


class Counters(View):
    """Reading of the counters of a run's containers while it runs."""

    def __init__(self, run: str, devices: int) -> None:
        self._run, self._devices = run, devices
        self._pids: dict[str, int] = {}
        """Process id of each container, by name of its part of the run."""
        self._next = 0.0
        self._first: dict[str, Counter[str]] = {}
        """Counters of each container at the start, after the measurement of the links."""
        self._last: dict[str, Counter[str]] = {}
        """Last counters of each container."""

    def refresh(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + _SAMPLE_SECONDS
        self._pids = self._pids or self._find()
        for name, pid in self._pids.items():
            try:
                self._last[name] = Counter(dict(_counters(pid, self._devices)))
                self._first.setdefault(name, self._last[name])
            except (OSError, subprocess.CalledProcessError):  # the container has ended
                continue

    @property
    def total(self) -> Counter[str]:
        """Sums over all containers, since the start."""
        return sum((one - self._first[name] for name, one in self._last.items()), Counter())

    def _find(self) -> dict[str, int]:
        label = f'{{{{.Label "{COMPONENT_LABEL}"}}}}'
        command = ["docker", "ps", "--filter", f"label={RUN_LABEL}={self._run}"]
        lines = _output([*command, "--format", f"{{{{.ID}}}} {label}"]).splitlines()
        names = dict(line.split(" ", 1) for line in lines)
        pids = _output(["docker", "inspect", "--format", "{{.State.Pid}}", *names]).split()
        return dict(zip(names.values(), map(int, pids), strict=True))


def _counters(pid: int, devices: int) -> Iterator[tuple[str, int]]:
    """Yield the counts of `_LOSSES` in the network namespace of the process `pid`."""
    for name, file, protocol, key in (
        ("packets that TCP sent again", "snmp", "Tcp", "RetransSegs"),
        ("timeouts of TCP", "netstat", "TcpExt", "TCPTimeouts"),
    ):
        rows = Path(f"/proc/{pid}/net/{file}").read_text(encoding="ascii").splitlines()
        keys, values = (row.split()[1:] for row in rows if row.startswith(f"{protocol}:"))
        yield name, int(values[keys.index(key)])
    shown = _output(["nsenter", "-t", str(pid), "-n", "tc", "-s", "-j", "qdisc", "show"])
    dropped = Counter[str]()
    for one in json.loads(shown):
        if one["kind"] == "tbf":
            is_segment = one["dev"] in INTERFACES.values()
            if not is_segment or int(one["handle"].rstrip(":"), 16) < FIRST_LEAF + devices:
                dropped["segments" if is_segment else "devices' links"] += one["drops"]
    yield from ((f"packets dropped by {place}", count) for place, count in dropped.items())


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run in containers with its counterpart in virtual time."""

    real: Run
    virtual: Sequence[Run]
    transfers: pd.DataFrame
    """Result of `replay`."""
    losses: Counter[str]
    """Counts of `_LOSSES`."""


def measure(topology: dict[str, Any], options: Options, runs: Path) -> Measurement:
    """Run `topology` in containers and in virtual time. The runs stay in the folder `runs`."""
    wanted = parse(yaml.safe_dump(topology))
    plan = preparing.plan_topology(wanted, options)
    directory = RunDirectory.new(runs, wanted.name)
    counters = Counters(directory.run, len(plan.devices))
    up.run(wanted, plan, directory, options, counters)
    real = load(directory.path)
    virtual = [
        testbed.simulate(_delayed(topology, 1e-4 * number), data=options.data_root, runs=runs)
        for number in range(_SIMULATED)
    ]
    return Measurement(real, virtual, replay(real, wanted, plan), counters.total)


def _delayed(topology: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return `topology` with longer round trips on its root segments."""
    network = {name: dict(one) for name, one in topology["network"].items()}
    for name, one in parse(yaml.safe_dump(topology)).network.items():
        if one.parent is None:
            network[name]["rtt"] = f"{1e3 * (one.rtt + seconds):.1f}ms"
    return {**topology, "network": network}


def replay(run: Run, topology: Topology, plan: Plan) -> pd.DataFrame:
    """Return one row per transfer of the run: `group`, `way`, its begin in seconds of device time, and
    how many seconds it takes in the run (`real`) and in virtual time (`replayed`), where all transfers
    begin at the same moments."""
    queue = EventQueue()
    seed = topology.seed
    start, buffers, schema = first_model(topology.task.build(), seed)
    model, _ = message_sizes(run.name, schema, start, buffers)
    network = VirtualNetwork(queue, seed, packets=True)
    traffic = SegmentTraffic(queue, network, plan.segments, {}, seed, lambda _: None)
    lines = {device.name: network.line(device) for device in plan.devices}
    traffic.start()
    rows: list[dict[str, Any]] = []

    def begin(update: Mapping[Any, Any], way: str) -> None:
        line, since = lines[update["client"]], queue.now

        def arrive(at: int) -> None:
            first, last = _WAYS[way]
            real, virtual = update[last] - update[first], to_seconds(at - since)
            row = {"group": update["group"], "way": way, "real": real, "replayed": virtual}
            rows.append({"begin": update[first], **row})

        if way == "download":
            line.download(model, arrive)
        else:
            line.upload(int(update["bytes"]), arrive)

    updates = run.updates.to_dict("records")
    for update in updates:
        for way, (first, _) in _WAYS.items():
            queue.plan(from_seconds(update[first]), DEVICE, 0, functools.partial(begin, update, way))
        queue.plan(from_seconds(update["arrived"]), LINK, 0, lines[update["client"]].acknowledge)
    while len(rows) < len(_WAYS) * len(updates) and queue.next is not None:
        queue.now = queue.next
        while (callback := queue.pop_due()) is not None:
            callback()
    return pd.DataFrame(rows)


def figures(found: Sequence[Measurement]) -> dict[str, str]:
    """Return the cells of a column of the table, by title of the row."""
    transfers = pd.concat([one.transfers for one in found])
    transfers = transfers[transfers["begin"] >= _BEGUN_SECONDS]
    cells = {}
    for title, one in (("updates per device", _updates), ("time per update", _update_time)):
        real = pd.DataFrame([one(each.real) for each in found])
        virtual = [pd.DataFrame([one(run) for run in each.virtual]) for each in found]
        for group in real:
            runs = np.array([each[group] for each in virtual])
            cells[f"{title}, {group}"] = _ratio_to_runs(real[group].to_numpy(), runs)
    for (way, name), some in transfers.groupby(["way", "group"]):
        median = (some["real"] / some["replayed"]).median()
        cells[f"{way}s of {name}, mean"] = _ratio(some["real"], some["replayed"])
        cells[f"{way}s of {name}, median of ratios"] = f"{100 * median - 100:+.1f} %"
    losses = sum((one.losses for one in found), Counter())
    for loss in _LOSSES:
        cells[loss] = f"{losses[loss]} in {len(transfers)} transfers"
    timings = [one.real.manifest.get("timings", {}) for one in found]
    for phase in ("launch", "ready"):
        cells[f"start: {phase}"] = ", ".join(f"{one.get(phase, math.nan):.1f} s" for one in timings)
    verdicts = summary.verdicts([one.real for one in found])
    cells["verdicts"] = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    return cells


def _updates(run: Run) -> pd.Series[float]:
    """Return the mean number of updates per device, by group."""
    counts = run.updates.groupby(["group", "client"]).size()
    return counts.groupby("group").mean().astype(float)


def _update_time(run: Run) -> pd.Series[float]:
    """Return the mean over the devices of the seconds per update, by group."""
    arrived = run.updates.groupby(["group", "client"])["arrived"]
    return (arrived.max() / arrived.size()).groupby("group").mean()


def _ratio_to_runs(real: npt.NDArray[np.float64], virtual: npt.NDArray[np.float64]) -> str:
    """Format the difference of the sums as `_ratio`. `real`: one figure for each seed. `virtual`: one
    row for each seed, of which the mean counts; a figure in `real` spreads as they do."""
    means, count = virtual.mean(axis=1), virtual.shape[1]
    spread = virtual.var(axis=1, ddof=1) if count > 1 else np.zeros(len(virtual))
    error = np.sqrt((spread * (1 + 1 / count)).sum()) / means.sum()
    return f"{100 * real.sum() / means.sum() - 100:+.1f} ± {196 * error:.1f} %"


def _ratio(real: pd.Series[float], virtual: pd.Series[float]) -> str:
    """Format the difference of the sums as `+1.2 ± 0.8 %`, with half of the 95 % interval of the ratio
    of two paired sums."""
    above, below = real.to_numpy(np.float64), virtual.to_numpy(np.float64)
    ratio = above.sum() / below.sum()
    error = np.sqrt(((above - ratio * below) ** 2).sum()) / below.sum()
    return f"{100 * ratio - 100:+.1f} ± {196 * error:.1f} %"


def table(columns: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield Markdown: one row per figure, one column per load."""
    yield f"| containers against virtual time | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for title in next(iter(columns.values())):
        yield f"| {title} | {' | '.join(cells.get(title, '–') for cells in columns.values())} |"


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
