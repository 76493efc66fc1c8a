"""Models in files: `torch.save`, safetensors, those that a run saved. No pickle of them may run code."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from testbed import simulate
from testbed.plan import models as reader
from testbed.rundir.directory import RunDirectory
from testbed.topology import load
from tests.fuzz.harness import Read
from tests.fuzz.mutations import VALUES, damage, replace_value

_TOPOLOGY = """\
name: fuzzed
task: {name: digits-logreg, initial: FILE, local: {steps: 1}}
rule: {name: fedasync}
devices: [{name: a, timing: 1s}]
stop: {updates: 2}
runtime: {name: virtual}
"""


class _Code:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@contextmanager
def models(folder: Path) -> Iterator[Read]:
    touched, file = folder.parent / "outside" / "touched", folder / "topology.yaml"
    right = {"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)}
    run = simulate(_TOPOLOGY.replace(" initial: FILE,", ""), runs=folder / "runs")
    (saved,) = Path(run.path).glob("models/final.safetensors")
    of_run = saved.read_bytes()
    hostile = (
        *VALUES, _Code(touched), torch.full((10,), torch.nan), torch.zeros(10, dtype=torch.complex64),
        torch.zeros(10).to_sparse(), torch.zeros(10, dtype=torch.int64), torch.zeros(0), torch.zeros(11),
        torch.empty(10, device="meta"), torch.nn.Linear(2, 2),
        torch.quantize_per_tensor(torch.zeros(10), 1, 0, torch.qint8), torch.zeros(1).expand(10),
        torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.bool),
    )  # fmt: skip

    def pickled(draw: random.Random) -> tuple[Path, bytes]:
        state: Any = dict(right)
        if draw.random() < 0.7:
            state[draw.choice(["1.weight", "1.bias", "x", "\x1b"])] = draw.choice(hostile)
        state = draw.choice([state, state, state, [state], draw.choice(hostile)])
        made = io.BytesIO()
        try:
            if draw.random() < 0.3:
                pickle.dump(state, made)
            else:
                torch.save(state, made, _use_new_zipfile_serialization=draw.random() < 0.5)
        except (ValueError, RuntimeError, TypeError, NotImplementedError):  # not everything can be saved
            made = io.BytesIO()
            torch.save(right, made)
        return folder / draw.choice(["fuzzed.pt", "fuzzed.pth", "fuzzed"]), made.getvalue()

    def tensors(draw: random.Random) -> tuple[Path, bytes]:
        path, content = draw.choice([(folder / "fuzzed.safetensors", save(right)), (saved, of_run)])
        if draw.random() < 0.6:
            (length,) = struct.unpack_from("<Q", content)
            header = replace_value(json.loads(content[8 : 8 + length]), draw)
            text = json.dumps(header).encode()
            content = struct.pack("<Q", len(text)) + text + content[8 + length :]
        return path, content

    def read(draw: random.Random) -> object:
        path, content = draw.choice([pickled, tensors])(draw)
        path.write_bytes(damage(content, draw) if draw.random() < 0.4 else content)
        file.write_text(_TOPOLOGY.replace("FILE", str(path.relative_to(folder))))
        if path == saved and draw.random() < 0.5:
            found = reader.saved_state(RunDirectory(saved.parent.parent), saved)
            return {name: tensor.numpy() for name, tensor in found.items()}
        reader.check_initial(load(file))
        return None

    yield read
