"""Hypothesis for this folder: no deadline per example, because a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("agents", deadline=None, max_examples=50)
settings.load_profile("agents")
