"""A user's own code: what of it is refused, where, and what it raises."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from agents import user_code
from agents.aggregator import storage
from agents.aggregator.evaluation import Evaluation, Evaluator
from agents.models.flat import first_model
from agents.rules import RULES
from agents.rules.interface import Rule, Server
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.interface import Task
from analysis.load import Run
from testbed import images, simulate, sweeps, topology
from testbed import user_code as inspection
from testbed.data import preparation
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError, RunFailedError
from testbed.images import wheels
from testbed.plan import Plan, model_check
from testbed.run import preparing
from testbed.run.options import Options
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.user_code import UserCode
from tests.running import Testbed

MODULE = """
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
import numpy as np
from agents.config import Count
from agents.rules.interface import Rule, Send, State
from agents.rules.fedavg import FedAvg
from agents.shards import Shard
from agents.tasks.interface import Task

@dataclass(frozen=True)
class Mine(Task):
    dataset: ClassVar[str] = "digits"
    hidden: Count = 4
    layers: list[int] | None = None
    kind: Literal["plain", "odd"] = "plain"
    fails: bool = False
    groups: Literal[1, 2, 4] = 1
    def __post_init__(self):
        if self.hidden > 100:
            raise ValueError(f"hidden is {self.hidden}, expected at most 100")
    def check(self, clients):
        if clients == 3:
            raise ValueError("three is a crowd")
    def model(self):
        from torch import nn
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.Linear(self.hidden, 10))
    def loss(self, outputs, y):
        if self.fails and len(y) == 3:
            return impossible(outputs)
        return Task.loss(self, outputs, y)

def impossible(outputs):
    raise RuntimeError("this cannot be")

@dataclass(frozen=True)
class Made(Mine):
    layers_of: str = "nn.Linear(64, 10)"
    def model(self):
        from torch import nn
        return nn.Sequential(nn.Flatten(), *eval(f"[{self.layers_of}]"))

@dataclass(frozen=True)
class Scored(Mine):
    score: str = "loss"
    def loss(self, outputs, y):
        return eval(self.score, {"loss": Task.loss(self, outputs, y)})

@dataclass(frozen=True)
class Normed(Mine):
    def model(self):
        from torch import nn
        hidden = nn.Linear(64, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 10))


@dataclass(frozen=True)
class Looking(Mine):
    def model(self):
        from torch import nn
        class Look(nn.Linear):
            def forward(self, x):
                return super().forward(x.view(-1, 3))
        return Look(64, 10)

@dataclass(frozen=True)
class Single(Made):
    loss = Task.loss

@dataclass(frozen=True)
class Pair(Single):
    def model(self):
        from torch import nn
        class Both(nn.Linear):
            def forward(self, x):
                return x, x
        return Both(64, 10)


@dataclass(frozen=True)
class Spread(Mine):
    def model(self):
        from torch import nn
        return nn.Linear(8, 10)
    def loss(self, outputs, y):
        return super().loss(outputs.transpose(1, 2), y).mean(1)

@dataclass(frozen=True)
class Unscored(Mine):
    def correct(self, outputs, y):
        return super().correct(outputs, y) if len(y) < 100 else 0.5

@dataclass(frozen=True)
class NoModel(Task):
    dataset: ClassVar[str] = "digits"

@dataclass(frozen=True)
class NoDataset(Task):
    def model(self):
        from torch import nn
        return nn.Linear(3, 2)

@dataclass(frozen=True)
class Elsewhere(Mine):
    dataset: ClassVar[str] = "nowhere"

@dataclass(frozen=True)
class Unknown(Mine):
    call: Callable[[], int] = len

@dataclass(frozen=True)
class Taken(Mine):
    local: int = 1

@dataclass(frozen=True)
class Bringing(Mine):
    seed: int = 0
    wrong: str = ""
    notes: str = "/dev/null"
    def dataset(self):
        with open(self.notes, "a") as file:
            file.write(f"{self.seed} ")
        rng = np.random.default_rng(self.seed)
        train = {"x": rng.normal(size=(100, 64)), "y": np.arange(100) % 10, "client": ["b", "a"] * 50}
        found = {"train": train, "validation": {"x": train["x"][:20], "y": train["y"][:20]}}
        exec(self.wrong)
        return found

