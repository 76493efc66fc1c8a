"""SCAFFOLD and FedDyn of `topologies/own/` in whole runs, against plain loops of their equations."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import testbed as api
from agents import events, user_code
from agents.client.training import make_trainer
from agents.config import LocalTraining
from agents.rules.client_half import Terms
from agents.tasks.logreg import DigitsLogreg
from agents.wire import payloads
from testbed import topology as topologies
from testbed.data import preparation
from testbed.errors import BadInputError
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.virtual.stacked_training import BatchTrainer, Job
from tests.running import (
    TOPOLOGIES,
    Finished,
    Testbed,
    left_as_processes,
    started,
    until_printed,
)

pytestmark = pytest.mark.usefixtures("forked_programs")
OWN = TOPOLOGIES / "own"
STEPS, LR, L2, ALPHA, SERVER_LR = 4, 0.2, 1e-4, 0.3, 0.7
N = 4
Floats = NDArray[np.float64]
Gradients = dict[str, Callable[[Floats], Floats]]
"""Gradient of each client's objective on its whole shard."""


def written(folder: Path, name: str, **changes: Any) -> Path:
    """The example `name` with full batches, so that no random numbers are drawn but for sampling."""
    plain = yaml.safe_load((OWN / f"{name}.yaml").read_text(encoding="utf-8"))
    plain["code"] = str(OWN / f"{name}.py")
    plain["task"]["local"] = {"steps": STEPS, "batch_size": 2000, "lr": LR}
    plain["rule"].pop("alpha", None)
    plain["rule"] |= {"alpha": ALPHA} if name == "feddyn" else {"server_lr": SERVER_LR}
    plain |= {"durability": "recording", "runtime": {"name": "virtual"}}
    plain["devices"] = [{"name": "d", "count": N, "timing": "1s"}]
    plain["rule"]["sample"] = 3
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(plain | changes))
    return file


def gradients(file: Path) -> Gradients:
    """Gradients of softmax regression on the shards of the topology, in float64."""
    prepared = preparation.prepare(topologies.load(file), None)

    def gradient(client: str) -> Callable[[Floats], Floats]:
        shard = prepared.shard(client)
        x, y = shard.x.reshape(len(shard), 64) * float(shard.scale), shard.y

        def at(w: Floats) -> Floats:
            scores = x @ w[:640].reshape(10, 64).T + w[640:]
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(y)), y] -= 1
            p /= len(y)
            return np.concatenate([(p.T @ x).ravel(), p.sum(0)]) + L2 * w

        return at

    return {client: gradient(client) for client in prepared.indices}


def scaffold(of: Gradients, rounds: Sequence[Sequence[str]]) -> Floats:
    """Karimireddy et al. 2020, Algorithm 1, option II."""
    x, c = np.zeros(650), np.zeros(650)
    own = {client: np.zeros(650) for client in of}
    for clients in rounds:
        moved, changed = np.zeros(650), np.zeros(650)
        for client in clients:
            y = x.copy()
            for _ in range(STEPS):
                y -= LR * (of[client](y) - own[client] + c)
            new = own[client] - c + (x - y) / (STEPS * LR)
            moved, changed = moved + y - x, changed + new - own[client]
            own[client] = new
        x, c = x + SERVER_LR * moved / len(clients), c + changed / N
    return x


def feddyn(of: Gradients, rounds: Sequence[Sequence[str]]) -> Floats:
    """Acar et al. 2021, Algorithm 1, with steps of gradient descent for the local minimum."""
    w, h = np.zeros(650), np.zeros(650)
    own = {client: np.zeros(650) for client in of}
    for clients in rounds:
        ends = []
        for client in clients:
            y = w.copy()
            for _ in range(STEPS):
                y -= LR * (of[client](y) - own[client] + ALPHA * (y - w))
            own[client] = own[client] - ALPHA * (y - w)
            ends.append(y)
        h = h - ALPHA * sum(end - w for end in ends) / N
        w = sum(ends) / len(ends) - h / ALPHA
    return w


LOOPS = {"scaffold": scaffold, "feddyn": feddyn}


def rounds_of(updates: Sequence[events.UpdateApplied]) -> list[list[str]]:
    """The clients of each round, in order."""
    last = updates[-1].applied_version
    return [[u.client for u in updates if u.applied_version == n] for n in range(1, last + 1)]


