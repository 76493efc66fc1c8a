"""Packs of a run and of a sweep, to the reader that has to import nothing of them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed import sweeps
from testbed.api import launching, packing
from testbed.packs import INDEX
from testbed.run.options import Options
from tests.fuzz.harness import Read
from tests.fuzz.mutations import change_text, damage, replace_value

_FILES = {
    "topology.yaml": """\
name: packed
task: {name: quadratic, centers: [[0], [1]], local: {steps: 1, lr: 0.4}}
rule: {name: fedasync}
devices:
  - {name: pi, timing: 1s, link: {trace: {csv: traces/bus.csv}}}
  - {name: slow, timing: 2s, link: {class: hut}}
stop: {after: 8s}
runtime: {name: virtual}
""",
    "base.yaml": "name: base\nrule: {name: fedasync}\n",
    "sweep.yaml": "topology: topology.yaml\ngrid: {seed: [1, 2]}\ntarget: 60%\n",
    "profiles.yaml": "links: {hut: {up: 1mbit, down: 2mbit, rtt: 50ms, description: a, source: b}}\n",
    "traces/bus.csv": "time,up,down\n0,1000000,1000000\n3,200000,500000\n",
    "evil.py": "open('{}/touched', 'w')\n",
}
_HOSTILE = (
    "code: evil.py\nname: x\n", "topology: base.yaml\n", "topology: ../../outside/secret\n",
    "rule: {name: 'evil:R'}\ncode: evil.py\n", "task: {name: 'evil:T', code: evil.py}\n",
    "task: {name: mlp, initial: ../../../outside/secret}\n",
    "devices: {from: ../../../outside/secret}\n", "devices: {from_log: ../../../outside/secret}\n",
    "devices: {from_run: ../../../outside}\n",
    "devices: [{name: a, link: {trace: {csv: ../../../../outside/secret}}}]\n",
    "task: {name: mlp, data: {path: ../../../outside}}\n", "image: evil\n", "requirements: [evil]\n",
    "devices: [{name: a, hosts: [root@evil]}]\n", "<<: &a {code: evil.py}\n",
)  # fmt: skip
NAMES = (
    "../outside/touched", "../../outside/touched", "/proc/self/cwd/../outside/touched",
    "a/../../outside/touched",
    "a\\b", "..\\outside", "", ".", "..", "a/", "/", "a//b", "x" * 300, "\0", "a\0b", "\n", "\u202e",
    "TOPOLOGY.yaml", "topology.yaml/a", "pack.json", "é", "e\u0301", "\ud800", "a" * 1001,
)  # fmt: skip
_KINDS = (stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFREG, 0)


_INDEX: dict[str, Any] = {
    "format": 1, "name": "packed", "runtime": "virtual", "versions": {"python": "3.11"}, "commit": None,
    "runs": ["packed"], "left_out": [], "data": [], "has_data": False,
}  # fmt: skip


@contextmanager
def packs(folder: Path) -> Iterator[Read]:
    evil = _FILES["evil.py"].format(folder.parent / "outside")
    pack = folder / "fuzzed.zip"

    def read(draw: random.Random) -> object:
        pack.write_bytes(_make({**_FILES, "evil.py": evil}, draw))
        kind = draw.choice(["run", "sweep"])
        try:
            if kind == "run":
                return launching.plan_run(pack, runs=folder / "runs").topology.seed
            opened = packing.open_pack(pack, kind, trusted=False, runs=folder / "runs")
            opened.check_data(None)
            opened.measured()
            opened.run_by_cell()
            return sweeps.load(opened.start, Options("virtual"), opened.limits).target
        finally:
            shutil.rmtree(folder / "runs", ignore_errors=True)

    yield read


def _make(files: Mapping[str, str], draw: random.Random) -> bytes:
    contents = {name: text.encode() for name, text in files.items()}
    if draw.random() < 0.6:
        name = draw.choice([name for name in contents if name != "evil.py"])
        hostile = draw.choice(_HOSTILE).encode()
        contents[name] = draw.choice(
            [change_text(files[name], draw), contents[name] + hostile, hostile, hostile + contents[name]]
        )
    index = {
        **_INDEX,
        "kind": draw.choice(["run", "sweep"]),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in contents.items()
        },
    }
    if draw.random() < 0.2:
        name, other = draw.choice([*contents]), draw.choice(NAMES)
        contents[other] = contents.pop(name)
        if draw.random() < 0.7:  # the index has the name, too
            index["files"][other] = index["files"].pop(name)
    encoded = json.dumps(index if draw.random() < 0.8 else replace_value(index, draw)).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, data in [(INDEX, encoded), *contents.items()]:
            info = zipfile.ZipInfo(name.encode("utf-8", "replace").decode())
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            if draw.random() < 0.03:
                info.external_attr = draw.choice(_KINDS) << 16
            if draw.random() < 0.02:
                info.compress_type = draw.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
            more = b"\0" * draw.choice([1, 10**7]) if draw.random() < 0.03 else b""
            archive.writestr(info, data + more)
    return damage(made.getvalue(), draw) if draw.random() < 0.25 else made.getvalue()