@dataclass(frozen=True)
class Sharded(Mine):
    dataset: ClassVar[None] = None
    seed: int = 0
    wrong: str = ""
    def shards(self):
        x, y = np.full((2, 8, 8), self.seed, np.float32), np.arange(2)
        found = [Shard(x, y), Shard(x, y)]
        exec(self.wrong)
        return found

@dataclass(frozen=True)
class Tokens(Mine):
    def model(self):
        from torch import nn
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 7))

class Bare(Task):
    pass

class Other:
    pass

@dataclass(frozen=True)
class Plain(Rule):
    period: Annotated[float, "s"] = 2.0
    def begin(self, server):
        return PlainState(server)

class PlainState(State):
    def __init__(self, server):
        self.server, self.seen = server, [np.zeros(2), {"a"}]
    def update(self, update):
        self.server.w += update.vector
        return [self.server.aggregated([update.contribution(1.0)]), Send(update.client)]

@dataclass(frozen=True)
class Silent(Plain):
    def begin(self, server):
        state = PlainState(server)
        state.__class__ = SilentState
        return state

class SilentState(PlainState):
    def update(self, update): ...

@dataclass(frozen=True)
class Lambda(Plain):
    def begin(self, server):
        state = PlainState(server)
        state.seen = lambda: 1
        return state

@dataclass(frozen=True)
class Partial(Plain):
    def begin(self, server):
        return Abstract()

class Abstract(State):
    pass

@dataclass(frozen=True)
class Late(Plain):
    def begin(self, server):
        return LateState(server)

class LateState(PlainState):
    def update(self, update):
        if update.vector.any():
            raise RuntimeError("one update too many")
        return super().update(update)
"""


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    user_code.use_folder(None)


def write(folder: Path, module: str = MODULE, **changes: Any) -> Path:
    """A topology with own code beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(module)
    plain = {
        "name": "t",
        "code": "own.py",
        "task": {"name": "own:Mine", "local": {"steps": 2, "batch_size": 3, "lr": 0.1}},
        "rule": {"name": "own:Plain"},
        "devices": [{"name": "a", "count": 2, "timing": "1s"}],
        "stop": {"updates": 4},
        "runtime": {"name": "virtual"},
    }
    file = folder / "t.yaml"
    file.write_text(yaml.safe_dump(plain | changes, sort_keys=False))
    return file


def read(folder: Path, module: str = MODULE, **changes: Any) -> Topology:
    return topology.load(write(folder, module, **changes))


def shared(train: Shard, test: Shard | None = None) -> Prepared:
    """Two devices have half of `train` each."""
    halves = np.array_split(np.arange(len(train)), 2)
    return Prepared(train, test or train, dict(zip(("a-1", "a-2"), halves, strict=True)))


def task(name: str = "Mine", **params: Any) -> dict[str, Any]:
    return {"name": f"own:{name}", **params, "local": {"steps": 2, "batch_size": 3, "lr": 0.1}}