def check(run: Path, file: Path, name: str) -> Finished:
    """Compare the run's last model with the plain loop; replay the run."""
    found = Finished(run, list(events.read(run / "events.jsonl")))
    final, _, _ = payloads.unpack((run / "models" / "final.safetensors").read_bytes())
    expected = LOOPS[name](gradients(file), rounds_of(found.updates))
    np.testing.assert_allclose(final, expected, rtol=1e-4, atol=2e-6)
    assert np.abs(expected).max() > 0.05
    assert replay(RunDirectory(run)).updates == len(found.updates)
    return found


@pytest.fixture(autouse=True)
def _no_code_stays_in_use() -> Any:
    yield
    user_code.use_folder(None)


@pytest.mark.parametrize("name", LOOPS)
def test_virtual_run_equals_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Clients crash, in a training and between two, and leave: what they remember stays, and a training
    that is lost changes nothing."""
    scenario = [
        {"at": "3500ms", "crash": "d-1", "restart_after": "1s"},
        {"at": "7200ms", "crash": "d-2", "restart_after": "100ms"},
        {"at": "10500ms", "leave": "d-3"},
        {"at": "14500ms", "join": "d-3"},
    ]
    stop = {"after": "25s"}
    file = written(tmp_path, name, scenario=scenario, stop=stop)
    run = api.simulate(file, runs=tmp_path / "runs")
    found = check(run.path, file, name)
    sizes = {len(clients) for clients in rounds_of(found.updates)}
    assert sizes >= {2, 3}
    assert len({update.client for update in found.updates}) == N


def test_killed_run_of_processes_resumes_and_equals_the_plain_loop(
    testbed: Testbed, tmp_path: Path
) -> None:
    name = "scaffold"
    devices = [{"name": "d", "count": N, "cpu": 0.1, "timing": "100ms"}]
    file = written(tmp_path, name, devices=devices, stop={"updates": 200}, runtime={"name": "process"})
    runs = tmp_path / "runs"
    with started("up", file, "--runs", runs) as up:
        until_printed(up, "version")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (run,) = runs.iterdir()
    while left_as_processes(run.name):
        time.sleep(0.05)
    resumed = testbed("up", "--resume", run.name, "--runs", runs)
    assert resumed.code == 0, resumed.out + resumed.err
    found = check(run, file, name)
    assert sum(isinstance(record, events.RunStarted) for record in found.records) == 2


def test_vectors_take_bytes_and_time_on_the_link(tmp_path: Path) -> None:
    """A model and an update of SCAFFOLD are twice as large as one of FedDyn; compression leaves the
    vector whole, because it is not declared `compressed`."""
    link = {"up": "40kbit", "down": "40kbit"}
    sizes, times = {}, {}
    for name, more in (("feddyn", {}), ("scaffold", {}), ("scaffold int8", {"compression": "int8"})):
        kind = {"kind": more["compression"]} if more else None
        own = link if kind is None else {**link, "compression": kind}
        devices = [{"name": "d", "count": N, "timing": "1s", "link": own}]
        file = written(tmp_path, name.split()[0], devices=devices, stop={"updates": 3})
        first = api.simulate(file, runs=tmp_path / name).updates.iloc[0]
        sizes[name] = first["bytes"], first["bytes_before"]
        times[name] = first["downloaded"] - first["dispatched"], first["arrived"] - first["sent"]
    (plain, _), (both, before), (packed, unpacked) = sizes.values()
    assert before == both
    assert both - plain == pytest.approx(4 * 650, abs=90)
    assert plain / 4 < packed - 4 * 650 < plain / 2
    assert unpacked == pytest.approx(both, abs=100)  # numbers of the header have more digits
    for direction in (0, 1):
        longer = times["scaffold"][direction] - times["feddyn"][direction]
        assert longer == pytest.approx(4 * 650 * 8 / 40_000, rel=0.1)


WRONG = """
from dataclasses import dataclass
import numpy as np
from agents.rules.interface import Answer, ClientHalf, ClientSide, Rule, Send, State, Sums
from agents.tasks.logreg import DigitsLogreg
from scaffold import Scaffold, ScaffoldClient, ScaffoldState

