"""Packs: what is in them, running them again elsewhere, and archives that mean harm."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rocrate.rocrate import ROCrate

import testbed as api
from agents.disk import files
from testbed import packs, sweeps
from testbed.api import packing
from testbed.errors import BadInputError
from testbed.packs import _BoundedFile, unpack
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import yamlfile
from tests.running import Testbed

TASK = "task: {name: quadratic, centers: [[0], [1], [5]], local: {steps: 1, lr: 0.4}}"
LINKED = f"""
name: linked
{TASK}
rule: {{name: fedbuff, buffer_size: 2}}
devices:
  - {{name: pi, count: 2, timing: 1s, link: {{trace: {{csv: traces/bus.csv}}}}}}
  - {{name: slow, timing: 2s, link: {{class: hut}}}}
stop: {{after: 8s}}
runtime: {{name: virtual}}
"""
HUT = "links: {hut: {up: 1mbit, down: 2mbit, rtt: 50ms, description: a hut, source: made up}}\n"
OWN_RULE = """
from dataclasses import dataclass
from pathlib import Path

from agents.models.vectors import add_scaled
from agents.rules.interface import Rule, Send, State

Path({marker!r}).touch()


@dataclass(frozen=True)
class Mine(Rule):
    server_lr: float = 0.5

    def begin(self, server):
        return Mean(self, server)


class Mean(State):
    def __init__(self, params, server):
        self.params, self.server = params, server

    def update(self, update):
        weight = self.params.server_lr
        add_scaled(self.server.w, update.vector, weight)
        return [self.server.aggregated([update.contribution(weight)]), Send(update.client)]
"""


def make_project(parent: Path) -> Path:
    """A folder with a topology, a trace and a profile beside it."""
    folder = parent / "project"
    (folder / "traces").mkdir(parents=True)
    (folder / "traces" / "bus.csv").write_text("time,up,down\n0,1000000,1000000\n3,200000,500000\n")
    (folder / "profiles.yaml").write_text(HUT)
    (folder / "linked.yaml").write_text(LINKED)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TESTBED_DATA", raising=False)
    return folder


def names(pack: Path) -> list[str]:
    with zipfile.ZipFile(pack) as file:
        return sorted(file.namelist())


def content(pack: Path, name: str) -> bytes:
    with zipfile.ZipFile(pack) as file:
        return file.read(name)


def packed(project: Path, name: str = "linked.yaml", **options: Any) -> tuple[Path, Path]:
    """Run a topology in virtual time and pack the run. Return the run's directory and the pack."""
    run = api.simulate(project / name, runs=project / "runs")
    pack = project.parent / "the.zip"
    api.pack(run.path, pack, **options)
    return Path(run.path), pack


def test_packed_run_gives_the_same_records_in_an_empty_folder(
    project: Path, elsewhere: Path, testbed: Testbed
) -> None:
    run, pack = packed(project)
    same = api.pack(run, project / "again.zip")
    assert same.file.read_bytes() == pack.read_bytes()
    assert same.sha256 == files.sha256(pack)
    assert same.left_out[0].startswith("models (")
    shutil.rmtree(project)
    assert names(pack) == [
        *("events.jsonl", "files/1/bus.csv", "manifest.json", "pack.json"),
        *("profiles.yaml", "ro-crate-metadata.json", "topology.yaml"),
    ]
    assert str(project).encode() not in content(pack, "topology.yaml")
    said = testbed("up", pack)
    assert said.code == 0, said.err
    assert "byte for byte" in said.out
    (again,) = elsewhere.glob("runs/linked-*/events.jsonl")
    (kept,) = elsewhere.glob("runs/packs/linked-*/events.jsonl")
    assert again.read_bytes().splitlines()[1:] == kept.read_bytes().splitlines()[1:]
    api.pack(kept.parent, elsewhere / "again.zip")
    assert names(elsewhere / "again.zip") == names(pack)
    changed = testbed("up", pack, "--set", "rule.buffer_size=3")
    assert changed.code == 0
    assert "byte for byte" not in changed.out
    crate = ROCrate(kept.parent)
    assert crate.mainEntity.id == "topology.yaml"
    assert {one.id for one in crate.data_entities} == set(names(pack)) - {packs.CRATE}
    assert crate.dereference("topology.yaml")["sha256"] == files.sha256(kept.with_name("topology.yaml"))


