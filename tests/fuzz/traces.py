"""Surveys, FedScale's traces, logs, profiles, and traces of links, chargers and availability."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testbed import topology as topologies
from testbed.api import new as published
from testbed.plan import catalog
from tests.fuzz.harness import Read
from tests.fuzz.mutations import change_text, damage, replace_value
from tests.testbed.test_published_traces import BEHAVIOUR, CAPACITY, PENSIEVE, RIISER, UCC

_TOPOLOGY = """\
name: fuzzed
task: {{name: digits-logreg, partition: {{scheme: resampled, samples: 9}}, local: {{steps: 1}}}}
rule: {{name: fedasync}}
stop: {{after: 8s}}
runtime: {{name: virtual}}
devices: {}
"""
_SURVEY = """\
# about: made up
weight,profile,cpu,memory,timing,link.up,link.rtt,availability.on,availability.off
2,raspberry-pi-4,0.5,512MiB,1s,1mbit,20ms,1min,30s
0.5,,0.1,1GiB,"{distribution: lognormal, median: 1s, sigma: 0.5}",200kbit,0.1s,,
"""
_LOG = """\
client,start,end,bytes,download,upload
a,2026-01-31T12:00:00.5,2026-01-31T12:00:09,1000,1,2.5
b,2026-01-31T12:00:01Z,2026-01-31T12:00:02+00:00,,,
a,2026-01-31T12:00:10,2026-01-31T12:00:11,1000,0,0
"""
_PROFILES = """\
devices:
  desk: {cpu: 0.5, memory: 1GiB, gflops: 4, description: a, source: b, energy: {idle: 1W, core: 3W}}
links:
  hut: {up: 1mbit, down: 2mbit, rtt: 50ms, jitter: 1ms, loss: 1%, description: a hut, source: made up}
"""
_LINK = "time,up,down,rtt,loss\n0,300000,1000000,0.12,0.02\n10,0,0,0.2,1\n12.5,200000,500000,0.1,0\n"
_EXAMPLES = {
    "[{name: a, timing: 1s, link: {trace: {csv: fuzzed}}}]": _LINK,
    "[{name: a, timing: 1s, link: {trace: {csv: fuzzed, loop: false}}}]": _LINK,
    "[{name: a, timing: 1s, link: {trace: {down: fuzzed}}}]": "2\n4\n4\n1000\n2200\n",
    "[{name: a, timing: 1s, energy: {idle: 1W, core: 2W, battery: {capacity: 9J}, "
    "charger: {trace: fuzzed}}}]": "time,watts\n0,3\n10,0\n20,1.5\n",
    "[{name: a, count: 3, draw: {from: fuzzed}}]": _SURVEY,
    "{from_log: fuzzed}": _LOG,
    "[{name: a, profile: desk, link: {class: hut}}]": _PROFILES,
}
"""Devices of a topology, with the text of a file that they name."""


@contextmanager
def traces(folder: Path) -> Iterator[Read]:
    fuzzed, topology = folder / "fuzzed", folder / "topology.yaml"
    capacity = {str(key): value for key, value in CAPACITY.items()}
    behaviour = {str(key): value for key, value in BEHAVIOUR.items()}

    def parse(devices: str) -> object:
        topology.write_text(_TOPOLOGY.format(devices))
        found = topologies.load(topology)
        made = catalog.read(found)
        return [one.model_dump() for one in found.devices], [*made.contents.values()], made.profiles

    def named(draw: random.Random) -> object:
        devices, text = draw.choice([*_EXAMPLES.items()])
        is_profiles = text is _PROFILES
        path = folder / "profiles.yaml" if is_profiles else fuzzed
        path.write_bytes(change_text(text, draw))
        try:
            return parse(devices)
        finally:
            path.unlink()

    def converted(draw: random.Random) -> object:
        form, text = draw.choice([("riiser", RIISER), ("ucc", UCC), ("pensieve", PENSIEVE)])
        fuzzed.write_bytes(change_text(text, draw))
        made = published.convert_trace(form, fuzzed, scale=draw.choice([1.0, 0.1, 1e6]))
        rows = made.partition("time,down\n")[2].splitlines()
        return [[float(cell) for cell in row.split(",")] for row in rows]

    def fedscale(draw: random.Random) -> object:
        for name, entries in (("fuzzed", capacity), ("fuzzed-behaviour", behaviour)):
            tree = replace_value(entries, draw) if draw.random() < 0.6 else entries
            data = json.dumps(tree).encode()
            if draw.random() < 0.5:
                with suppress(UnicodeEncodeError):  # pickle writes no half of a surrogate pair
                    data = pickle.dumps(tree)
            (folder / name).write_bytes(damage(data, draw) if draw.random() < 0.2 else data)
        keys = draw.choice(["cpu: 0.5", "begin: 20s, length: 4h, speed_up: 12"])
        drawn = f"from: fuzzed, fedscale: {{behaviour: fuzzed-behaviour, {keys}}}"
        if draw.random() < 0.5:
            return parse(f"[{{name: a, count: 2, draw: {{{drawn}}}}}]")
        return published.fedscale_devices(fuzzed, folder / "fuzzed-behaviour", count=1, cpu=0.5)

    yield lambda draw: draw.choice([named, named, named, converted, fedscale])(draw)
