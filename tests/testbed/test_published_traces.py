"""Published traces: throughput of links, FedScale's devices. Files are made up, formats not."""

from __future__ import annotations

import datetime
import json
import math
import pickle
from pathlib import Path

import pytest

from testbed.fleets import fedscale
from testbed.topology import link_traces, load, parse, yamlfile
from tests.running import Testbed

# datasets.simula.no/hsdpa-tcp-logs: the second time is in ms, the first in s; users.ugent.be/~jvdrhoof/
# dataset-4g: both in ms.
RIISER = """\
1289406399 549692 59.851754 10.781778 250000 1000
1289406400 550772 59.851864 10.781833 0 2000
1289406402 552893 59.85206  10.781969 125000 0500
"""
UCC = """\
Timestamp,Longitude,Latitude,Speed,Operatorname,CellID,NetworkMode,RSRP,RSRQ,SNR,CQI,RSSI,DL_bitrate,UL_bitrate,State
2019.12.16_13.40.04,-8.39,51.88,0,B,11,5G,-95,-12,6.0,11,-80,20000,100,D
2019.12.16_13.40.04,-8.39,51.88,0,B,11,5G,-95,-12,6.0,11,-80,40000,110,D
2019.12.16_13.40.05,-8.39,51.88,0,B,11,5G,-95,-12,-,-,-,-,-,D
2019.12.16_13.40.06,-8.39,51.88,0,B,11,5G,-95,-12,6.0,11,-80,3,1,I
2019.12.16_13.40.08,-8.39,51.88,0,B,11,LTE,-99,-14,2.0,6,-94,5178,194,D """
PENSIEVE = "0.5 2.0\n1.5 4.25\n\n2.5 0.0\n"


@pytest.mark.parametrize(
    ("form", "text", "rows"),
    [
        ("riiser", RIISER, ["0,2000000", "1,0", "3,2000000"]),
        ("ucc", UCC, ["0,30000000", "4,5178000"]),
        ("pensieve", PENSIEVE, ["0,2000000", "1,4250000", "2,0"]),
    ],
)
def test_throughput_becomes_a_link_trace(form: str, text: str, rows: list[str]) -> None:
    made = link_traces.as_csv(link_traces.PUBLISHED_FORMATS[form](text.splitlines()), source="a\nb")
    assert made.splitlines() == ["# a", "# b", "time,down", *rows]
    assert len(link_traces.read_csv(made.splitlines(), loop=True).times) == len(rows)
    doubled = link_traces.as_csv(link_traces.PUBLISHED_FORMATS[form](text.splitlines()), "up", scale=2.0)
    first = 2 * float(rows[0].partition(",")[2])
    assert doubled.splitlines()[:2] == ["time,up", f"0,{first:.0f}"]


