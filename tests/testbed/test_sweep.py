"""A sweep file: its cells, and all that may be wrong with them, each with its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed import sweeps
from testbed.errors import BadInputError
from testbed.run.options import Options
from tests.running import TOPOLOGIES
from tests.testbed.test_studies import BASE


def read(folder: Path, text: str) -> sweeps.Sweep:
    (folder / "base.yaml").write_text(BASE)
    file = folder / "study.yaml"
    file.write_text(text)
    return sweeps.load(file, Options())


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("seed", ("seed",)),
        ("devices[0].cpu", ("devices", 0, "cpu")),
        ("scenario[12]", ("scenario", 12)),
        ("task.local.lr", ("task", "local", "lr")),
        ("", None),
        ("rule.", None),
        ("devices[-1]", None),
        ("devices[0", None),
    ],
)
def test_grid_paths_set_topology_keys(path: str, where: tuple[str | int, ...] | None) -> None:
    assert sweeps.parse_path(path) == where


def test_sweep_has_a_cell_per_variant_and_combination(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
topology: base.yaml
variants:
  plain: {}
  buffered: {rule: {name: fedbuff, buffer_size: 2}}
grid:
  rule.server_lr: [1, 0.5]
  "devices[0].timing": [2s]
  seed: [3, 4]
target: 80%
repeat_invalid: 2
""",
    )
    assert study.repeat_invalid == 2
    assert study.name == "study"
    assert study.target == 0.8
    assert [cell.name for cell in study.cells] == [
        f"{variant}, server_lr {lr}, seed {seed}"
        for variant in ("plain", "buffered")
        for lr in (1, 0.5)
        for seed in (3, 4)
    ]
    assert [cell.variant for cell in study.cells] == ["plain"] * 4 + ["buffered"] * 4
    last = study.cells[-1].topology
    assert last.rule.params == {"buffer_size": 2, "server_lr": 0.5} | {
        key: value for key, value in last.rule.params.items() if key not in ("buffer_size", "server_lr")
    }
    assert [(cell.topology.seed, cell.plan.runtime) for cell in study.cells[:2]] == [
        (3, "virtual"),
        (4, "virtual"),
    ]
    assert len({cell.fingerprint for cell in study.cells}) == 8


def test_mapping_equals_the_sweep_file(tmp_path: Path) -> None:
    text = "topology: base.yaml\nvariants: {a: {stop: {after: 1s}}}\ngrid: {task.local.lr: [0.1, 0.2]}"
    study = read(tmp_path, text)
    mapping = {
        "topology": "base.yaml",
        "variants": {"a": {"stop": {"after": "1s"}}},
        "grid": {"task.local.lr": (0.1, 0.2)},
    }
    same = sweeps.from_mapping(mapping, "study", tmp_path, Options())
    assert [cell.fingerprint for cell in same.cells] == [cell.fingerprint for cell in study.cells]
    assert same.name == "study"
    mapping["grid"] = {"task.local.lr": [-1]}
    with pytest.raises(BadInputError, match=r"study:\d+:\d+: task\.local\.lr: found -1"):
        sweeps.from_mapping(mapping, "study", tmp_path, Options())