def test_parameters_follow_from_annotations(tmp_path: Path) -> None:
    found = read(
        tmp_path, task=task(hidden=7, layers=[1, 2]), rule={"name": "own:Plain", "period": "3s"}
    )
    assert found.task.named.params == {
        "hidden": 7, "layers": (1, 2), "kind": "plain", "fails": False, "groups": 1,
    }  # fmt: skip
    assert found.rule.named.params == {"period": 3.0}
    assert topology.parse(found.to_yaml()).to_yaml() == found.to_yaml()
    assert model_check.check(found) == 64 * 7 + 7 + 7 * 10 + 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": task(hiden=7)}, "t.yaml:5:3: task.hiden: unknown key; did you mean hidden?"),
        ({"task": task(hidden="x")}, "t.yaml:5:11: task.hidden: found 'x', expected a whole number"),
        ({"task": task(kind="od")}, "t.yaml:5:9: task.kind: found 'od', expected plain or odd; did"),
        ({"task": task(groups=3)}, "t.yaml:5:11: task.groups: found 3, expected 1, 2 or 4"),
        ({"task": task(hidden=101)}, "t.yaml:5:11: task.hidden: found 101, expected at most 100"),
        ({"rule": {"name": "own:Plain", "period": 3}}, "rule.period: found 3, expected a duration"),
        ({"devices": [{"name": "a", "count": 3, "timing": "1s"}]}, "task: three is a crowd"),
        ({"task": task("Mein")}, "task.name: the module own has no class Mein; it has Mine, Made, "),
        ({"task": task("NoModel")}, "t.yaml:4:9: task.name: own:NoModel has no method model"),
        ({"task": task("NoDataset")}, "own:NoDataset has no dataset"),
        ({"task": task("Unknown")}, "its parameter call (Callable[[], int]) has a type that a topology"),
        ({"task": task("Taken")}, "own:Taken: the topology has a key named like its parameter local"),
        (
            {"task": task("Elsewhere")},
            "task.name: own:Elsewhere names the dataset 'nowhere', expected digits",
        ),
        ({"task": task("Bare")}, "Bare is not a dataclass"),
        ({"task": task("Other")}, "from agents.tasks.interface import Task"),
        ({"task": task("Plain")}, "Plain is not a task: derive it"),
        ({"rule": {"name": ":Plain"}}, "rule.name: found :Plain, expected module:Class"),
        ({"rule": {"name": "other:Plain"}}, "rule.name: the code has no module other"),
        ({"rule": {"name": "subprocess:Popen"}}, "rule.name: the code has no module subprocess"),
        ({"rule": {"name": "own:Silent"}}, "rule: its update returns None, expected a list of actions"),
        (
            {"rule": {"name": "own:Lambda"}},
            "rule: its state cannot be saved for a restart after a",
        ),
        ({"rule": {"name": "own:Partial"}}, "Can't instantiate abstract class Abstract"),
        ({"code": None}, "own:Mine is a class of your own: add code with its file"),
        ({"code": "nowhere.py"}, "t.yaml:2:7: code: "),
        ({"requirements": ["numpy", "-r x"]}, "requirements[1]: found '-r x', expected a requirement"),
        ({"requirements": ["no-such==9"]}, "requirements[0]: no-such is not installed: "),
        ({"requirements": ["numpy<1"]}, f"{sys.executable} -m pip install 'numpy<1'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_own_code_is_refused_with_its_place(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError) as refused:
        preparing.plan_file(write(tmp_path, **changes), Options())
    assert said in str(refused.value)
    assert "inspection_process.py" not in str(refused.value)


def test_import_error_is_shown_once_with_its_traceback(testbed: Testbed, tmp_path: Path) -> None:
    file = write(tmp_path, "import einops_that_nobody_has\n")
    done = testbed("validate", file)
    assert done.code == 2
    assert done.err.count("Traceback") == done.err.count("ModuleNotFoundError") == 1
    assert f'File "{tmp_path}/own.py", line 1' in done.err
    assert done.err.count("File ") == 1
    assert "python -m pip install" in done.err


@pytest.mark.parametrize(
    ("line", "told"),
    [("from layers import x", "import it as pack.layers"), ("from pack.layer import x", "")],
    ids=["a module beside it", "a misspelt module"],
)
def test_missing_module_of_the_own_code_is_not_to_be_installed(
    testbed: Testbed, tmp_path: Path, line: str, told: str
) -> None:
    file = write(tmp_path, "import pack.model\n", code=".")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "model.py").write_text(line + "\n", encoding="utf-8")
    (tmp_path / "pack" / "layers.py").write_text("x = 1\n", encoding="utf-8")
    done = testbed("validate", file)
    assert (done.code, told in done.err, "pip" in done.err) == (2, True, False), done.err


def test_own_code_that_exits_the_process_is_reported(testbed: Testbed, tmp_path: Path) -> None:
    done = testbed("validate", write(tmp_path, "import os\nprint('bye')\nos._exit(5)\n"))
    assert done.code == 2
    assert "own:Mine" in done.err
    assert "ended without an answer\n    bye" in done.err


