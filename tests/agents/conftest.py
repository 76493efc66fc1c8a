"""Hypothesis for this folder: no bounds in seconds, because a busy machine is no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "agents", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("agents")