def test_cells_are_named_by_values_and_equal_names_numbered(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
topology: base.yaml
grid:
  rule: [{name: fedavg}, {name: fedbuff, buffer_size: 2}]
  stop: [{after: 1s}, {after: 2s}]
""",
    )
    assert [cell.label for cell in study.cells] == [
        "fedavg, after 1s",
        "fedavg, after 2s",
        "fedbuff buffer_size 2, after 1s",
        "fedbuff buffer_size 2, after 2s",
    ]
    (tmp_path / "digits.yaml").write_text(
        BASE.replace("quadratic, centers: [[0], [1], [5]]", "digits-logreg")
    )
    partitions = read(
        tmp_path,
        """
topology: digits.yaml
grid:
  task.partition: [{scheme: iid}, {scheme: dirichlet, alpha: 0.1}, {scheme: dirichlet, alpha: 1.0}]
  task.local: [{steps: 5, lr: 0.06}, {steps: 5, lr: 0.1}]
""",
    )
    assert [cell.label for cell in partitions.cells] == [
        f"{partition}, lr {lr}"
        for partition in ("iid", "dirichlet 0.1", "dirichlet 1")
        for lr in (0.06, 0.1)
    ]
    grid = "{task.partition: [{scheme: iid}, {scheme: dirichlet, alpha: 0.3}]}"
    alone = read(tmp_path, f"topology: digits.yaml\ngrid: {grid}")
    assert [cell.label for cell in alone.cells] == ["iid", "dirichlet 0.3"]
    seeds = read(tmp_path, "topology: base.yaml\ngrid: {seed: [1, 2]}")
    assert [cell.label for cell in seeds.cells] == ["fedavg", "fedavg"]


def test_all_errors_of_a_sweep_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as raised:
        read(
            tmp_path,
            """topology: base.yaml
variants:
  a: {rule: {name: fedbuf}}
  b: {rule.buffer_size: 3, seed.x: 2}
grid:
  devices[1].timing: [1s]
  task.local.lrr: [0.1]
  stop.after: [3s, 2x]
  "seed..": [1]
  seed: [1, 1]
""",
        )
    file = tmp_path / "study.yaml"
    heads = [line for line in str(raised.value).splitlines() if line.startswith(str(file))]
    places = [head.removeprefix(f"{file}:").split(": ")[:2] for head in heads]
    assert places == [
        ["3:20", "rule.name"],
        ["4:7", "rule.buffer_size"],
        ["4:28", "variants.b.seed.x"],
        ["6:3", "grid.devices[1].timing"],
        ["7:3", "task.local.lrr"],
        ["8:20", "stop.after"],
        ["9:3", "grid.seed.."],
        ["10:13", "grid.seed[1]"],
        [" 8 errors"],
    ]
    assert "did you mean fedbuff?" in heads[0]
    assert "did you mean lr?" in heads[4]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grid: {seed: [1]}", "topology is missing"),
        ("name: x\ndevices: []", "this is a topology, not a sweep: run testbed up"),
        ("topology: nowhere.yaml", "the file "),
        (f"topology: {'x' * 300}.yaml", "the file "),
        ("topology: base.yaml\ngrid: {seed: 3}", "found 3, expected a list"),
        ("topology: base.yaml\ngrid: {seed: []}", "expected at least one value"),
        ("topology: base.yaml\ngird: {seed: [1]}", "did you mean grid?"),
        ("topology: base.yaml\nvariants: {a: 3}", "expected keys and values"),
        ("topology: base.yaml\nvariants: {a: {seed: 1}}\ngrid: {seed: [2]}", "keep one of them"),
        ("topology: base.yaml\ntarget: 90", "target: found 90"),
        ("topology: base.yaml\nrepeat_invalid: -1", "expected a whole number from 0 on"),
    ],
)
def test_invalid_sweep_files_are_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadInputError, match=r"study\.yaml") as raised:
        read(tmp_path, text)
    assert told in str(raised.value)
    assert raised.value.exit_code == 2


def test_too_many_runs_are_refused_early(tmp_path: Path) -> None:
    numbers = list(range(200))
    with pytest.raises(BadInputError, match="makes 40,000 runs"):
        read(tmp_path, f"topology: base.yaml\ngrid: {{seed: {numbers}, rule.server_lr: {numbers}}}")


def test_story_sweep_of_the_readme_is_valid() -> None:
    story = sweeps.load(TOPOLOGIES / "story" / "story.yaml", Options("virtual"))
    assert [cell.label for cell in story.cells] == [cell.topology.rule.name for cell in story.cells]
    assert len(story.cells) == 6


def test_second_signal_does_not_cut_a_workers_exit_short(tmp_path: Path) -> None:
    """A pool sends a worker SIGTERM, and its session another one."""
    program = (
        "import atexit, pathlib, signal, sys, time\n"
        "from testbed.host import processes\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "processes.interrupt_once()\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, 'as with nohup'\n"
        "def leave():\n"
        "    print('ends', flush=True); time.sleep(0.5); pathlib.Path(sys.argv[1]).touch()\n"
        "atexit.register(leave)\n"
        "try:\n"
        "    print('runs', flush=True); time.sleep(300)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cleaned")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("runs", "ends"):
            assert process.stdout.readline() == f"{line}\n"
            process.terminate()
        assert process.wait(120) == 130
    assert (tmp_path / "cleaned").exists()
