"""Flower ClientApps, unchanged, as clients: `tests/flower_app`, which is as `flwr new` writes it, and
what other apps do: metrics by many names, evaluation at the server, a strategy's config."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from agents import events, user_code
from agents.aggregator.evaluation import Evaluator
from agents.client.training import FitTrainer, make_trainer
from agents.config import LocalTraining
from agents.device_actions import Crash, SetCpu
from agents.shards import Shard
from agents.tasks.flower import Flower
from testbed import BadInputError, simulate, up
from testbed.api.topology_input import text_of
from testbed.topology import parse
from tests.conftest import unavailable

pytestmark = pytest.mark.usefixtures("forked_programs")
APP = Path(__file__).parent / "flower_app"
QUICKSTARTS = Path(sys.prefix, "share", "flower-quickstarts", "flwr", "cli", "new", "templates", "app")
"""Templates of `flwr new`, from the last version of Flower that has them in its package."""
ONE = [np.zeros(2, np.float32)]
VISION = '''
"""Stand-ins for the three transforms of torchvision that the app imports."""
import numpy as np
import torch
ToTensor = lambda: lambda image: torch.tensor(np.asarray(image) / 255).float().permute(2, 0, 1)
Normalize = lambda mean, std: lambda image: (image - mean[0]) / std[0]
def Compose(steps):
    def apply(image):
        for step in steps:
            image = step(image)
        return image
    return apply
'''


@pytest.fixture(autouse=True)
def _flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        unavailable("flwr", "pip install flwr")


def topology(
    folder: Path, files: Mapping[str, str] | None = None, updates: int = 3, **task: Any
) -> Path:
    """A topology whose code is the package `app` with `files`, or `flower_app`."""
    name, requirements = "app", list[str]()
    if files is None:
        name, requirements = "flower_app", ["flwr", "scikit-learn"]
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(APP, folder / "project" / name, ignore=ignored, dirs_exist_ok=True)
        task = {"run_config": "local-epochs=1", **task}
    for file, text in {"__init__.py": "", **files}.items() if files else ():
        (folder / "project" / name).mkdir(parents=True, exist_ok=True)
        (folder / "project" / name / file).write_text(text)
    local = {"steps": 1, "lr": 0.1}
    whole = {
        "name": "flower",
        "seed": 3,
        "code": "project",
        "requirements": requirements,
        "task": {"name": "flower", "app": f"{name}.client_app:app", "local": local, **task},
        "rule": {"name": "fedasync", "mixing": 0.6},
        "devices": [{"name": "fast", "count": 2, "cpu": 0.3}, {"name": "slow", "cpu": 0.15}],
        "evaluate": {"every": "2s"},
        "stop": {"updates": updates, "after": "4min"},
        "virtual": {"step_time": "100ms"},
    }
    written = folder / "t.yaml"
    written.write_text(text_of(whole).text)
    return written


def test_numpy_client_runs_in_processes(tmp_path: Path) -> None:
    """The initial model is what get_parameters returns. The run is started from Python, which changes
    devices too."""
    seen: list[events.Record] = []
    with up(
        topology(tmp_path, updates=20),
        runtime="process",
        oversubscribe=True,
        on_event=seen.append,
        runs=tmp_path / "runs",
    ) as run:
        run.set("slow", cpu=0.3)
        run.kill("fast-2")
        result = run.wait()
    acted = [(one.device, one.action) for one in seen if isinstance(one, events.Acted)]
    assert acted == [("slow", SetCpu(0.3)), ("fast-2", Crash())]
    accuracy = result.evaluations["accuracy"]
    assert accuracy.iloc[0] < 0.3
    assert accuracy.max() > 0.6
    assert set(result.updates["steps"]) == {1}
    assert result.updates["loss"].notna().all()  # the app's train_loss


def test_message_api_app_runs_in_virtual_time(tmp_path: Path) -> None:
    """The same seed gives the same result, though the app sets no seed."""
    file = topology(tmp_path, updates=20, app="flower_app.message_app:app", net="flower_app.task:Net")
    first, second = (simulate(file, runs=tmp_path / "runs") for _ in range(2))
    assert first.evaluations["accuracy"].max() > 0.6
    assert first.updates["loss"].tolist() == second.updates["loss"].tolist()
    assert first.evaluations["loss"].tolist() == second.evaluations["loss"].tolist()


def test_fit_returns_the_apps_arrays(tmp_path: Path) -> None:
    """The arrays that come out are those of the partition's training, BatchNorm's buffers included."""
    topology(tmp_path)
    user_code.use_folder(str(tmp_path / "project"))
    try:
        task = Flower("flower_app.client_app:app", "flower_app.task:Net", "local-epochs=1")
        torch.manual_seed(1)
        trainer = make_trainer(task, task.shards_for(3)[2], LocalTraining(steps=1, lr=0.05))
        assert isinstance(trainer, FitTrainer)
        start = trainer.flat.w.numpy().copy()
        trainer.warm_up()
        assert np.array_equal(trainer.flat.w.numpy(), start)
        result = trainer.train(start, np.random.default_rng(0))
        moved = user_code.load_attribute("flower_app.task:Net")()
        names = [name for name, _ in moved.named_parameters()]
        assert [name for name, _ in trainer.flat.module.named_parameters()] == names
        assert result.steps == 1
        assert 0 < np.abs(result.end - start).max() < 10
        counted = result.buffers.integers.tolist()
        assert counted == [-(-(-(-1797 // 3) * 4 // 5) // 32)]  # batches of the partition: one epoch
        clipped = make_trainer(task, task.shards_for(3)[2], LocalTraining(steps=1, lr=0.05, clip=0.01))
        end = clipped.train(start, np.random.default_rng(0)).end
        assert np.linalg.norm(end - start) == pytest.approx(0.01, rel=1e-3)
    finally:
        user_code.use_folder(None)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"app": "client_app"}, "found .client_app., expected module:name such as my_app"),
        ({"app": "flower_app.nothing:app"}, "no module flower_app.nothing"),
        ({"app": "flower_app.task:load_data"}, "found function, expected a Flower ClientApp"),
        ({"run_config": "lr"}, "expected key=value pairs such as lr=0.1"),
        (
            {"app": "flower_app.message_app:app"},
            "net is missing: an app of the message API provides no initial model",
        ),
        ({"local": {"epochs": 2, "lr": 0.1}}, "flower trains by its own code: keep only steps: 1"),
    ],
)
def test_unsupported_apps_are_refused(task: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        simulate(topology(tmp_path, **task), runs=tmp_path / "runs")


def test_flower_task_needs_a_code_folder(tmp_path: Path) -> None:
    text = topology(tmp_path).read_text().replace("code: project\n", "")
    with pytest.raises(BadInputError, match="flower runs your own code: add code"):
        parse(text)


def test_missing_flower_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ValueError, match=r"-m pip install 'edge-fl-testbed\[flower\]'"):
        Flower("flower_app.client_app:app").check(2)


def test_invalid_replies_of_an_app_are_refused() -> None:
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    from agents.tasks.flower_module import FlowerModule

    model = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
    app = ClientApp()
    replied = [np.zeros(2)]

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    def train(message: Any, context: Any) -> Any:
        return Message(RecordDict({"arrays": ArrayRecord(replied)}), reply_to=message)

    module = FlowerModule(app, model, {})
    with pytest.raises(ValueError, match="returned 1 arrays, expected 2 as in the model"):
        module.fit(0, 1, 0.1)
    replied.append(np.zeros(3))
    with pytest.raises(ValueError, match=r"an array of shape \(3,\) for 1, expected \(1,\)"):
        module.fit(0, 1, 0.1)
    silent = FlowerModule(ClientApp(lambda context: NumPyClient().to_client()), model, {})
    with pytest.raises(NotImplementedError, match="does not implement `fit`"):
        silent.fit(0, 1, 0.1)


Reply = Callable[[Any], tuple[Mapping[str, Any], Mapping[str, Any]]]


def app_that(train: Reply | None = None, evaluate: Reply | None = None, **options: Any) -> Any:
    """A ClientApp of the message API. Its functions return arrays and metrics, given a message's
    content."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(**options)
    for register, function in ((app.train, train), (app.evaluate, evaluate)):
        if function is not None:

            @register()  # type: ignore[untyped-decorator,unused-ignore]
            def reply(message: Any, context: Any, function: Reply = function) -> Any:
                arrays, metrics = function(message.content)
                records: dict[str, Any] = {"metrics": MetricRecord(dict(metrics))}
                if arrays:
                    records["arrays"] = ArrayRecord(arrays)
                return Message(RecordDict(records), reply_to=message)

    return app