def test_copies_that_a_killed_process_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in use are kept, also by another process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import sys; from pathlib import Path; from testbed.user_code import Inspector;"
        "own = Inspector(lambda folder: folder.mkdir(), Path()); print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        (left,) = tmp_path.iterdir()
        inspection.remove_leftovers()
        assert [*tmp_path.iterdir()] == [left]
        other.kill()
    own = inspection.Inspector(lambda folder: folder.mkdir(), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept != left
    inspection.remove_leftovers()
    assert kept.is_dir()
    del own
    assert not kept.exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"queue.py": ""}, "has a module queue, a name that Python already uses"),
        ({"torch/__init__.py": ""}, "has a module torch, a name that Python already uses"),
        ({"notes.txt": ""}, "has no Python module"),
        ({"a.py": "", "data.bin": "x" * (1 + 16 * 2**20)}, "has more than 1000 files or 16 MiB"),
    ],
    ids=["standard library", "installed", "nothing", "too much"],
)
def test_unusable_code_folder_is_refused(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        UserCode.read(tmp_path)


def test_package_is_imported_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(MODULE)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "own.pyc").write_bytes(b"")
    code = UserCode.read(package)
    assert sorted(code.files) == ["pack/__init__.py", "pack/own.py"]
    found = read(tmp_path, code="pack", task=task() | {"name": "pack.own:Mine"}, rule={"name": "fedavg"})
    assert found.task.build().dataset == "digits"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            task("Made", layers_of="nn.Linear(64, 9)"),
            "cannot run: found class 9, but the model has 9 outputs, for classes 0 to 8",
        ),
        (task("Spread"), "each sample has one class as its label, but outputs of shape 8×10: name a"),
        (
            task("Made", layers_of="nn.Linear(65, 10)"),
            "its model does not accept inputs of shape 8×8, float32: mat1 and mat2 shapes ",
        ),
        (task("Looking"), r"8×8, float32: shape '\[-1, 3\]' is .* \(own.py, line \d+\)"),
        (
            task("Single", layers_of="nn.Linear(64, 1), nn.Flatten(0)"),
            r"returns a tensor of shape \(65,\), but the cross-entropy takes scores of",
        ),
        (task("Pair"), "its model returns a tuple, but the cross-entropy takes scores"),
        (task("Scored", score="loss / 0 - loss / 0"), "own:Scored cannot run: its loss is nan"),
        (
            task("Scored", score="loss.mean()"),
            r"its loss has the shape \(\), expected one value for each of \d+ samples",
        ),
    ],
)
def test_one_step_is_tried_before_launch(chosen: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The step uses samples of every label."""
    x, y = np.ones((500, 8, 8), np.float32), np.zeros(500, np.int64)
    y[-1] = 9
    model_check.try_step(read(tmp_path), shared(Shard(x, y)))
    with pytest.raises(BadInputError, match=said) as raised:
        model_check.try_step(read(tmp_path, task=chosen), shared(Shard(x, y)))
    assert "Traceback" not in str(raised.value)
    y[0] = -1
    with pytest.raises(BadInputError, match="found class -1, but the model has 10 outputs"):
        model_check.try_step(read(tmp_path), shared(Shard(x, y)))


def test_error_of_a_virtual_device_names_the_device(tmp_path: Path) -> None:
    late = write(tmp_path / "late", rule={"name": "own:Late"})
    with pytest.raises(RunFailedError, match="one update too many"):
        simulate(late, runs=tmp_path / "runs")
    file = write(tmp_path, task=task(fails=True))
    with pytest.raises(RunFailedError, match=r"^own:Mine and own:Plain failed:") as raised:
        simulate(file, runs=tmp_path / "runs")
    told = str(raised.value)
    assert told.count("Traceback") == told.count("RuntimeError: this cannot be") == 1
    assert "in the training of a-1" in told
    assert told.index("in loss") < told.index("in impossible")
    assert "agents/" not in told
    assert "testbed/" not in told.replace(str(tmp_path), "")


def test_evaluation_error_is_attributed_to_own_code(tmp_path: Path) -> None:
    """This includes errors raised by the consumer of its result."""
    file = write(tmp_path, task=task("Unscored"))
    with pytest.raises(RunFailedError, match=r"^own:Unscored and own:Plain failed:") as raised:
        simulate(file, runs=tmp_path / "runs")
    assert str(raised.value).endswith("in the evaluation of version 0")
    assert "has no attribute 'double'" in str(raised.value)


def test_aggregator_reports_an_evaluation_error(tmp_path: Path) -> None:
    write(tmp_path)
    user_code.use_folder(str(tmp_path))
    mine = user_code.find_class("own:Unscored", TASKS, Task)()
    samples = Shard(np.ones((100, 8, 8), np.float32), np.zeros(100, np.int64))
    done: Future[Future[Evaluation]] = Future()
    Evaluator(mine, samples, done.set_result).submit(3, first_model(mine, 0)[0])
    error = done.result(timeout=120).exception()
    assert error is not None
    assert user_code.is_caused_by_user_code(error, "own:Unscored")
    assert not user_code.is_caused_by_user_code(error, "digits-logreg")
    told = "AttributeError: 'float' object has no attribute 'double'\nin the evaluation of version 3"
    assert user_code.user_traceback(error) == told


def learning(name: str, **more: Any) -> dict[str, Any]:
    local = {"steps": 30, "batch_size": 32, "lr": 0.3}
    return {"name": f"own:{name}", "local": local, **more}


@pytest.mark.parametrize(
    ("name", "frozen", "initial"),
    [
        ("Mine", ["1.*"], ""),
        ("Normed", [], ""),
        ("Normed", ["1.*"], "first.pt"),
        ("Normed", [], "runs/{run}/models/final.safetensors"),
    ],
)
def test_own_tasks_initialise_freeze_and_learn_like_built_in_ones(
    name: str, frozen: list[str], initial: str, testbed: Testbed, tmp_path: Path
) -> None:
    """The run has compressed updates, and `model` and `evaluate` use its own code afterwards."""
    if initial.endswith(".pt"):
        torch.save(first := fresh(tmp_path, name), tmp_path / initial)
    elif initial:
        before = run(tmp_path, task=learning(name))
        initial = initial.format(run=before.path.name)
        first = saved(testbed, before.path)
    given = {"frozen": frozen, **({"initial": initial} if initial else {})}
    done = run(tmp_path, task=learning(name, **given))
    assert replay(RunDirectory(done.path)).updates == len(done.updates) >= 20
    assert done.evaluations["accuracy"].iloc[-1] > (0.3 if frozen else 0.7)  # of ten classes
    assert done.updates["bytes"].max() < done.updates["bytes_before"].min()
    begun, ended = saved(testbed, done.path, "--version", "0"), saved(testbed, done.path)
    if initial:
        assert all(begun[key].equal(first[key]) for key in first)
    same = {key for key in begun if begun[key].equal(ended[key])}
    assert same == ({key for key in begun if key[0] == "1"} if frozen else set())
    assert name == "Mine" or ended["2.num_batches_tracked"] > 0
    told = testbed("evaluate", done.path, "--json")
    assert told.code == 0, told.err
    final = next(row for row in json.loads(told.out) if row["model"] == "final")
    assert final["accuracy"] == pytest.approx(done.evaluations["accuracy"].iloc[-1])


def run(folder: Path, **changes: Any) -> Run:
    """Simulate the run with updates compressed to 8-bit integers."""
    link = {"up": "1mbit", "compression": {"kind": "int8", "chunk": 64}}
    plain = {
        "rule": {"name": "fedbuff", "buffer_size": 2},
        "devices": [{"name": "a", "count": 2, "timing": "1s", "link": link}],
        "stop": {"updates": 20},
        "durability": "recording",
    }
    return simulate(write(folder, **(plain | changes)), runs=folder / "runs")


def saved(testbed: Testbed, path: Path, *options: str) -> dict[str, torch.Tensor]:
    """Return the tensors that `testbed export --model` writes."""
    done = testbed("export", path, "--model", *options, "--to", path / "model.pt")
    assert done.code == 0, done.err
    found: dict[str, torch.Tensor] = torch.load(path / "model.pt", weights_only=True)
    return found


def fresh(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A state of the model of `name`, other than the one that a run begins with."""
    write(folder)
    user_code.use_folder(str(folder))
    torch.manual_seed(99)
    state: dict[str, torch.Tensor] = (
        user_code.find_class(f"own:{name}", TASKS, Task)().model().state_dict()
    )
    return state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"frozen": ["9.*"]},
            "t.yaml:10:5: task.frozen[0]: found '9.*', which matches no parameter of own:Normed",
        ),
        ({"frozen": ["*"]}, "own:Normed cannot run: the model has no parameters to train"),
        (
            {"initial": "other.pt"},
            "other.pt: 1.weight has shape [4, 64], expected [8, 64]; ",
        ),
        ({"initial": "none.pt"}, "No such file or directory. Expected safetensors, or a state dict"),
        ({"data": {"path": "wide.npz", "input": "x", "label": "y"}}, "mat1 and mat2 shapes cannot be "),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_unsupported_keys_of_an_own_task_are_refused(
    change: dict[str, Any], said: str, testbed: Testbed, tmp_path: Path
) -> None:
    torch.save(fresh(tmp_path, "Mine"), tmp_path / "other.pt")
    np.savez(tmp_path / "wide.npz", x=np.ones((40, 65)), y=np.arange(40) % 10)
    file = write(tmp_path, task=learning("Normed", **change))
    told = testbed("up", file, "--runs", tmp_path / "runs")
    assert told.code == 2
    assert said in " ".join(told.err.split())
    assert "inspection_process.py" not in told.err


