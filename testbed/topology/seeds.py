"""Random generators of a run. There is one per device and purpose, so that the draws are independent of
each other."""

from __future__ import annotations

from agents.generator_keys import generator

__all__ = ["generator"]