def module_of(app: Any, initial: Any = ONE, **options: Any) -> Any:
    from agents.tasks.flower_module import FlowerModule

    return FlowerModule(app, initial, {"hidden": 3}, **options)


def evaluated(reported: Mapping[str, Any], **options: Any) -> list[float]:
    """The loss and the accuracy of an app that reports these metrics."""
    app = app_that(evaluate=lambda _: ({}, {"num-examples": 4, **reported}))
    rows: list[list[float]] = module_of(app, **options)(torch.tensor([[0.0, 1.0]])).tolist()
    return rows[0]


@pytest.mark.parametrize(
    ("metrics", "options", "found"),
    [
        ({"test_logloss": 0.7, "accuracy": 0.5, "f1": 0.4}, {}, [0.7, 0.5]),
        ({"eval_loss": 0.7, "kl_loss": 0.1, "eval_acc": 0.5}, {}, [0.7, 0.5]),
        ({"mse": 0.7, "rmse": 0.8}, {"metrics": ("mse", None)}, [0.7, None]),
        ({"auc": 0.8}, {"metrics": (None, "auc")}, [0.2, 0.8]),
        ({"top1_acc": 0.75}, {}, [0.25, 0.75]),
        ({"random_metric": [0.1, 0.2]}, {}, [None, None]),
        ({"loss": np.nan, "accuracy": 0.5}, {}, [None, 0.5]),  # diverged
    ],
)
def test_loss_and_accuracy_are_found_among_the_metrics(
    metrics: dict[str, Any], options: dict[str, Any], found: list[float | None]
) -> None:
    """Without a loss the loss is 1 − accuracy."""
    wanted = [np.nan if one is None else one for one in found]
    assert evaluated(metrics, **options) == pytest.approx(wanted, nan_ok=True)