def test_own_task_needs_no_dataset_if_the_topology_names_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.ones((40, 3)), y=np.arange(40) % 2)
    data = {"path": "mine.npz", "input": "x", "label": "y"}
    done = simulate(write(tmp_path, task={**task("NoDataset"), "data": data}), runs=tmp_path / "runs")
    assert len(done.updates) == 4


def test_dataset_of_an_own_task_is_made_once(testbed: Testbed, tmp_path: Path) -> None:
    made = tmp_path / "made"
    names = "train['client'] = np.array(['b', 'a'] * 50, object)"  # as pandas has them
    more = {"partition": {"scheme": "natural"}, "notes": str(made), "wrong": names}
    bringing = learning("Bringing", **more)
    evaluate = {"on": "validation", "devices": 10}
    done = run(tmp_path, task=bringing, evaluate=evaluate)
    assert sum(done.manifest["devices"]["a-1"]["labels"][::2]) == 0  # a has the odd ones
    assert [device["samples"] for device in done.manifest["devices"].values()] == [37, 43]
    assert "20 to test were set aside" in done.manifest["data"][0]
    told = testbed("evaluate", done.path, "--json")  # by the run's copy of the code
    assert json.loads(told.out)[0]["samples"] == 20
    assert preparation.known_samples(read(tmp_path, task=bringing), None) == {"a-1": 37, "a-2": 43}
    assert made.read_text() == "0 "
    preparation.prepare(read(tmp_path, task=learning("Bringing", seed=1, **more)), None)
    preparation.prepare(read(tmp_path, MODULE + "#", task=bringing), None)
    assert made.read_text() == "0 1 0 "


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("found.clear()", 'its dataset() has , expected {"train": {"x": x, "y": y}}'),
        ("found['training'] = 1", "its dataset() has 'training', expected only train, test, validation"),
        ("found['train'] = 1", "train is <class 'int'>, expected"),
        ("train['z'] = 1", "train has 'z', expected only x, y, client"),
        ("train['x'] = ['a'] * 100", "x of train holds <U1, expected numbers"),
        ("train['x'] = [[1], [1, 2]]", "x of train is not an array"),
        ("train['y'] = [1]", "train of its dataset()"),
        ("train['x'][3, 1] = np.nan", "train of its dataset(), input, row 3: value is not a number"),
        ("train['y'] = np.array(['a', np.nan] * 50, object)", "y of train holds nan among names"),
        ("train['y'] = np.arange(100) - 1", "train of its dataset(), column y"),
        ("del found['validation']['y']", "found 'y', expected a column of validation of its dataset()"),
        (
            "found['test'] = {'x': np.ones((5, 63)), 'y': [1] * 5}",
            "has float32, shape 63, but the",
        ),
        (
            "found['test'] = {'x': np.ones((0, 64)), 'y': np.ones(0, int)}",
            "test of its dataset() has no ",
        ),
        ("train['y'] = np.arange(100)", ", but the model has 10 outputs"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_dataset_is_refused(wrong: str, said: str, tmp_path: Path) -> None:
    parsed = read(tmp_path, task=learning("Bringing", wrong=wrong))
    with pytest.raises(BadInputError) as refused:
        model_check.try_step(parsed, preparation.prepare(parsed, None))
    told = str(refused.value)
    assert said in told
    assert "inspection_process.py" not in told
    assert ("t.yaml:4:9: task.name: " in told) == ("Traceback" not in told)


def test_labels_of_the_test_set_are_checked_with_the_model(tmp_path: Path) -> None:
    """The check evaluates without training: BatchNorm then accepts a test set of one sample."""
    train = Shard(np.ones((20, 8, 8), np.float32), np.arange(20) % 9)
    normed = read(tmp_path, task=task("Normed"))
    model_check.try_step(normed, shared(train, Shard(train.x[:1], train.y[:1])))
    told = "own:Normed cannot be evaluated on the test set: found class 10, but the model has 10 outputs"
    with pytest.raises(BadInputError, match=told):
        model_check.try_step(normed, shared(train, Shard(train.x, np.arange(20) % 11)))


def test_final_mini_batch_of_one_sample_is_tried(tmp_path: Path) -> None:
    """Both devices have ten samples, and in two steps train on six of them."""
    prepared = shared(Shard(np.ones((20, 8, 8), np.float32), np.arange(20) % 10))
    plain, normed = task(), task("Normed")
    model_check.try_step(read(tmp_path, task=normed), prepared)
    for one in plain, normed:
        one["local"] = {"epochs": 1, "batch_size": 3}
    model_check.try_step(read(tmp_path, task=plain), prepared)
    with pytest.raises(BadInputError, match="of a-1 has only one: it has 10 samples"):
        model_check.try_step(read(tmp_path, task=normed), prepared)


def test_too_long_answer_is_not_called_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_MAX_ANSWER", 10)
    unseen = f"{MODULE}\n# answers about this text are not known from another test\n"
    with pytest.raises(BadInputError, match="has more than 10 bytes"):
        read(tmp_path, unseen, task=task("Mine"))


def test_trial_step_gets_integer_tokens(tmp_path: Path) -> None:
    tokens = Shard(np.array([[1, 2], [0, 6]], np.int8), np.array([3, 4]))
    model_check.try_step(read(tmp_path, task=task("Tokens")), shared(tokens))


def test_shards_are_separate_per_parameters(tmp_path: Path) -> None:
    one, other = (read(tmp_path, task=task("Sharded", seed=seed)) for seed in (1, 2))
    found = [preparation.prepare(each, None).train.x.max() for each in (one, other, one)]
    assert found == [1, 2, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("del found[1]", "its shards has 1, expected one for each of 2 devices"),
        ("found[1] = 1", "its shards has 1, expected an agents.shards.Shard each"),
        (
            "found[1] = Shard(x[:0], y[:0])",
            "its shards[1] has 0 inputs and 0 labels, expected the same",
        ),
        ("found[1] = Shard(x, y[:1])", "its shards[1] has 2 inputs and 1 labels, expected the same"),
        (
            "found[1] = Shard(x, y, 0.5)",
            "scale 0.5, but the first one has inputs float32 of shape (8, 8)",
        ),
        ("found[1] = Shard(x.astype(np.uint8), y)", "its shards[1] has inputs uint8 of shape (8, 8), "),
        ("found[1] = Shard(x[:, 0], y)", "its shards[1] has inputs float32 of shape (8,), labels int64"),
        (
            "found[1] = Shard(x, y[:, None])",
            "labels int64 of shape (1,), scale 1.0, but the first one has",
        ),
        ("raise ValueError('no data')", "ValueError: no data"),
    ],
)
def test_invalid_shards_are_refused(wrong: str, said: str, tmp_path: Path) -> None:
    parsed = read(tmp_path, task=task("Sharded", wrong=wrong))
    for known in (preparation.known_samples, preparation.prepare):
        with pytest.raises(BadInputError) as refused:
            known(parsed, None)
        told = str(refused.value)
        assert said in told
        assert ("t.yaml:4:9: task.name: own:Sharded cannot run: " in told) == ("Traceback" not in told)


