"""ε of each client, from a run's records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from agents import events
from analysis import privacy, summary
from analysis.load import Run, load
from tests.analysis.conftest import EVENTS, MANIFEST, write_run

_UPDATE = next(line for line in EVENTS if '"update"' in line)


def _run(path: Path, at: str, *records: events.Record) -> Run:
    """A run with evaluations at 2 s and 9 s."""
    private = f"{{differential: {{clip: 1.0, noise: 2.0, at: {at}, delta: 0.00001}}}}"
    topology = f"name: private\nrule: {{name: fedbuff, buffer_size: 2}}\nprivacy: {private}\n"
    more = [*records, events.Evaluated(2.0, 1, 0.5, 0.5), events.Evaluated(9.0, 2, 0.4, 0.6)]
    lines = [EVENTS[0], *(events.to_line(record).strip() for record in more), EVENTS[-1]]
    write_run(path, lines, topology, MANIFEST)
    return load(path)


def _update(client: str, dispatch: int, version: int, weight: float, arrived: float) -> events.Record:
    update = events.from_line(_UPDATE)
    assert isinstance(update, events.UpdateApplied)
    when = {"arrived": arrived, "applied": arrived}
    known = replace(update, client=client, dispatch=dispatch, applied_version=version, weight=weight)
    return replace(known, **when)  # type: ignore[arg-type]  # of other fields


@pytest.mark.parametrize(("noise", "times"), [(4.0, 1), (1.0, 1), (1.0, 10), (0.5, 25), (8.0, 1000)])
def test_accountant_equals_the_composition_of_dp_accounting(noise: float, times: int) -> None:
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise), times)
    found = privacy.epsilon(times / noise**2, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert privacy.epsilon(0.0, 1e-5) == 0.0


def test_client_noise_counts_every_received_update_once(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        "client",
        _update("fast", 1, 1, 0.5, 1.0),
        _update("fast", 2, 1, 0.25, 1.5),
        events.UpdateRejected(3.0, "fast", "its buffer is lost", 3),
        events.UpdateRejected(3.5, "fast", "duplicate: sequence 3", 3),
        events.UpdateRejected(4.0, "slow", "unreadable", 0),
        _update("slow", 4, 2, 0.5, 5.0),
    )
    taken = privacy.participations(run)
    assert taken["client"].tolist() == ["fast", "fast", "fast", "slow"]
    assert taken["spent"].tolist() == [0.25] * 4
    found = summary.devices(run)["epsilon"]
    assert found["fast"] == privacy.epsilon(0.75, 1e-5)
    assert found["slow"] == privacy.epsilon(0.25, 1e-5)
    assert found["mute"] == 0.0
    assert privacy.highest(run, run.evaluations["at"]).tolist() == [
        privacy.epsilon(0.5, 1e-5),
        found["fast"],
    ]
    written = privacy.record(run)
    assert written is not None
    assert written["epsilon"]["fast"] == pytest.approx(found["fast"], abs=1e-6)


def test_client_noise_counts_updates_buffered_at_an_interrupt(tmp_path: Path) -> None:
    """Updates that never arrived do not count; an update applied after a resume counts once."""
    run = _run(
        tmp_path,
        "client",
        _update("fast", 1, 1, 0.5, 1.0),
        events.RoundUnfinished(5.0, "fast", 1, 1.5, 3.0, 2),
        events.RoundUnfinished(5.0, "slow", 0, 0.5, 4.0, 3),
        events.RoundUnfinished(5.0, "fast", 1, 3.5, 5.0, 4),
        _update("slow", 3, 2, 0.5, 4.0),
    )
    found = privacy.participations(run)
    assert list(zip(found["client"], found["at"], strict=True)) == [
        ("fast", 1.0),
        ("fast", 3.0),
        ("slow", 4.0),
    ]


def test_server_noise_counts_versions_by_the_clients_weight(tmp_path: Path) -> None:
    """Noise is z times the bound of the heaviest update. An update of half its weight spends a quarter;
    two of one client in one version spend as much as one of both weights."""
    run = _run(
        tmp_path,
        "server",
        _update("fast", 1, 1, 0.5, 1.0),
        _update("slow", 2, 1, 0.25, 1.0),
        _update("fast", 3, 2, 0.5, 5.0),
        _update("fast", 4, 2, 0.25, 5.0),
        events.UpdateRejected(6.0, "fast", "its buffer is lost", 5),
    )
    total = privacy.participations(run).groupby("client")["spent"].sum()
    assert total.to_dict() == {"fast": 0.25 + 1.5**2 * 0.25, "slow": 0.25 * 0.25}


def test_run_without_differential_privacy_has_no_epsilon(directory: Path) -> None:
    run = load(directory)
    assert "epsilon" not in summary.devices(run)
    assert privacy.record(run) is None
    assert all(math.isnan(one) for one in privacy.highest(run, run.evaluations["at"]))
