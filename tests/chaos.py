"""Random faults on real runs: `python -m tests.chaos --runs 20 --runtime process`.

Each run has a rule in its turn, and from its seed some faults: the broker or the aggregator is killed,
the connection of a process to the broker is broken, a client is killed and started again, a device is
cut off or paused for a while. A run is as it should be if it ends in order, all clients go on after the
last fault, and no update is applied twice. The table says how many updates were lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents import events
from agents.topics import AGGREGATOR
from testbed.broker import BROKER
from testbed.rundir.tail import Follower
from testbed.runtimes import process
from tests.running import Finished, started, write_topology

RULES: Mapping[str, Mapping[str, Any]] = {
    "fedbuff": {"name": "fedbuff", "buffer_size": 2},
    "defedavg_niid": {"name": "defedavg_niid", "sample": 2, "send_buffer": "hold"},
    "fedavg": {"name": "fedavg"},
    "area": {"name": "area", "every": 1},
    "port": {"name": "port", "min_updates": 2},
}
CLIENTS = ("a", "b", "c", "d")
BREAKING = """
import os, shutil, signal, socket, stat
def break_connections(*_):
    own = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.stat(number).st_mode):
                one = socket.socket(fileno=os.dup(number))
                own[one.getsockname()] = one
        except OSError:
            pass
    for one in own.values():
        if one.family == socket.AF_INET and one.getpeername() not in own:  # else a pair of paho's own
            one.shutdown(socket.SHUT_RDWR)
        one.close()
signal.signal(signal.SIGUSR1, break_connections)
if os.environ.get("WITHOUT_MOSQUITTO"):
    which = shutil.which
    shutil.which = lambda name, **more: None if name == "mosquitto" else which(name, **more)
"""
"""A `sitecustomize` that has a process break its TCP connections when it gets SIGUSR1."""
_SAME_SECONDS = 0.05
"""Two updates of a client with one number that were trained that close to each other are the same."""


@dataclass(frozen=True)
class Fault:
    """At `at` seconds of the run: `kill` or `break` (the connection) of `part`, from outside."""

    at: float
    what: str
    part: str


@dataclass(frozen=True)
class Outcome:
    """What became of a run; `wrong`, if anything, is not as it should be."""

    run: Finished
    output: str
    wrong: Sequence[str] = ()
    applied: int = 0
    rejected: int = 0
    unanswered: int = 0
    """Models that no applied update answers, but for those that the end of the run cut off."""
    reasons: Sequence[str] = field(default_factory=list)
    """Why the run is not valid."""


def run(
    folder: Path,
    rule: Mapping[str, Any],
    faults: Sequence[Fault],
    *,
    scenario: Sequence[Mapping[str, Any]] = (),
    runtime: str = "process",
    embedded: bool = False,
    after: float = 25.0,
    calm: float = 8.0,
) -> Outcome:
    """Run four clients for `after` seconds under `faults`; in the last `calm` ones, all have to go on.
    `embedded`: with the embedded broker."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(BREAKING)
    devices = [
        {"name": name, "cpu": 0.2, "timing": f"{timing}ms", "link": {"rtt": "1ms"} if scenario else None}
        for name, timing in zip(CLIENTS, (150, 200, 300, 400), strict=True)
    ]
    topology = write_topology(
        folder,
        rule=dict(rule),
        devices=devices,
        scenario=list(scenario),
        stop={"after": f"{after}s"},
        evaluate={"every": "5s"},
    )
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    runs = folder / "runs"
    with (
        _environment(PYTHONPATH=paths, WITHOUT_MOSQUITTO="yes" if embedded else ""),
        started("up", topology, "--runtime", runtime, "--runs", runs) as up,
    ):
        _inject(up, runs, runtime, faults)
        output, _ = up.communicate(timeout=120)
    try:
        found = Finished.only_one_in(runs)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"there was no run: {error}\n{output}") from error
    return _judged(found, output, up.returncode, after - calm)


def _inject(up: subprocess.Popen[str], runs: Path, runtime: str, faults: Sequence[Fault]) -> None:
    """Do `faults` in time, as long as the run lives."""
    began = _run_clock(up, runs)
    for fault in sorted(faults, key=lambda fault: fault.at):
        while up.poll() is None and time.monotonic() < began + fault.at:
            time.sleep(0.02)
        if up.poll() is not None:
            return
        _do(fault, next(runs.iterdir()).name, runtime)