def test_a_natural_partition_needs_clients(testbed: Testbed, tmp_path: Path) -> None:
    task = learning("Bringing", wrong="del train['client']", partition={"scheme": "natural"})
    told = testbed("data", write(tmp_path, task=task))
    assert told.code == 2
    assert "add client to what the task's dataset() returns" in " ".join(told.err.split())


def test_client_error_shows_only_own_code_in_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    user_code.use_folder(str(tmp_path))
    mine = user_code.find_class("own:Mine", TASKS, Task)
    with pytest.raises(SystemExit) as ended, user_code.exit_if_user_code_fails("own:Mine"):
        mine(fails=True).loss(None, [1, 2, 3])  # type: ignore[call-arg, arg-type]
    assert ended.value.code == user_code.FAILED
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.count("File ") == 2
    assert said.endswith("RuntimeError: this cannot be\n")
    with pytest.raises(RuntimeError), user_code.exit_if_user_code_fails("digits-logreg"):  # ours is ours
        raise RuntimeError


def test_state_with_own_classes_is_saved_and_loaded(tmp_path: Path) -> None:
    write(tmp_path)
    user_code.use_folder(str(tmp_path))
    rule = user_code.find_class("own:Plain", RULES, Rule)()
    server = Server(np.ones(2, np.float32), {"a": 1.0}, np.random.default_rng(0))
    storage.save_snapshot(rule.begin(server), tmp_path / "state")
    assert storage.load_snapshot(tmp_path / "state").server.w.tolist() == [1, 1]
    user_code.use_folder(None)
    with pytest.raises(storage.SnapshotError, match=r"own\.PlainState"):
        storage.load_snapshot(tmp_path / "state")