@pytest.mark.parametrize(
    ("form", "text", "told"),
    [
        ("riiser", "1 2 3\n", "line 1: found 3 columns, expected 6"),
        ("riiser", "1 2 3 4 -5 6\n", "line 1: bytes is '-5', expected a number of at least 0"),
        ("ucc", "a,b\n1,2\n", "line 1: found no column DL_bitrate, Timestamp"),
        ("ucc", "Timestamp,DL_bitrate\nx,2\n", "line 2: found 'x', expected a time such as 2019"),
        ("pensieve", "0 1\n\nnan 1\n", "line 3: time is 'nan'"),
        ("pensieve", "3 1\n2 1\n", "a time of 2 s follows 3 s"),
        ("pensieve", "\n", "has no measured throughput"),
        ("pensieve", "0 1e300\n", "line 1: Mbit/s is '1e300', expected a number of at least 0"),
        ("pensieve", "0 1e9\n", "down is '1e\\+15', expected a number from 0 to 1e\\+12"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(form: str, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        link_traces.as_csv(link_traces.PUBLISHED_FORMATS[form](text.splitlines()))


CAPACITY = {
    7: {"computation": 162.0, "communication": 5648.109619499134},
    8: {"computation": 40.5, "communication": 1000.0},
}
BEHAVIOUR = {
    1: {
        "duration": 211625,
        "inactive": [30, 90, 100],
        "finish_time": 100,
        "active": [10, 60, 80],
        "model": "CPH1801",
    }
}


def _plain(data: object) -> dict[str, object]:
    found = fedscale.read(json.dumps(data).encode())
    assert {str(key): one for key, one in fedscale.read(pickle.dumps(data)).items()} == found
    return found


def test_fedscales_clients_become_device_groups() -> None:
    capacity, behaviour = (_plain(data) for data in (CAPACITY, BEHAVIOUR))
    chosen = fedscale.draw_clients(capacity, behaviour, 2, seed=3)
    assert {client.number for client in chosen} == {"7", "8"}
    slow, fast = fedscale.device_groups(chosen, cpu=0.4, steps=10, batch_size=20)
    assert slow == {
        "name": "client-1",
        "cpu": 0.1,
        "timing": "97200ms",  # 3 × 162 ms × 200 samples
        "link": {"up": "5784kbit", "down": "5784kbit"},  # kbit of 1024
        "availability": {
            "trace": [["0s", "off"], ["10s", "on"], ["30s", "off"], ["1min", "on"]],
            "loop": "100s",
        },
    }
    assert (fast["cpu"], fast["timing"]) == (0.4, "24300ms")


def test_availability_may_span_the_end_of_a_pass() -> None:
    (client,) = fedscale.draw_clients(_plain({8: CAPACITY[8]}), _plain(BEHAVIOUR), 1, 0)

    def of(**part: float) -> object:
        return fedscale.device_groups([client], cpu=1.0, **part)[0].get("availability")  # type: ignore[arg-type]

    assert of(begin=170.0, length=80.0, speed_up=10.0) == {
        "trace": [["0s", "on"], ["3s", "off"], ["4s", "on"], ["6s", "off"]]
    }
    assert of(begin=65.0, length=30.0) is None  # there all the time
    assert of(begin=30.0, length=30.0) == {"trace": [["0s", "off"]]}


def test_trace_that_would_be_repeated_without_end_is_refused() -> None:
    behaviour = {"9": {"finish_time": 1e-9, "active": [0], "inactive": [1e-9]}}
    (client,) = fedscale.draw_clients(_plain({8: CAPACITY[8]}), behaviour, 1, 0)
    with pytest.raises(ValueError, match="client 8 lasts 1e-09 s: it would be repeated"):
        fedscale.device_groups([client], length=80.0)


def test_pickle_with_code_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a pickle of plain data nor JSON"):
        fedscale.read(pickle.dumps({1: datetime.date(2020, 1, 1)}))
    for damaged in (b"", b"\x80\x04nonsense", b"{", pickle.dumps([1]), b"{}"):
        with pytest.raises(ValueError, match=r"is neither a pickle|is not a dictionary"):
            fedscale.read(damaged)


@pytest.mark.parametrize(
    ("capacity", "behaviour", "told"),
    [
        ({"1": {"computation": 0, "communication": 1}}, None, "computation of client 1 is 0"),
        ({"1": {"computation": 1}}, None, "communication of client 1 is None"),
        ({"1": 5}, None, "computation of client 1 is None"),
        (CAPACITY, None, "has 2 clients, fewer than the 3"),
        (
            {"1": CAPACITY[7], "2": CAPACITY[7], "3": CAPACITY[7]},
            {"9": {"finish_time": 5, "active": 3, "inactive": []}},
            "active of client 9 is not a list",
        ),
        ({"1": {"computation": 10**400, "communication": 1}}, None, "computation of client 1 is"),
        ({"1": {"computation": "\u0663", "communication": 1}}, None, "computation of client 1 is"),
        (
            {"1": CAPACITY[7]},
            {"9": {"finish_time": 5, "active": [math.inf], "inactive": [3]}},
            "active of client 9 is inf",
        ),
        (
            {"1": CAPACITY[7]},
            {"9": {"finish_time": 5e-324, "active": [0], "inactive": [3]}},
            "finish_time of client 9 is 5e-324",
        ),
    ],
)
def test_invalid_device_traces_are_refused(
    capacity: dict[object, object], behaviour: object, told: str
) -> None:
    count = 1 if len(capacity) == 1 else 3
    with pytest.raises(ValueError, match=told):
        fedscale.draw_clients(_plain(capacity), behaviour and _plain(behaviour), count, 0)  # type: ignore[arg-type]


TOPOLOGY = """\
name: t
task: {name: digits-logreg, local: {steps: 20}}
rule: {name: fedbuff}
# ours
devices:
  - name: a
    cpu: 0.1

# how it ends
stop: {after: 60s}  # a minute
"""


def test_block_is_replaced_and_the_rest_kept() -> None:
    replaced = yamlfile.with_block(TOPOLOGY, "devices", "devices: [{name: b, cpu: 1.0}]\n")
    assert replaced == TOPOLOGY.replace(
        "devices:\n  - name: a\n    cpu: 0.1\n", "devices: [{name: b, cpu: 1.0}]\n"
    )
    assert parse(replaced).device_names == ("b",)
    assert yamlfile.with_block("a: 1", "b", "b: 2") == "a: 1\nb: 2\n"
    with pytest.raises(ValueError, match="is not a mapping"):
        yamlfile.with_block("{a: 1}", "b", "b: 2")


def test_commands_write_traces_that_topologies_read(testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TOPOLOGY)
    (tmp_path / "capacity").write_bytes(pickle.dumps(CAPACITY))
    (tmp_path / "behave").write_bytes(pickle.dumps(BEHAVIOUR))
    (tmp_path / "bus.log").write_text(RIISER)
    fleet = tmp_path / "fleet.yaml"
    said = testbed(
        *("new", "devices", tmp_path / "capacity", tmp_path / "behave", "--devices", 2),
        *("--cpu", 0.4, "--topology", tmp_path / "t.yaml", "--to", fleet),
    )
    assert said.code == 0, said.err
    read = load(fleet)
    assert [group.cpu for group in read.devices] == [0.1, 0.4]
    assert "clients 7, 8" in fleet.read_text()
    said = testbed("new", "trace", "riiser", tmp_path / "bus.log", "--to", tmp_path / "bus.csv")
    assert said.code == 0, said.err
    fleet.write_text(TOPOLOGY.replace("cpu: 0.1", "cpu: 0.1\n    link: {trace: {csv: bus.csv}}"))
    link = load(fleet).devices[0].link
    assert link is not None
    assert link.trace is not None
    for wrong, told in (
        (("trace", "nomahi", tmp_path / "bus.log"), "unknown format 'nomahi'"),
        (
            ("trace", "mahimahi", tmp_path / "bus.log"),
            "needs no conversion: write link",
        ),
        (("trace", "ucc", tmp_path / "bus.log"), "bus.log: line 1: found no column"),
        (("devices", tmp_path / "capacity"), "give --cpu"),
        (("devices", tmp_path / "none", "--cpu", 1), "none: No such file"),
        (
            ("devices", tmp_path / "capacity", "--cpu", 1, "--devices", 3),
            "has 2 clients, fewer than the 3",
        ),
    ):
        refused = testbed("new", *wrong)
        assert refused.code == 2
        assert told in refused.err