@dataclass(frozen=True)
class Wrong(Scaffold):
    def begin(self, server):
        return WrongState(self, server)
    def begin_client(self, settings):
        return WrongClient(self.client_side, settings)
    REST

class WrongState(ScaffoldState):
    SERVER

class WrongClient(ScaffoldClient):
    CLIENT

@dataclass(frozen=True)
class Fitting(DigitsLogreg):
    fits = True
    def fit(self, module, shard, lr):
        return 0.0
"""
SUMMING = "def sums(self): return Sums(2)"
SECURE = {"privacy": {"secure": {"colluding": 1, "needed": 2}}}


def refused(folder: Path, rest: str = "", server: str = "", client: str = "", **changes: Any) -> str:
    """Why the rule `Wrong` with these methods is refused before the run."""
    code = folder / "code"
    code.mkdir()
    (code / "scaffold.py").write_text((OWN / "scaffold.py").read_text(encoding="utf-8"))
    text = WRONG.replace("REST", rest or "pass").replace("SERVER", server or "pass")
    (code / "wrong.py").write_text(text.replace("CLIENT", client or "pass"))
    with pytest.raises(BadInputError) as error:
        topologies.load(
            written(folder, "scaffold", code=str(code), rule={"name": "wrong:Wrong"}, **changes)
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("methods", "changes", "reason"),
    [
        (
            {"rest": "client_side = property(lambda _: ClientSide(memory={'A': 3}))"},
            {},
            "its client_side is invalid: memory has the name 'A'",
        ),
        (
            {"server": "def start(self): return [Send(c) for c in self.server.clients]"},
            {},
            "does not declare what it does: Send of start: no vector control, which the rule declares",
        ),
        (
            {"server": "def join(self, client): return State.join(self, client)"},
            {},
            "Send of join: no vector control",
        ),
        (
            {"client": "def answer(self, result): return Answer()"},
            {},
            "answer: no vector control, which the rule declares",
        ),
        (
            {"client": "def answer(self, result): result.memory['control'] += 1"},
            {},
            "KeyError: 'control'",
        ),
        (
            {"rest": "def begin_client(self, settings): return 3"},
            {},
            "its begin_client returns 3, expected a ClientHalf",
        ),
        (
            {"rest": SUMMING},
            SECURE,
            "send the vector control with their updates, which would not be masked",
        ),
        ({"rest": SUMMING}, SECURE, "clients of wrong:Wrong remember what they sent, but a sum"),
        (
            {},
            {"privacy": {"differential": {"clip": 1.0, "noise": 1.0}}},
            "send the vector control with their updates, which would not get the noise",
        ),
        (
            {},
            {"task": {"name": "wrong:Fitting", "local": {"steps": 1}}},
            "wrong:Wrong adds terms to the local objective, but wrong:Fitting trains by its own code",
        ),
    ],
)
def test_rule_that_cannot_run_is_refused_with_the_reason(
    methods: dict[str, str], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refused(tmp_path, **methods, **changes)


def test_stacked_training_adds_the_same_terms_as_a_client(tmp_path: Path) -> None:
    """With momentum and weight decay, two jobs with terms and one without."""
    rng = np.random.default_rng(0)
    prepared = preparation.prepare(topologies.load(written(tmp_path, "feddyn")), None)
    train, task = prepared.train, DigitsLogreg()
    local = LocalTraining(steps=5, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01, proximal=0.1)
    start = rng.normal(0, 0.1, 650).astype(np.float32)
    linear = rng.normal(0, 0.1, 650).astype(np.float32)
    terms = [Terms(linear, 0.5), Terms(), Terms(proximal=1.0)]
    jobs = [
        Job(
            start=start,
            indices=prepared.indices[f"d-{k + 1}"],
            local=local,
            lr=0.1,
            steps=5,
            rng=lambda: np.random.default_rng(5),
            terms=one,
        )
        for k, one in enumerate(terms)
    ]
    stacked = BatchTrainer(task, train).run(jobs)
    for job, outcome in zip(jobs, stacked, strict=True):
        trainer = make_trainer(task, train.subset(job.indices), local)
        alone = trainer.train(start, np.random.default_rng(5), 0.1, terms=job.terms)
        np.testing.assert_allclose(outcome.end, alone.end, rtol=1e-4, atol=1e-5)
        assert outcome.loss == pytest.approx(alone.loss, rel=1e-4)
