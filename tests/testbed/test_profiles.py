from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from testbed.errors import BadInputError
from testbed.topology import profiles, yamlfile
from testbed.topology.links import LinkSettings
from testbed.topology.profiles import DeviceProfile, LinkClass, Profiles

LINK = "links:\n  lte: {down: 1mbit}\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of settings, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "testbed"
    folder.mkdir(parents=True)
    return folder


def test_built_in_profiles_are_listed() -> None:
    found = profiles.load()
    assert found.device("raspberry-pi-4").gflops == 11.9
    assert found.device("raspberry-pi-zero-2w").memory == 512 * 2**20
    assert found.device("jetson-nano").gflops is None
    lte = found.link("lte")
    assert (lte.down, lte.up, lte.rtt, lte.loss) == (12_000_000, 12_000_000, 0.07, None)
    rural = found.link("2g-rural")
    assert (rural.down, rural.up, rural.rtt, rural.loss) == (20_000, 18_000, 1.3, 0.02)


def test_each_built_in_entry_has_a_source_and_can_be_listed_written_and_used() -> None:
    found = profiles.load()
    for entry in (*found.devices.values(), *found.links.values()):
        assert entry.description
        assert entry.source
    for link in found.links.values():  # each parses like a link of a topology
        read = LinkSettings.model_validate(link.figures())
        assert (read.up, read.down, read.rtt) == (link.up, link.down, link.rtt)
    for text in (profiles.listing(found), profiles.details(found)):
        assert max(map(len, text.splitlines())) <= 80
    (row,) = json.loads(json.dumps(profiles.rows(found.select("dsl"))))
    assert (row["name"], row["kind"], row["down"], row["rtt"]) == ("dsl", "link", "1500kbit", "50ms")
    assert row["loss"] is None
    data = {
        kind: {name: entry.model_dump(mode="json", exclude_none=True) for name, entry in of.items()}
        for kind, of in (("devices", found.devices), ("links", found.links))
    }
    assert profiles.parse(yamlfile.write(data)) == found, "written profiles are read back"


def test_later_file_replaces_whole_entries(home: Path, tmp_path: Path) -> None:
    (home / "profiles.yaml").write_text("devices:\n  toaster: {gflops: 0.1, cores: 1}\n" + LINK)
    mine = profiles.load()
    assert mine.device("toaster") == DeviceProfile(gflops=0.1, cores=1)
    assert mine.link("lte") == LinkClass.model_validate({"down": "1mbit"})
    assert mine.link("4g") == profiles.load(tmp_path).link("4g")

    (tmp_path / "profiles.yaml").write_text("devices:\n  toaster: {cores: 2}\n")
    beside = profiles.load(tmp_path)
    assert beside.device("toaster") == DeviceProfile(cores=2)
    assert beside.links == mine.links


@pytest.mark.parametrize("text", ["", "# links:\n#   lte: {down: 1mbit}\n", "devices:\nlinks:\n"])
def test_file_of_comments_changes_nothing(home: Path, text: str) -> None:
    before = profiles.load()
    (home / "profiles.yaml").write_text(text)
    assert profiles.load() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices:\n  pi: {gflop: 3}", "2:8: devices.pi.gflop: unknown key; did you mean gflops?"),
        ("devices:\n  pi: {gflops: 0}", "2:16: devices.pi.gflops: found 0, expected a number above 0"),
        ("devices:\n  pi: {description: x}", "2:7: devices.pi: found none of gflops, cores, memory"),
        (
            "devices:\n  My Pi: {cores: 4}",
            "2:3: devices.My Pi: found 'My Pi', expected a name of at most",
        ),
        ("devices:\n  pi: fast", "2:7: devices.pi: found 'fast', expected keys and values"),
        (
            "devices:\n  pi: {power: {train: 7.2}}",
            "2:23: devices.pi.power.train: found 7.2, expected a power with its unit (W, mW)",
        ),
        (
            "devices:\n  pi: {training: {convolution: 1, depthwise: 1, memory: 1}}",
            "2:18: devices.pi.training: has no matrix, and there are no gflops: add one of the two",
        ),
        (
            "devices:\n  pi: {gflops: 1, training: {convolution: 1, memory: 1}}",
            "2:29: devices.pi.training: depthwise is missing",
        ),
        ("devices: [pi]", "1:10: devices: expected entries by name"),
        ("link:\n  a: {up: 1mbit}", "1:1: link: unknown key; did you mean links?"),
        ("links:\n  a: {up: 5MB}", "2:11: links.a.up: found '5MB', expected bits per second"),
        ("links:\n  a: {loss: 2}", "2:13: links.a.loss: found 2, expected a share from 0 to 1"),
        ("links:\n  a: {up: 1mbit}\n  a: {up: 2mbit}", "3:3: links.a: is also on line 2"),
        ("- links", "1:1: expected devices: or links:"),
    ],
)
def test_invalid_profile_is_reported_with_its_place(home: Path, text: str, told: str) -> None:
    path = home / "profiles.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError) as refused:
        profiles.load()
    message, *_, count = str(refused.value).splitlines()
    assert message.startswith(f"{path}:{told}")
    assert count == f"{path}: 1 error"


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(BadInputError, match="t: 3 errors"):
        profiles.parse("devices:\n  a: {gflops: x, b: 1}\nlinks:\n  c: {up: 5}\n", "t")


def test_unknown_name_gets_a_suggestion() -> None:
    found = profiles.load()
    with pytest.raises(BadInputError, match=r"'pi-4': did you mean raspberry-pi-4\?"):
        found.device("pi-4")
    with pytest.raises(BadInputError, match="no device profile is called 'rasperry-pi-5': did you mean"):
        found.device("rasperry-pi-5")
    with pytest.raises(BadInputError, match=r"no link class is called 'warp': known are 2g, 3g, "):
        found.link("warp")
    with pytest.raises(BadInputError, match=r"called 'ltee': did you mean lte\?"):
        found.select("ltee")


def test_listing_has_a_table_per_kind() -> None:
    text = """\
        devices:
          pi: {gflops: 11.9, cores: 4, training: {convolution: 1, depthwise: 1, memory: 1}}
          zero: {gflops: 0.37, memory: 512MiB, power: {train: 2.1W, wait: 500mW}}
          near: {gflops: 2, training: {convolution: 1, depthwise: 1, memory: 1, error: 9.4%}}
        links:
          slow: {down: 1mbit, up: 20kbit, loss: 2%}
        """
    assert profiles.listing(profiles.parse(textwrap.dedent(text))).splitlines() == [
        "device  gflops  cores  memory  power                  training",
        "pi      11.9    4      –       –                      known",
        "zero    0.37    –      512MiB  train 2.1W, wait 0.5W  –",
        "near    2       –      –       –                      within 9%",
        "",
        "link  down   up      loss",
        "slow  1mbit  20kbit  0.02",
    ]
    assert profiles.listing(Profiles()) == ""


def test_single_entry_is_explained() -> None:
    one = profiles.parse("links:\n  a: {description: A wire., up: 1mbit, rtt: 5ms, source: me}").select(
        "a"
    )
    assert profiles.details(one).splitlines() == [
        "a",
        "    up: 1mbit",
        "    rtt: 5ms",
        "    source: me",
        "",
        "A wire.",
    ]
