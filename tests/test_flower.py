"""Flower ClientApps, unchanged, as clients: `tests/flower_app` is as `flwr new` writes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from agents import events, user_code
from agents.client.training import FitTrainer, make_trainer
from agents.config import LocalTraining
from agents.device_actions import Crash, SetCpu
from agents.tasks.flower import Flower
from testbed import BadInputError, simulate, topology, up
from testbed.api.topology_input import text_of
from tests.conftest import unavailable

pytestmark = pytest.mark.usefixtures("forked_programs")
APP = Path(__file__).parent / "flower_app"


@pytest.fixture(autouse=True)
def _flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        unavailable("flwr", "pip install flwr")


def written(folder: Path, **task: Any) -> Path:
    copytree(APP, folder / "flower_app", ignore=lambda *_: {"__pycache__"}, dirs_exist_ok=True)
    whole = {
        "name": "flower",
        "seed": 3,
        "code": "flower_app",
        "requirements": ["flwr", "scikit-learn"],
        "task": {
            "name": "flower",
            "app": "flower_app.client_app:app",
            "run_config": "local-epochs=1",
            "local": {"steps": 1, "lr": 0.1},
            **task,
        },
        "rule": {"name": "fedasync", "mixing": 0.6},
        "devices": [{"name": "fast", "count": 2, "cpu": 0.3}, {"name": "slow", "cpu": 0.15}],
        "evaluate": {"every": "2s"},
        "stop": {"updates": 20, "after": "60s"},  # orders come before the end, on a busy host too
        "virtual": {"step_time": "100ms"},
    }
    file = folder / "t.yaml"
    file.write_text(text_of(whole).text)
    return file


def test_numpy_client_runs_in_processes(tmp_path: Path) -> None:
    """The initial model is what get_parameters returns. The run is started from Python, which changes
    devices too."""
    seen: list[events.Record] = []
    with up(
        written(tmp_path),
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
    file = written(tmp_path, app="flower_app.message_app:app", net="flower_app.task:Net")
    first, second = (simulate(file, runs=tmp_path / "runs") for _ in range(2))
    assert first.evaluations["accuracy"].max() > 0.6
    assert first.updates["loss"].tolist() == second.updates["loss"].tolist()
    assert first.evaluations["loss"].tolist() == second.evaluations["loss"].tolist()


def test_fit_returns_the_apps_arrays(tmp_path: Path) -> None:
    """The arrays that come out are those of the partition's training, BatchNorm's buffers included."""
    written(tmp_path)
    user_code.use_folder(str(tmp_path))
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
        ({"local": {"epochs": 2, "lr": 0.1}}, "flower trains by its own code: keep only steps: 1"),
    ],
)
def test_unsupported_apps_are_refused(task: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        simulate(written(tmp_path, **task), runs=tmp_path / "runs")


def test_flower_task_needs_a_code_folder(tmp_path: Path) -> None:
    text = written(tmp_path).read_text().replace("code: flower_app\n", "")
    with pytest.raises(BadInputError, match="flower runs your own code: add code"):
        topology.parse(text)


def test_app_without_an_initial_model_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, app="flower_app.message_app:app")
    with pytest.raises(
        BadInputError, match="net is missing: an app of the message API provides no initial model"
    ):
        simulate(file, runs=tmp_path / "runs")


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


def test_device_that_gave_the_initial_model_trains_like_the_others() -> None:
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    from agents.tasks.flower_module import FlowerModule

    asked = []

    class Client(NumPyClient):  # type: ignore[misc,unused-ignore]
        def get_parameters(self, config: Any) -> Any:
            return [np.zeros(1, np.float32)]

        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, {}

    def client(context: Any) -> Any:
        asked.append(context.node_config["num-partitions"])
        return Client().to_client()

    FlowerModule(ClientApp(client), None, {}).fit(0, 3, 0.1)
    assert asked == [1, 3]
