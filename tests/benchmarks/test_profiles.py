"""The catalogue's speeds in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.profiles import DEVICES, fit, table
from testbed.topology import profiles

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "profiles.md"


@pytest.mark.parametrize("device", DEVICES)
def test_catalogue_matches_the_fit_to_the_published_times(device: str) -> None:
    training = profiles.load().device(device).training
    assert training is not None
    assert training.model_dump(exclude_none=True) == pytest.approx(fit(device).entry())


@pytest.mark.parametrize("device", DEVICES)
def test_networks_held_out_of_the_fit_are_predicted(device: str) -> None:
    found = fit(device)
    assert found.error < 0.1
    assert max(map(abs, found.errors.values())) < 0.25
    assert found.family_error < 0.25


def test_table_lists_every_network_with_a_time() -> None:
    fits = {device: fit(device) for device in DEVICES}
    lines = table(fits).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert any(line.startswith("| resnet18 | 10.92 | ") for line in lines)
    assert table(fits) in DOCUMENT.read_text(encoding="utf-8")


def test_catalogue_has_no_other_training_figures() -> None:
    known = {name for name, entry in profiles.load().devices.items() if entry.training is not None}
    assert known == set(DEVICES)
