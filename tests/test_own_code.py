"""docs/guide/own-code.md: its example, as it stands there, in every runtime."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound

from testbed import images
from tests.running import Finished, cli

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "own-code.md"
_FILE = re.compile(r"`([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The topology of the example, with its code beside it."""
    files = _FILE.findall(PAGE.read_text(encoding="utf-8"))
    assert [name for name, _ in files] == ["mine/mlp.py", "mine/cautious.py", "own.yaml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert len(text.splitlines()) <= 36
    return tmp_path / "own.yaml"


@pytest.fixture
def own_image(example: Path, engine: docker.DockerClient) -> Iterator[Path]:
    """Gives `slow` an image of its own: a folder with a Dockerfile, which is removed again. The code
    uses PyTorch's meta device, which clients without user code do not import."""
    folder = example.parent / "sensor"
    folder.mkdir()
    (folder / "driver.py").write_text("READING = 21\n")
    (folder / "Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nCOPY driver.py /opt/sensor/\n"
        "ENV PYTHONPATH=${PYTHONPATH}:/opt/sensor\nRUN python3 -c 'import driver'\n"
    )
    with (example.parent / "mine" / "mlp.py").open("a", encoding="utf-8") as code:
        code.write("\nimport torch\nimage = torch.ones(1, 1, 5, 5, device='meta')\n")
        code.write("torch.nn.Conv2d(1, 2, 3, device='meta')(image)\n")
    text = example.read_text(encoding="utf-8")
    example.write_text(text.replace("cpu: 0.1}", "cpu: 0.1, image: sensor/Dockerfile}"))
    yield folder
    for tag in tags_for(folder / "Dockerfile"):
        with contextlib.suppress(ImageNotFound):
            engine.images.remove(tag)


def tags_for(path: Path) -> list[str]:
    """Tags of the images built for it."""
    return [tag for tag, user in images.registered_images().items() if user == str(path)]


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("docker", marks=pytest.mark.docker), "process", "virtual"],
)
def test_example_of_own_code_runs_and_is_replayed(
    runtime: str, example: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is replayed from another folder; files beside the topology do not count by then."""
    if runtime == "docker":
        sensor = request.getfixturevalue("own_image")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mlp.py").write_text("raise AssertionError\n")
    done = cli("up", example, "--runtime", runtime, "--runs", tmp_path / "runs", cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    assert (run.manifest["task"], run.manifest["rule"]) == ("mlp:Mlp", "cautious:Cautious")
    assert len(run.updates) == 40
    assert run.best_accuracy > 0.3
    if runtime == "docker":
        groups = run.manifest["images"]["groups"]
        assert groups.keys() == {"slow"}
        # Registered under one path of this content: perhaps that of an earlier test run.
        dockerfile = Path(images.registered_images()[groups["slow"]])
        assert dockerfile.read_text() == (sensor / "Dockerfile").read_text()
        assert {update.client for update in run.updates} == {"fast", "slow"}
    weights = {update.weight for update in run.updates}
    assert max(weights) == 0.8  # of updates of at most the mean norm; the others' are less
    assert 0 < min(weights) < 0.8
    for file in (tmp_path / "mine").iterdir():
        file.unlink()
    kept = sorted(str(path.relative_to(run.path)) for path in run.path.glob("code/**/*"))
    assert kept == ["code/cautious.py", "code/mlp.py"]
    assert "code: code\n" in (run.path / "topology.yaml").read_text()
    said = cli("replay", run.path, cwd=elsewhere)
    assert said.returncode == 0, said.stderr
    assert "is bit-identical" in said.stdout