def test_unpacked_folder_that_was_changed_is_refused(project: Path, elsewhere: Path) -> None:
    _, pack = packed(project)
    first = packing.open_pack(pack, "run", trusted=False, runs=elsewhere)
    assert packing.open_pack(pack, "run", trusted=False, runs=elsewhere).folder == first.folder
    with (first.folder / "topology.yaml").open("a") as file:
        file.write("# more\n")
    with pytest.raises(BadInputError, match=r"topology.yaml has changed"):
        packing.open_pack(pack, "run", trusted=False, runs=elsewhere)


def test_only_known_files_are_packed(project: Path) -> None:
    run = Path(api.simulate(project / "linked.yaml", runs=project / "runs").path)
    secrets = [".env", "hosts.json", "work/broker.json", "state/clients/pi-1/a.bin", "wandb/key"]
    for name in (*secrets, "telemetry.jsonl", "inputs.bin", "logs/pi-1.log"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("password: hunter2\n")
    (run / "code").mkdir()
    (run / "code" / "link.py").symlink_to("/etc/hostname")
    done = api.pack(run, project / "all.zip", include=["models", "telemetry", "logs", "inputs"])
    found = set(names(done.file))
    assert {"telemetry.jsonl", "inputs.bin", "logs/pi-1.log", "models/final.safetensors"} <= found
    assert not found & {*secrets, "code/link.py"}
    assert any("link.py is no regular file" in remark for remark in done.remarks)
    facts = json.loads(content(done.file, "manifest.json"))
    assert "controller" not in facts
    assert "name" not in facts["host"]


def test_own_code_needs_trust_and_is_not_imported_without_it(
    tmp_path: Path, elsewhere: Path, testbed: Testbed
) -> None:
    project, marker = tmp_path / "own", tmp_path / "imported"
    project.mkdir()
    (project / "mine.py").write_text(OWN_RULE.format(marker=str(marker)))
    text = LINKED.replace("{name: fedbuff, buffer_size: 2}", "{name: 'mine:Mine'}")
    text = re.sub(r"devices:(.*\n)+?stop", "devices: [{name: pi, count: 3, timing: 1s}]\nstop", text)
    (project / "own.yaml").write_text(f"code: mine.py\n{text}")
    _, pack = packed(project, "own.yaml")
    marker.unlink()
    said = testbed("up", pack)
    assert said.code == 2
    assert "own code" in said.err
    assert "--trust" in said.err
    assert not marker.exists()
    trusted = testbed("up", pack, "--trust")
    assert trusted.code == 0, trusted.err
    assert "byte for byte" in trusted.out
    assert marker.exists()


def test_folder_of_an_image_is_packed_and_needs_trust(
    project: Path, elsewhere: Path, testbed: Testbed
) -> None:
    (project / "camera").mkdir()
    (project / "camera" / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY driver.py /opt/\n")
    (project / "camera" / "driver.py").write_text("READING = 21\n")
    text = LINKED.replace("name: slow,", "name: slow, image: camera/Dockerfile,")
    (project / "image.yaml").write_text(text)
    _, pack = packed(project, "image.yaml")
    assert {"files/2/Dockerfile", "files/2/driver.py"} <= set(names(pack))
    said = testbed("up", pack)
    assert said.code == 2
    assert "devices[1].image: names an image of its own" in said.err
    assert testbed("up", pack, "--trust").code == 0


def packed_with_data(project: Path, path: str, *files: str) -> tuple[Path, Path]:
    """Run and pack a topology whose data are in `path`: that file, or a folder of `files`."""
    x = np.random.default_rng(0).normal(size=(60, 64))
    for name in files or [path]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(project / name, x=x, y=x[:, :3].argmax(axis=1))
    (project / "data.yaml").write_text(
        "name: data\n"
        "task:\n  name: digits-logreg\n"
        f"  data: {{path: {path}, input: x, label: y}}\n  local: {{steps: 2, lr: 0.1}}\n"
        "rule: {name: fedavg}\n"
        "devices: [{name: pi, count: 3, timing: 1s}]\n"
        "stop: {after: 3s}\n"
    )
    return packed(project, "data.yaml")


def test_data_is_listed_by_checksum_and_compared(
    tmp_path: Path, elsewhere: Path, testbed: Testbed
) -> None:
    project = tmp_path / "project"
    run, pack = packed_with_data(project, "mine.npz")
    assert not any(name.startswith("data") for name in names(pack))
    (entry,) = json.loads(content(pack, "pack.json"))["data"]
    assert entry["path"] == "mine.npz"
    assert entry["sha256"] == files.sha256(project / "mine.npz")
    said = testbed("up", pack)
    assert said.code == 2
    (place,) = re.findall(r"to (\S+/mine.npz)", said.err)
    Path(place).parent.mkdir()
    Path(place).write_bytes(b"other")
    assert "other content" in testbed("up", pack).err
    shutil.copy(project / "mine.npz", place)
    assert "byte for byte" in testbed("up", pack).out
    whole = api.pack(run, tmp_path / "whole.zip", include=["data"])
    assert "data/mine.npz" in names(whole.file)
    assert not any(part.startswith("data") for part in whole.left_out)
    assert "byte for byte" in testbed("up", whole.file, "--runs", "others").out


def test_folder_of_missing_data_is_named_once(tmp_path: Path, elsewhere: Path, testbed: Testbed) -> None:
    """And not one file after the other, as for a folder of images."""
    project = tmp_path / "project"
    _, pack = packed_with_data(project, "mine", "mine/train.npz", "mine/test.npz")
    said = testbed("up", pack)
    assert said.code == 2
    assert f"copy {project / 'mine'} (2 files are missing, " in said.err
    (place,) = re.findall(r"to (\S+/mine)$", said.err, re.MULTILINE)
    shutil.copytree(project / "mine", place)
    assert "byte for byte" in testbed("up", pack).out


SWEEP = """
topology: linked.yaml
variants:
  steady: {}
  traced: {"devices[0].link": {trace: {csv: traces/bus.csv}}, rule.buffer_size: 1}
grid: {seed: [1, 2]}
"""


def test_packed_sweep_gives_the_same_records_in_an_empty_folder(
    project: Path, elsewhere: Path, testbed: Testbed
) -> None:
    (project / "study.yaml").write_text(SWEEP)
    done = api.sweep(project / "study.yaml", runs=project / "runs", jobs=1)
    kept = sweeps.load(done.folder / "sweep" / "sweep.yaml", Options())
    written = sweeps.load(project / "study.yaml", Options())
    assert [one.fingerprint for one in kept.cells] == [one.fingerprint for one in written.cells]
    result = api.pack(done.folder, project.parent / "study.zip")
    assert len(result.runs) == 4
    shutil.rmtree(project)
    assert not any(str(project).encode() in content(result.file, name) for name in names(result.file))
    said = testbed("sweep", result.file, "--jobs", "1")
    assert said.code == 0, said.err
    assert "4 runs with the same records as in the pack, byte for byte" in said.out
    assert len(list((elsewhere / "runs" / "study").glob("linked-*"))) == 4
    wrong = testbed("up", result.file)
    assert wrong.code == 2
    assert "testbed sweep" in wrong.err


def test_sweep_into_a_folder_of_the_user_replaces_no_file(project: Path) -> None:
    (project / "linked").mkdir()
    (project / "linked" / "topology.yaml").write_text("mine")
    (project / "linked.sweep.yaml").write_text("topology: linked.yaml\ngrid: {seed: [1]}\n")
    api.sweep(project / "linked.sweep.yaml", runs=project, name="linked", jobs=1)
    assert (project / "linked" / "topology.yaml").read_text() == "mine"
    assert (project / "linked" / "sweep" / "topology.yaml").is_file()


def test_sweep_of_an_older_version_is_run_once_more_before_it_is_packed(project: Path) -> None:
    done = api.sweep(
        {"topology": str(project / "linked.yaml"), "grid": {"seed": [1]}}, runs=project, jobs=1
    )
    shutil.rmtree(done.folder / "sweep")
    with pytest.raises(BadInputError, match=r"no sweep/sweep.yaml.*run `testbed sweep`"):
        api.pack(done.folder, project / "x.zip")


def test_running_run_is_refused_and_an_unfinished_one_is_said(project: Path) -> None:
    run = RunDirectory(Path(api.simulate(project / "linked.yaml", runs=project / "runs").path))
    run.claim()
    with pytest.raises(BadInputError, match="is still running"):
        api.pack(run.path, project / "x.zip")
    run.write_manifest(controller={"pid": 1, "started": 0.0})
    done = api.pack(run.path, project / "x.zip")
    assert "has not reached its end" in done.remarks[0]


def test_pack_of_another_version_or_processor_says_so(
    project: Path, elsewhere: Path, testbed: Testbed
) -> None:
    run = RunDirectory(Path(api.simulate(project / "linked.yaml", runs=project / "runs").path))
    run.write_manifest(
        versions={**run.read_manifest()["versions"], "edge-fl-testbed": "0.1.0", "processor": "Cray-1"}
    )
    api.pack(run.path, "old.zip")
    said = testbed("up", "old.zip")
    assert said.code == 0
    assert "made with edge-fl-testbed 0.1.0" in said.err + said.out
    assert "processor Cray-1 (here" in said.err + said.out


def test_interrupt_leaves_no_archive(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.simulate(project / "linked.yaml", runs=project / "runs")
    out = project / "out"
    out.mkdir()

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(packs, "encode_index", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.pack(run.path, out / "x.zip")
    assert list(out.iterdir()) == []


Change = Callable[[dict[str, bytes]], None]


def rewritten(pack: Path, to: Path, change: Change, *, index: bool = True) -> Path:
    """Write a copy of `pack` whose files were changed by `change`. `index`: whether the index is made
    anew for the files, as somebody who means harm would do."""
    with zipfile.ZipFile(pack) as file:
        found = {name: file.read(name) for name in file.namelist()}
    change(found)
    if index:
        facts = json.loads(found["pack.json"])
        facts["files"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in found.items()
            if name != "pack.json"
        }
        found["pack.json"] = json.dumps(facts).encode()
    with zipfile.ZipFile(to, "w") as file:
        for name, data in found.items():
            file.writestr(zipfile.ZipInfo(name), data)
    return to


def adding(name: str, data: bytes = b"x") -> Change:
    return lambda found: found.update({name: data})


def replacing(name: str, old: str, new: str) -> Change:
    return lambda found: found.update({name: found[name].replace(old.encode(), new.encode())})


@pytest.fixture(scope="module")
def linked_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a run, which is not changed."""
    return packed(make_project(tmp_path_factory.mktemp("linked")))[1]


@pytest.mark.parametrize(
    ("change", "index", "said"),
    [
        (adding("/tmp/x"), True, "leads out"),  # noqa: S108
        (adding("../x"), True, "leads out"),
        (adding("code/../../x"), True, "leads out"),
        (adding("a\\..\\x"), True, "leads out"),
        (adding("a\nb"), True, "leads out"),
        (adding("code//x"), True, "leads out"),
        (adding("x" * 300), True, "leads out"),
        (adding("Topology.yaml"), True, "collide"),
        (adding("topology.yaml/x"), True, "collide"),
        (adding("pack.json/x"), True, "collide"),
        (adding("more.txt"), False, "not those that"),
        (replacing("pack.json", '"runtime": "virtual"', '"runtime": "1e9"'), True, "bad.zip"),
        (replacing("events.jsonl", "update", "uptade"), False, "checksum"),
        (adding("events.jsonl"), False, "another size"),
        (lambda found: found.pop("pack.json"), False, "no pack.json"),
        (adding("pack.json", b"{"), False, "damaged"),
        (adding("pack.json", b'{"format": 9}'), False, "newer version"),
        (replacing("pack.json", '"name": "linked', '"name": "../linked'), True, "leads out"),
        (replacing("pack.json", '"name": "linked', '"name": ".linked'), True, "not a name"),
        (replacing("pack.json", '"bytes": ', '"bytes": 9999999999'), False, "damaged"),
        (replacing("topology.yaml", "files/1/bus.csv", "/etc/passwd"), True, "outside of the pack"),
        (replacing("topology.yaml", "files/1/bus.csv", "../../x.csv"), True, "outside of the pack"),
        (replacing("topology.yaml", "code: null", "code: files"), True, "--trust"),
        (replacing("topology.yaml", "count: 2", "count: 2\n  image: evil:1"), True, "--trust"),
        (replacing("topology.yaml", "name: virtual,", "name: virtual, registry: a.b,"), True, "--trust"),
    ],
)
def test_pack_that_means_harm_is_refused(
    linked_pack: Path, elsewhere: Path, testbed: Testbed, change: Change, index: bool, said: str
) -> None:
    bad = rewritten(linked_pack, elsewhere.parent / "bad.zip", change, index=index)
    before = {path for path in elsewhere.parent.rglob("*") if "elsewhere/runs/packs" not in str(path)}
    found = testbed("up", bad)
    assert found.code == 2, found
    assert said in found.err
    after = {path for path in elsewhere.parent.rglob("*") if "elsewhere/runs/packs" not in str(path)}
    assert {path.name for path in after - before} <= {"runs"}
    assert not list(elsewhere.glob("runs/packs/.*"))
    assert not list(elsewhere.glob("runs/linked-*"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFDIR, None])
def test_links_devices_and_names_that_come_twice_are_refused(
    linked_pack: Path, elsewhere: Path, mode: int | None, tmp_path: Path
) -> None:
    with zipfile.ZipFile(linked_pack) as file:
        found = [(info, file.read(info)) for info in file.infolist()]
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        for info, data in found:
            if info.filename == "events.jsonl" and mode is not None:
                info.external_attr = (mode | 0o777) << 16
            file.writestr(info, data)
        if mode is None:
            file.writestr("topology.yaml", "name: another")
    told = "not those that" if mode is None else "a link, a folder or a device"
    with pytest.raises(BadInputError, match=told):
        unpack(tmp_path / "bad.zip", elsewhere, print)
    assert list(elsewhere.iterdir()) == []


def test_claimed_sizes_are_bounded_before_anything_is_written(
    linked_pack: Path, elsewhere: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(linked_pack) as file:
        found = {name: file.read(name) for name in file.namelist()}
    bomb = b"0" * 50_000_000
    facts = json.loads(found["pack.json"])
    facts["files"]["events.jsonl"]["bytes"] = 10
    found |= {"events.jsonl": bomb, "pack.json": json.dumps(facts).encode()}
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in found.items():
            file.writestr(name, data)
    with pytest.raises(BadInputError, match="another size"):
        unpack(tmp_path / "bomb.zip", elsewhere, print)
    raw = (tmp_path / "bomb.zip").read_bytes()
    size = len(bomb).to_bytes(4, "little")  # the list of files lies about the size, too
    (tmp_path / "liar.zip").write_bytes(raw.replace(size, (10).to_bytes(4, "little")))
    with pytest.raises(BadInputError):
        unpack(tmp_path / "liar.zip", elsewhere, print)
    assert list(elsewhere.iterdir()) == []
    with (
        _BoundedFile(io.FileIO(linked_pack)) as file_of_any_size,
        pytest.raises(ValueError, match="too large"),
    ):
        file_of_any_size.read(2**30)


def test_flipped_bit_is_noticed_or_changes_no_file(
    linked_pack: Path, elsewhere: Path, tmp_path: Path
) -> None:
    raw = linked_pack.read_bytes()
    _, whole = unpack(linked_pack, elsewhere / "whole", print)
    files = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    refused = 0
    for position in np.random.default_rng(7).choice(len(raw), 150, replace=False):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << int(position % 8)
        (tmp_path / "flipped.zip").write_bytes(damaged)
        packs = elsewhere / "flipped"
        try:
            _, folder = unpack(tmp_path / "flipped.zip", packs, print)
        except BadInputError as error:
            refused += 1
            assert "damaged" in str(error)  # noqa: PT017
        else:
            assert files == {
                path.relative_to(folder): path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file()
            }
        shutil.rmtree(packs, ignore_errors=True)
    assert refused > 100


def test_other_files_are_no_packs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a")
    assert not packing.is_pack(tmp_path / "a.yaml")
    assert not packing.is_pack(tmp_path / "missing.zip")
    assert not packing.is_pack("PK\n")
    assert not packing.is_pack({})
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("a", "b")
    assert packing.is_pack(tmp_path / "other.zip")
    with pytest.raises(BadInputError, match="is a pack or another zip file"):
        api.validate(tmp_path / "other.zip")
    with pytest.raises(BadInputError, match=r"no pack.json"):
        unpack(tmp_path / "other.zip", tmp_path / "packs", print)
    with zipfile.ZipFile(tmp_path / "other.zip", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("pack.json", "{}" * 100)
    with pytest.raises(BadInputError, match=r"compressed in another way"):
        unpack(tmp_path / "other.zip", tmp_path / "packs", print)
    assert not (tmp_path / "packs").exists()


def test_keys_of_paths_are_those_of_the_schema() -> None:
    folder = Path(yamlfile.__file__).parents[1]
    sources = (
        path for files in ("topology/*.py", "fleets/*.py", "*/schema.py") for path in folder.glob(files)
    )
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    fields = set(re.findall(r"^    (\w+): FilePath", text, re.MULTILINE))
    assert len(fields) > 8
    assert fields | {"from", "image"} == yamlfile.PATH_KEYS  # these two may also be names
    assert text.count("from_file(") == 3, "another kind of path: add its key to PATH_KEYS"


@pytest.fixture(scope="module")
def sweep_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a sweep, which is not changed."""
    project = make_project(tmp_path_factory.mktemp("sweep"))
    (project / "study.yaml").write_text("topology: linked.yaml\ngrid: {seed: [1]}\n")
    done = api.sweep(project / "study.yaml", runs=project / "runs", jobs=1)
    pack = project.parent / "study.zip"
    api.pack(done.folder, pack)
    return pack


def _imports(marker: Path) -> bytes:
    return f"from pathlib import Path\nPath({str(marker)!r}).touch()\n".encode()


@pytest.mark.parametrize("base", ["base.yaml", "{outside}", "../../outside.yaml"])
@pytest.mark.parametrize("key", ["code", "grid", "variants"])
def test_untrusted_sweep_neither_imports_nor_leaves_its_folder(
    sweep_pack: Path, elsewhere: Path, testbed: Testbed, base: str, key: str
) -> None:
    """Whatever key leads to own code: of the topology that a sweep names, or of a sweep's cells."""
    marker, outside = elsewhere.parent / "imported", elsewhere.parent / "outside.yaml"
    place = base.format(outside=outside)

    def change(found: dict[str, bytes]) -> None:
        text = found["topology.yaml"].decode()
        evil = "code: evil.py\n" + re.sub(r"(?m)^rule: .*$", "rule: {name: 'evil:R'}", text)
        found["evil.py"] = _imports(marker)
        found["base.yaml"] = (evil if key == "code" else text).encode()
        outside.write_bytes(found["base.yaml"])
        own = {"code": "evil.py", "rule": {"name": "evil:R"}}
        cells = {"code": {}, "grid": {k: [v] for k, v in own.items()}, "variants": {"a": own}}[key]
        study = {"topology": place, **({key: cells} if cells else {"grid": {"seed": [1]}})}
        found["sweep.yaml"] = yaml.safe_dump(study).encode()

    bad = rewritten(sweep_pack, elsewhere.parent / "bad.zip", change)
    found = testbed("sweep", bad)
    assert found.code == 2, found
    assert "--trust" in found.err or "outside of the pack" in found.err, found.err
    assert not marker.exists()
