"""Values that a topology takes from profiles and from trace files."""

from __future__ import annotations

import datetime
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from agents.device_actions import SetLink
from agents.timing.nanoseconds import SECOND
from testbed import plan
from testbed.errors import BadInputError
from testbed.host.nodes import Node
from testbed.plan import Plan, model_check
from testbed.plan.catalog import HERE, Catalog, needs_speeds, read, with_cpu
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.speed import CalibratedHost, Calibration, Work
from testbed.topology import Topology, link_traces, load
from testbed.topology.links import LinkTrace
from testbed.topology.profiles import TrainingSpeeds
from testbed.topology.scenario import Step
from testbed.view import View

HOST = Calibration(
    host=CalibratedHost(cpu="test", cores=2, torch="0"),
    low=50.0,
    median=59.5,
    high=60.0,
    products=3,
    training=TrainingSpeeds(convolution=100.0, depthwise=5.0, matrix=80.0, memory=4.0),
    measured=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
)


def _topology(folder: Path, *devices: str) -> Topology:
    lines = "\n".join(f"  - {device}" for device in devices)
    path = folder / "topology.yaml"
    path.write_text(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\n"
        "rule: {name: fedbuff, buffer_size: 1}\nstop: {after: 1s}\n"
        f"devices:\n{lines}\n"
    )
    return load(path)


def _planned(topology: Topology, runtime: str = "virtual", known: Catalog | None = None) -> Plan:
    return plan.plan(topology, runtime, FOUR, known or read(topology))


def _on_host(topology: Topology) -> Catalog:
    return with_cpu(read(topology), topology, {HERE: HOST})


def test_link_class_supplies_missing_keys(tmp_path: Path) -> None:
    topology = _topology(
        tmp_path,
        "{name: a, cpu: 0.1, link: {class: lte, up: 1mbit}}",
        "{name: b, cpu: 0.1, link: {class: lte, rtt: 20ms}}",
    )
    links = [device.link for device in _planned(topology).devices if device.link is not None]
    assert [(link.up, link.down, link.rtt) for link in links] == [
        (1_000_000, 12_000_000, 0.07),
        (12_000_000, 12_000_000, 0.02),
    ]
    assert topology.devices[0].link is not None
    assert topology.devices[0].link.down is None  # the topology says what the user wrote


def test_profile_supplies_missing_power(tmp_path: Path) -> None:
    topology = _topology(
        tmp_path,
        "{name: a, cpu: 0.1, profile: raspberry-pi-4}",
        "{name: b, cpu: 0.1, profile: raspberry-pi-4, power: {train: 5W, wait: 2W}}",
        "{name: c, cpu: 0.1}",
    )
    assert [device.power for device in _planned(topology).devices] == [
        {"train": 7.2},
        {"train": 5.0, "wait": 2.0},
        None,
    ]


def test_run_directory_reproduces_the_plan(tmp_path: Path) -> None:
    """This holds even if the profiles changed since, or a core is twice as fast."""
    (tmp_path / "profiles.yaml").write_text(
        "devices: {mine: {gflops: 11.9, memory: 300MiB, power: {train: 3W}}}\nlinks: {slow: {up: 3kbit}}"
    )
    topology = _topology(tmp_path, "{name: a, profile: mine, link: slow}", "{name: b, cpu: 0.3}")
    made = _planned(topology, known=_on_host(topology))
    assert made.measured.cpu == {"a": 0.2}
    directory = RunDirectory.create(tmp_path, "r")
    preparing.write_inputs(topology, made, directory)
    (tmp_path / "profiles.yaml").unlink()
    again = load(directory.topology)
    assert again.devices == topology.devices
    known = read(again)
    assert not needs_speeds(again, known, many_hosts=False)
    assert needs_speeds(again, known, many_hosts=True)  # where each machine has its own
    assert _planned(again, known=known) == replace(made, cpu_notes=())


FOUR = plan.HostResources((0, 1, 2, 3), 8 * 2**30)
OWN = """\
devices:
  plain: {gflops: 11.9}
  known: {gflops: 11.9, training: {convolution: 50, depthwise: 1, memory: 1}}
"""


def test_profile_supplies_missing_thermal(tmp_path: Path) -> None:
    (tmp_path / "profiles.yaml").write_text(
        "devices: {hot: {gflops: 11.9, thermal: {after: 5min, to: 60%}}}"
    )
    topology = _topology(
        tmp_path,
        "{name: a, profile: hot}",
        "{name: b, profile: hot, thermal: {after: 1s, to: 0.5}}",
        "{name: c, profile: raspberry-pi-4, cpu: 0.1}",
    )
    made = _planned(topology)
    heat = [device.thermal and (device.thermal.after, device.thermal.to) for device in made.devices]
    assert heat == [(300, 0.6), (1, 0.5), None]
    notes = made.notes
    assert notes[0] == (
        "a: 5min after the start of the run, its cpu drops to 0.6 of its value (thermal), even if "
        "it has not trained until then."
    )
    assert notes[-1] == "Other properties of a device (GPU, caches, memory bandwidth) are not emulated."


def test_thermal_share_below_a_containers_minimum_is_refused(tmp_path: Path) -> None:
    topology = _topology(tmp_path, "{name: a, cpu: 0.02, thermal: {after: 1s, to: 1%}}")
    with pytest.raises(BadInputError, match=r"devices\[0\].thermal: found 0.0002: a container has"):
        plan.plan(topology, "docker", FOUR)