def _run_clock(up: subprocess.Popen[str], runs: Path) -> float:
    """The monotonic clock when the run clock started."""
    while up.poll() is None:
        for path in runs.glob("*/events.jsonl"):
            for record in Follower(path).read():
                if isinstance(record, events.RunStarted):
                    return time.monotonic() - (time.time() - record.wall_clock)
        time.sleep(0.05)
    return 0.0


def _do(fault: Fault, name: str, runtime: str) -> None:
    if runtime == "docker":
        container = f"testbed-{name}-{fault.part}"
        subprocess.run(["docker", "kill", container], capture_output=True, check=False)
        return
    signals = {"kill": signal.SIGKILL, "break": signal.SIGUSR1}
    for info in process.find():
        if (info.run, info.part) == (name, fault.part):
            info.process.send_signal(signals[fault.what])


def _judged(run: Finished, output: str, code: int, calm_from: float) -> Outcome:
    wrong = [] if code == 0 else [f"exit code {code}: {output[-600:]}"]
    if not isinstance(run.records[-1], events.RunEnded):
        wrong.append("no end")
    late = {update.client for update in run.updates if update.applied >= calm_from}
    if stuck := sorted(set(CLIENTS) - late):
        wrong.append(f"{', '.join(stuck)} did not go on")
    wrong += [f"{one} was applied twice" for one in _twice(run.updates)]
    validity = run.manifest.get("validity", {})
    end = run.records[-1].at
    return Outcome(
        run,
        output,
        wrong,
        applied=len(run.updates),
        rejected=sum(isinstance(r, events.UpdateRejected) for r in run.records),
        unanswered=sum(isinstance(r, events.RoundUnfinished) and r.at < end for r in run.records),
        reasons=validity.get("reasons", []),
    )


def _twice(updates: Sequence[events.UpdateApplied]) -> Iterator[str]:
    """A client that is started again counts anew, but does not train at the same time."""
    seen: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for one in updates:
        times = seen[one.client, one.sequence]
        if any(abs(one.train_start - other) < _SAME_SECONDS for other in times):
            yield f"update {one.sequence} of {one.client}"
        times.append(one.train_start)


class _environment:  # noqa: N801  (a context manager)
    """With these variables in the environment."""

    def __init__(self, **variables: str) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def drawn(seed: int, runtime: str, until: float) -> tuple[list[Fault], list[dict[str, Any]]]:
    """Faults from outside, and those that a scenario makes, up to `until` seconds of a run."""
    rng = random.Random(seed)  # noqa: S311
    kinds = [("kill", BROKER), ("kill", AGGREGATOR)]
    if runtime == "process":
        kinds += [("break", AGGREGATOR), ("break", rng.choice(CLIENTS))]
    chosen = rng.sample(kinds, k=min(len(kinds), rng.randint(1, 3)))
    faults = [Fault(round(rng.uniform(0.5, until), 2), what, part) for what, part in chosen]
    scenario = []
    for client in rng.sample(CLIENTS, k=rng.randint(0, 2)):
        step = {"at": f"{rng.uniform(0.5, until - 3):.2f}s"}
        match rng.randint(0, 2):
            case 0:
                step |= {"crash": client, "restart_after": "1s"}
            case 1:
                step |= {"pause": client, "for": "2s"}
            case _:
                step |= {"disconnect": client, "for": "2s"}
        scenario.append(step)
    return faults, scenario


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--runtime", choices=("process", "docker"), default="process")
    parser.add_argument("--embedded", action="store_true", help="with the embedded broker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=float, default=28.0)
    asked = parser.parse_args()
    out = sys.stdout
    out.write("seed rule           applied rejected unanswered  faults; what is wrong\n")
    failed = 0
    for index in range(asked.runs):
        seed = asked.seed + index
        rule = RULES[list(RULES)[seed % len(RULES)]]
        faults, scenario = drawn(seed, asked.runtime, asked.after / 2)
        with tempfile.TemporaryDirectory() as folder:
            found = run(
                Path(folder),
                rule,
                faults,
                scenario=scenario,
                runtime=asked.runtime,
                embedded=asked.embedded,
                after=asked.after,
            )
        failed += bool(found.wrong)
        done = [f"{fault.what} {fault.part} {fault.at:g}s" for fault in faults]
        done += [" ".join(map(str, step.values())) for step in scenario]
        out.write(
            f"{seed:>4} {rule['name']:14} {found.applied:>7} {found.rejected:>8} "
            f"{found.unanswered:>10}  {', '.join(done)}; {'; '.join(found.wrong) or 'nothing'}\n"
        )
        out.flush()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