def test_partitions_count_by_their_examples_however_many_there_are() -> None:
    """502 partitions: 501 of one example with accuracy 0, and one of 1,000 with accuracy 1; then one
    without examples beside one of ten."""

    def accuracy(examples: Sequence[int]) -> float:
        counts = iter(examples)

        def evaluate(_: Any) -> Any:
            own = next(counts)
            return {}, {"num-examples": own, "accuracy": float(own > 1), "loss": 0.0 if own else np.nan}

        task = Flower(app="app:app")
        module = module_of(app_that(evaluate=evaluate))
        shard = Shard(
            np.stack([[k, len(examples)] for k in range(len(examples))]).astype(np.float32),
            ONES[: len(examples)],
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flower, "model", lambda _: module)
            evaluator = Evaluator(task, shard, lambda _: None)
        found = evaluator.evaluate(1, np.zeros(2, np.float32))
        assert found.loss == 0
        return found.accuracy

    assert accuracy([1] * 501 + [1000]) == pytest.approx(1000 / 1501)
    assert accuracy([0, 10]) == 1


ONES = np.ones(502, np.int64)


@pytest.mark.parametrize(
    ("metrics", "options", "message"),
    [
        ({"mel_loss": 1.0, "kl_loss": 2.0}, {}, "mel_loss, kl_loss: say which .* loss_metric: mel_loss"),
        ({"loss": 1.0}, {"metrics": ("mse", None)}, "reports no mse, which loss_metric names"),
        ({"loss": 1.0, "accuracy": 87.5}, {}, "accuracy 87.5, expected a share from 0 to 1"),
    ],
)
def test_unclear_metrics_are_refused(
    metrics: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluated(metrics, **options)


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [({"train_logloss": 0.5, "train_accuracy": 0.9}, 0.5), ({"epsilon": 1.0}, np.nan)],
)
def test_training_without_a_usual_loss_works(metrics: dict[str, Any], loss: float) -> None:
    app = app_that(train=lambda content: ({"0": content["arrays"]["0"]}, metrics))
    assert module_of(app).fit(0, 1, 0.1) == pytest.approx(loss, nan_ok=True)