def test_one_process_can_run_several_code_versions(tmp_path: Path) -> None:
    versions = []
    for period in ("2.0", "5.0"):
        write(tmp_path / period, MODULE.replace("2.0", period))
        user_code.use_folder(str(tmp_path / period))
        versions.append(user_code.find_class("own:Plain", RULES, Rule)().period)  # type: ignore[attr-defined]
    assert versions == [2.0, 5.0]
    assert not list(tmp_path.rglob("*.pyc"))


def test_sweep_identifies_own_code_by_content(tmp_path: Path) -> None:
    def fingerprint(folder: str, module: str = MODULE) -> str:
        write(tmp_path / folder, module)
        study = sweeps.from_mapping({"topology": "t.yaml"}, "study", tmp_path / folder, Options())
        return study.cells[0].fingerprint

    first = fingerprint("one")
    assert fingerprint("two") == first
    assert fingerprint("one", MODULE + "# changed\n") != first


def test_run_resumes_only_with_unchanged_code(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "t-1")
    preparing.write_inputs(read(tmp_path), Plan(runtime="virtual", devices=()), directory)
    kept = topology.load(directory.topology)
    assert kept.code == str(directory.code)
    preparing.check_code(kept, directory)
    (directory.code / "own.py").write_text(MODULE + "# changed\n")
    with pytest.raises(BadInputError, match="code has changed since the run began"):
        preparing.check_code(topology.load(directory.topology), directory)


