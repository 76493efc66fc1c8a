"""A short part of `tests.fuzz_messages`: what devices send is taken or refused, and nothing else."""

from __future__ import annotations

from tests.fuzz_messages import fuzzing


def test_any_input_from_a_device_is_accepted_or_refused() -> None:
    with fuzzing(seed=7) as fuzz:
        for _ in range(2500):
            fuzz.step()
    assert fuzz.outcomes.total() >= 2500
    for part in ("aggregator", "controller", "router", "peer"):
        assert fuzz.outcomes[part, "taken"] > 50
        assert len([reason for named, reason in fuzz.outcomes if named == part]) > 3