def test_server_evaluates_the_global_model_once() -> None:
    """Both of Flower's signatures work: with an ArrayRecord, and with arrays and a config."""
    calls = []

    def with_record(server_round: int, arrays: Any) -> Any:
        calls.append([array.tolist() for array in arrays.to_numpy_ndarrays()])
        return {"loss": 0.3, "accuracy": 0.9}

    def with_arrays(server_round: int, parameters: Any, config: Any) -> Any:
        calls.append([array.tolist() for array in parameters])
        return 0.3, {"accuracy": 0.9}

    for function in (with_record, with_arrays):
        module = module_of(app_that(train=Mock()), evaluate=function)
        rows = module(torch.tensor([[0.0, 3.0], [1.0, 3.0], [2.0, 3.0]]))
        assert rows.numpy() == pytest.approx(np.array([[0.3, 0.9]] * 3))
    assert calls == [[[0.0, 0.0]]] * 2


def test_config_of_a_strategy_reaches_the_app() -> None:
    seen = []

    def train(content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        seen.append(dict(content["config"]))
        return {"0": content["arrays"]["0"]}, {}

    config = {"proximal-mu": 0.1, "epoch": "{round}"}
    module = module_of(app_that(train=train), app_config=config)
    module.fit(0, 1, 0.5)
    module.fit(0, 1, 0.5)
    assert [one["epoch"] for one in seen] == [1, 2]
    usual = {"server-round": 1, "server_round": 1, "current_round": 1}
    assert seen[0] == {"lr": 0.5, "proximal-mu": 0.1, "epoch": 1, **usual}


def test_arrays_are_taken_by_their_names() -> None:
    def swapped(content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = content["arrays"]
        return {"b": arrays["b"], "a": arrays["a"]}, {}

    initial = {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    module = module_of(app_that(train=swapped), initial)
    module.fit(0, 1, 0.1)
    assert module.a.tolist() == [1, 1]


def test_statistics_of_unnamed_arrays_are_buffers_and_negative_ones_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of a NumPyClient with BatchNorm: torch's order tells them; those of others are only told when
    the rule makes a variance negative."""
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    torchs = [one, zero, zero, one, np.array(0)]
    module = module_of(app_that(), torchs)
    assert [name for name, _ in module.named_parameters()] == ["0", "1"]
    assert [name for name, _ in module.named_buffers()] == ["2", "3", "4"]
    module = module_of(app_that(train=lambda content: (dict(content["arrays"]), {})), [one, zero, one])
    module.fit(0, 1, 0.1)
    with torch.no_grad():
        module.get_parameter("2")[0] = -0.35
    assert capsys.readouterr().err == ""
    for _ in range(2):  # once
        module.fit(0, 1, 0.1)
    told = capsys.readouterr().err
    assert told.count("the rule has made values of 2 negative, which were above 0") == 1


def test_initial_model_may_depend_on_the_run_config() -> None:
    module = module_of(app_that(), lambda run_config: [np.zeros(run_config["hidden"], np.float32)])
    assert [tuple(parameter.shape) for parameter in module.parameters()] == [(3,)]


def test_number_of_partitions_is_that_of_the_devices_or_more() -> None:
    """The client that gives the initial model is told it, too, and trains like the others."""
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    told = []

    class Client(NumPyClient):  # type: ignore[misc,unused-ignore]
        def get_parameters(self, config: Any) -> Any:
            return [np.zeros(1, np.float32)]

        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, {}

    def client(context: Any) -> Any:
        told.append(context.node_config["num-partitions"])
        return Client().to_client()

    module_of(ClientApp(client), None).fit(0, 3, 0.1)
    module_of(ClientApp(client), None, partitions=100)
    assert told == [1, 3, 100]
    task = Flower("a:b", partitions=100)
    assert [shard.x.tolist() for shard in task.shards_for(2)] == [[[0, 100]], [[1, 100]]]
    with pytest.raises(ValueError, match="partitions is 1, expected at least 2"):
        Flower("a:b", partitions=1).check(2)


def test_apps_that_cannot_be_devices_are_refused() -> None:
    from flwr.client.mod import fixedclipping_mod, secaggplus_mod
    from flwr.clientapp import ClientApp

    from agents.tasks.flower_module import check_app

    asks = ClientApp()
    asks.query()(lambda message, context: message)
    both = {"train": Mock(), "evaluate": Mock()}
    for app, evaluate, message in (
        (asks, None, r"no function @app\.train.*found: query\.default"),
        (app_that(train=Mock()), None, r"no function @app\.evaluate.*write evaluate: \"my_app"),
        (app_that(train=Mock()), lambda: 0, "expected a function of .server_round, arrays"),
        (app_that(**both, mods=[secaggplus_mod]), None, "remove the mod; .* add privacy: {secure"),
        (app_that(**both, mods=[fixedclipping_mod]), None, "write app_config: clipping_norm=10.0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_app(app, evaluate, {})
    check_app(app_that(train=Mock()), lambda server_round, arrays: {}, {})
    check_app(app_that(**both, mods=[fixedclipping_mod]), None, {"clipping_norm": 1.0})


class Mock:
    """A function of an app that is not called."""

    def __call__(self, content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raise AssertionError("called")


NEEDS_CONFIG = """
import numpy as np
from flwr.client import ClientApp, NumPyClient
class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros(2)]
    def fit(self, parameters, config):
        return parameters, config["total_rounds"], {}
    def evaluate(self, parameters, config):
        return 0.5, 1, {}
app = ClientApp(lambda context: Client().to_client())
"""


def test_missing_key_of_a_strategys_config_is_refused_before_the_run(tmp_path: Path) -> None:
    file = topology(tmp_path, {"client_app.py": NEEDS_CONFIG})
    with pytest.raises(BadInputError, match="write app_config: total_rounds=VALUE"):
        simulate(file, runs=tmp_path / "runs")
    text = file.read_text().replace("app:app\n", "app:app\n  app_config: total_rounds=5\n")
    file.write_text(text)
    assert simulate(file, runs=tmp_path / "runs").evaluations["loss"].iloc[-1] == pytest.approx(0.5)


def quickstart(framework: str) -> dict[str, str]:
    """The files of the app that `flwr new` made for `framework`."""
    if not QUICKSTARTS.is_dir():
        unavailable("flwr", f"there is no {QUICKSTARTS}: make {sys.prefix}/.installed-dev")
    names = {"project_name": "app", "framework_str": framework, "import_name": "app"}
    return {
        file: Template((QUICKSTARTS / f"code/{part}.{framework}.py.tpl").read_text()).substitute(names)
        for file, part in (("client_app.py", "client"), ("task.py", "task"))
    }


def test_quickstart_of_numpy_runs_as_it_is(tmp_path: Path) -> None:
    """It reports neither loss nor accuracy, which is not a model that diverged."""
    file = topology(tmp_path, quickstart("numpy"), net="app.task:get_dummy_model")
    run = simulate(file, runs=tmp_path / "runs")
    assert len(run.updates) == 3
    assert run.evaluations["loss"].isna().all()


def test_quickstart_of_pytorch_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dataset is a folder here, and so is torchvision where that is not installed."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(1)
    images = draws.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(10))
    rows = {"img": [*images], "label": draws.integers(0, 10, 40).tolist()}
    (tmp_path / "uoft-cs" / "cifar10").mkdir(parents=True)
    written = datasets.Dataset.from_dict(rows, features)
    written.to_parquet(tmp_path / "uoft-cs" / "cifar10" / "train.parquet")
    file = topology(tmp_path, quickstart("pytorch"), net="app.task:Net", run_config="local-epochs=1")
    if importlib.util.find_spec("torchvision") is None:
        (tmp_path / "project" / "torchvision").mkdir()
        (tmp_path / "project" / "torchvision" / "__init__.py").touch()
        (tmp_path / "project" / "torchvision" / "transforms.py").write_text(VISION)
    run = simulate(file, runs=tmp_path / "runs")
    assert len(run.updates) == 3
    assert run.updates["loss"].notna().all()
    assert run.evaluations["loss"].notna().all()
    assert run.evaluations["accuracy"].between(0, 1).all()
