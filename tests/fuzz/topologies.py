"""Topologies and sweeps, to `validate`, `plan` and the reader of sweeps."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from agents.disk.yaml_loader import Loader
from testbed import sweeps
from testbed.cli.main import app
from testbed.run.options import Options
from tests.fuzz.harness import Read
from tests.fuzz.mutations import change_text, replace_value
from tests.running import TOPOLOGIES

_STUDY = """\
topology: base.yaml
grid: {seed: [1, 2], task.local.lr: [0.1, 0.2]}
variants:
  a: {rule: {name: fedbuff, buffer_size: 2}}
  b: {rule: {name: fedasync}, "devices[0].cpu": 0.5}
target: 60%
"""
_BASE = """\
name: base
task: {name: digits-logreg, local: {steps: 2}}
rule: {name: fedasync}
devices: [{name: slow, count: 2, cpu: 0.2, timing: 1s}]
stop: {after: 5s}
runtime: {name: virtual}
"""


@contextmanager
def topologies(folder: Path) -> Iterator[Read]:
    texts = [path.read_text() for path in sorted(TOPOLOGIES.rglob("*.yaml"))]
    # To plan a million devices takes as long as an input may take.
    texts = [text for text in texts if "\ndevices:" in text and "count: 1000000" not in text]
    shutil.copytree(TOPOLOGIES / "traces", folder / "traces")
    path = folder / "fuzzed.yaml"

    def read(draw: random.Random) -> object:
        path.write_bytes(_changed(draw.choice(texts), draw))
        command = draw.choice([["validate"], ["plan", "--runtime", "virtual", "--oversubscribe"]])
        return app([*command, str(path)], standalone_mode=False)

    yield read


@contextmanager
def studies(folder: Path) -> Iterator[Read]:
    def read(draw: random.Random) -> object:
        changed = draw.choice(["base.yaml", "fuzzed.yaml", "fuzzed.yaml"])
        for name, text in (("base.yaml", _BASE), ("fuzzed.yaml", _STUDY)):
            (folder / name).write_bytes(_changed(text, draw) if name == changed else text.encode())
        return sweeps.load(Path("fuzzed.yaml"), Options("virtual", oversubscribe=True)).target

    yield read


def _changed(text: str, draw: random.Random) -> bytes:
    if draw.random() < 0.6:
        return change_text(text, draw)
    tree = replace_value(Loader(text).get_single_data(), draw)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")