def test_code_change_rebuilds_only_the_code_layer() -> None:
    def tags(digest: str, *requirements: str) -> dict[str, str]:
        own = images.ImageAdditions("mine", digest, lambda _: None, requirements)
        return images.added_tags(own, "testbed-agent:1")

    plain, changed = tags("a"), tags("b")
    assert plain.keys() == {"code"}
    assert plain != changed
    first, second, other = tags("a", "x"), tags("b", "x"), tags("a", "y")
    assert first["requirements"] == second["requirements"] != other["requirements"]
    assert len({tag["code"] for tag in (plain, changed, first, second, other)}) == 5


def test_wheels_of_requirements_are_fetched_or_pip_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's pip configuration applies: here a folder, and no index."""
    import threading

    ours, scratch = tmp_path / "ours", tmp_path / "scratch"
    for folder in (ours, scratch, tmp_path / "cache" / "testbed"):
        folder.mkdir(parents=True)
    for folder, name, needs in ((ours, "base", ""), (tmp_path, "thing", "Requires-Dist: base\n")):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = wheels.fetch_more_wheels(("thing",), ours, "x86_64", scratch, threading.Event())
    assert [wheel.name for wheel in found.iterdir()] == ["thing-1.0-py3-none-any.whl"]
    with pytest.raises(BadInputError, match=r"(?s)cannot be installed.*No matching .*absent"):
        wheels.fetch_more_wheels(("absent",), ours, "x86_64", scratch, threading.Event())


@pytest.mark.parametrize("kind", ["task", "rule", "topology"])
def test_new_project_runs_and_overwrites_nothing(
    kind: str, testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = testbed("new", kind, "first-try")
    assert done.code == 0, done.err
    quick: dict[str, Any] = {
        "runtime": {"name": "virtual"},
        "virtual": {"step_time": "1ms"},
        "stop": {"updates": 5},
    }
    run = simulate(tmp_path / "first-try.yaml", runs=tmp_path / "runs", **quick)
    assert len(run.updates) >= 5
    again = testbed("new", kind, "first-try")
    assert again.code == 2
    assert "would be overwritten" in again.err
    assert testbed("new", kind, "../x").code == 2


def test_schema_accepts_own_classes() -> None:
    properties = topology.json_schema()["properties"]
    for part, pattern in (("task", r"^([\w.]+:\w+|flower)$"), ("rule", r"^[\w.]+:\w+$")):
        *_, own = properties[part]["oneOf"]
        assert own["properties"]["name"]["pattern"] == pattern