def test_profile_is_a_share_of_a_host_core(tmp_path: Path) -> None:
    (tmp_path / "profiles.yaml").write_text(OWN)
    topology = _topology(tmp_path, "{name: a, profile: plain}", "{name: b, profile: plain, cpu: 0.3}")
    assert needs_speeds(topology, read(topology), many_hosts=False)
    made = _planned(topology, known=_on_host(topology))
    assert [device.cpu for device in made.devices] == [0.2, 0.3]  # 11.9 of 59.5 Gflop/s
    (sentence,) = made.cpu_notes
    assert sentence.startswith("a: 0.2 cpu for plain by HPL alone")
    assert "its training times are not known" in sentence


def test_profile_share_depends_on_each_machine(tmp_path: Path) -> None:
    (tmp_path / "profiles.yaml").write_text(OWN)
    topology = _topology(
        tmp_path, "{name: a, profile: plain, count: 2}", "{name: b, profile: plain, cpu: 0.3}"
    )
    speeds = {"one": HOST, "two": HOST.scaled(2), "three": HOST.scaled(0.5)}
    found = with_cpu(read(topology), topology, speeds, "one")
    assert found.cpu == {"a": {"one": 0.2, "two": 0.1, "three": 0.4}}
    assert found.cpu_notes[0].endswith("On other nodes: 0.1 to 0.4 cpu.")
    nodes = tuple(
        Node(id=name, name=name, cores=2, memory=2**34, here=name == "one") for name in ("one", "two")
    )
    made = plan.plan(topology, "swarm", replace(FOUR, nodes=nodes), found)
    assert {device.name: device.cpu for device in made.devices} == {"a-1": 0.2, "a-2": 0.1, "b": 0.3}
    assert made.measured.cpu == {}  # nodes may be others the next time


def test_profile_with_training_times_gives_a_share_per_task(tmp_path: Path) -> None:
    (tmp_path / "profiles.yaml").write_text(OWN)
    topology = _topology(tmp_path, "{name: a, profile: known}", "{name: b, profile: raspberry-pi-4}")
    found = _on_host(topology)
    share, sentences = found.cpu["a"][HERE], found.cpu_notes
    assert 0.2 < share < 0.25  # products are 5 times as slow, memory traffic 4 times
    assert [sentence.partition(". ")[0] for sentence in sentences] == [
        f"a: {share:g} cpu is as fast as known in training digits-logreg, by its training speeds",
        f"b: {found.cpu['b'][HERE]:g} cpu is as fast as raspberry-pi-4 in training digits-logreg, by "
        "its training speeds (predicted training times were off by 9%)",
    ]
    assert "A step's time on this host: memory traffic" in sentences[0]
    assert "convolutions" not in sentences[0]  # it has none
    assert "The step is small" in sentences[0]


def test_large_step_gets_no_note_on_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Work(convolution=1, depthwise=0, matrix=0, memory=0.1)
    monkeypatch.setattr(model_check, "count_step_work", lambda task, batch_size, frozen: large)
    (sentence,) = _on_host(_topology(tmp_path, "{name: a, profile: raspberry-pi-4}")).cpu_notes
    assert sentence.endswith("A step's time on this host: memory traffic 71%, convolutions 29%.")


def test_unknown_step_falls_back_to_hpl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "count_step_work", lambda task, batch_size, frozen: None)
    found = _on_host(_topology(tmp_path, "{name: a, profile: raspberry-pi-4}"))
    assert found.cpu["a"] == {HERE: 0.2}
    (sentence,) = found.cpu_notes
    assert "the work in a step of digits-logreg is not known" in sentence


def test_origin_of_a_share_is_shown_in_plan_up_and_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "calibrate", lambda: HOST)
    file = tmp_path / "topology.yaml"
    _topology(tmp_path, "{name: a, profile: raspberry-pi-zero-2w}")
    with file.open("a") as text:
        text.write("virtual: {step_time: 1ms}\n")  # which is not measured then
    topology, made = preparing.plan_file(file, Options(runtime="virtual"))
    (sentence,) = made.cpu_notes
    assert "for raspberry-pi-zero-2w by HPL alone" in sentence
    told: list[str] = []

    class Told(View):
        def progress(self, message: str) -> None:
            told.append(message)

    directory = RunDirectory.create(tmp_path, "r")
    up.run(topology, made, directory, Options(), Told())
    assert told[0] == sentence
    assert directory.read_manifest()["shares"] == [sentence]


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("{name: a, profile: pi-4}", "6:24: devices[0].profile: there is no such profile; did you"),
        ("{name: a, cpu: 1, link: {class: ltee}}", "6:37: devices[0].link.class"),
        ("{name: a, cpu: 1, link: {trace: {csv: no.csv}}}", "no.csv: No such file or directory"),
        ("{name: a, cpu: 1, link: {trace: {csv: topology.yaml}}}", "topology.yaml: line 1: "),
    ],
)
def test_unknown_profile_or_class_is_refused_with_its_place(
    tmp_path: Path, device: str, told: str
) -> None:
    with pytest.raises(BadInputError) as refused:
        read(_topology(tmp_path, device))
    assert told in str(refused.value)


def test_link_rates_come_from_its_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,up,rtt\n0,1000000,0.02\n2,0,0.08\n")
    found = link_traces.steps("a", link_traces.read(LinkTrace(csv="t.csv"), tmp_path))
    assert list(islice(found, 3)) == [
        Step(0, "a", SetLink({"up": 1_000_000, "rtt": 0.02})),
        Step(2 * SECOND, "a", SetLink({"up": 1_000, "rtt": 0.08})),  # an outage, as near as tbf can
        Step(4 * SECOND, "a", SetLink({"up": 1_000_000, "rtt": 0.02})),
    ]
