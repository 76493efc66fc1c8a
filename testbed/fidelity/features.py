"""The features of a run's fidelity, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable

from testbed.fidelity.part import Evidence, FeatureFigures
from testbed.gpu import measured as gpu
from testbed.real_devices import measured as real_devices
from testbed.segments import measured as segments

PARTS: tuple[Callable[[Evidence], FeatureFigures | None], ...] = (
    segments.figures,
    gpu.figures,
    real_devices.figures,
)


def feature_figures(evidence: Evidence) -> tuple[FeatureFigures, ...]:
    return tuple(found for part in PARTS if (found := part(evidence)) is not None)
