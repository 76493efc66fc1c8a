"""Configuration files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from agents import config
from agents.timing.nanoseconds import SECOND

LINK = config.AccessLink(up=5_000_000)
BROKER = config.BrokerAccess("127.0.0.1", 1883, "a", "s3cret")
TASK = config.Named("digits-logreg", {"l2": 0.1, "bias": False})
EXAMPLES: list[Any] = [
    config.ClientConfig(
        setup=config.ClientSetup(
            run="r",
            client="a",
            seed=7,
            rule=config.Named("fedbuff", {"buffer_size": 3}),
            local=config.LocalTraining(steps=5, lr_by_step=config.Schedule(over=5, shape="cosine")),
            steps=[config.Named("compression", {"kind": "topk", "params": {"share": 0.1}})],
            think=config.DrawnDuration("uniform", {"low": 0.1, "high": 0.2}),
            timing=config.DrawnDuration("trace", {"values": [0.1, 0.2]}),
        ),
        broker=BROKER,
        task=TASK,
        start=config.InitialModel("/start.safetensors", ["0.*"]),
        shard="/data/a",
        threads=1,
        parameters=650,
        buffers=3,
    ),
    config.AggregatorConfig(
        settings=config.RunSettings(
            run="r",
            importance={"a": 0.25, "b": 0.75},
            evaluate_every=2 * SECOND,
            stop=config.StopConditions(after=10.0, target_accuracy=0.9),
            patience={"a": math.inf},
        ),
        broker=BROKER,
        task=TASK,
        rule=config.Named("fedbuff", {"buffer_size": 3}),
        seed=7,
        test_set="/data/test",
        run_directory="/run",
        threads=2,
        leg="2",
        durability="checkpoint",
    ),
    config.DeviceConfig(
        run="r",
        device="a",
        broker=BROKER,
        data_address="server",
        link=LINK,
        probed=None,
        client_config="/config",
        isolated="/isolated",
        turns="/turns",
        user=1000,
        telemetry_every=0.5,
    ),
    config.RouterConfig(
        run="r",
        broker=BROKER,
        targets={"mqtt": 1883, "aggregator": 1884},
        addresses={"a": "10.0.0.2"},
        links={"a": {"rtt": 0.1, "jitter": 0.0, "loss": 0.0}},
        segments=[config.Segment("wifi", up=2_000_000)],
        attached={"a": "wifi"},
        seed=3,
    ),
]


def test_link_behind_a_shared_one_has_the_lower_rate() -> None:
    link = config.AccessLink(up=5_000_000, rtt=0.1)
    assert link.through([]) == link
    shared = config.Segment("wifi", up=2_000_000, down=9_000_000)
    assert link.through([shared]) == config.AccessLink(up=2_000_000, down=9_000_000, rtt=0.1)
    assert config.AccessLink().through([config.Segment("wifi", down=1)]) == config.AccessLink(down=1)
    slow = config.Segment("wifi", up=1, rtt=0.25)
    assert link.delayed_by([slow]) == config.AccessLink(up=5_000_000, rtt=0.35)


@pytest.mark.parametrize("example", EXAMPLES)
def test_configurations_are_written_and_read_back(example: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config.dump(example, path)
    assert config.load(type(example), path) == example


def test_repr_hides_the_password() -> None:
    assert "s3cret" not in repr(EXAMPLES)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"up": 1, "sideways": 2}, "AccessLink has no field sideways"),
        ([], "AccessLink: .*got `array`"),
        (3, "AccessLink: .*got `int`"),
        ({"up": "1"}, r"AccessLink: .*got `str` - at `\$\.up`"),
    ],
)
def test_invalid_configurations_are_refused(values: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config.from_dict(config.AccessLink, values)


def test_unknown_and_missing_fields_of_a_nested_part_are_named() -> None:
    values = dataclasses.asdict(EXAMPLES[1])
    values["settings"]["stop"]["never"] = 1
    with pytest.raises(ValueError, match=r"AggregatorConfig has no field settings\.stop\.never"):
        config.from_dict(config.AggregatorConfig, values)
    del values["broker"]["username"]
    with pytest.raises(ValueError, match=r"`username` - at `\$\.broker`"):
        config.from_dict(config.AggregatorConfig, values)


def test_file_without_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1"):
        config.load(config.AccessLink, path)
