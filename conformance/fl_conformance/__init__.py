"""Conformance kit: does an implementation of an aggregation rule compute what the paper says?

    fl-conformance my_adapter:Adapter --rule fedbuff

`Adapter` is the interface that an implementation needs. `check` does the same from Python. The kit
imports NumPy and PyYAML only.
"""

from __future__ import annotations

from fl_conformance.adapter import Adapter as Adapter
from fl_conformance.adapter import Client as Client
from fl_conformance.adapter import ClientUpdate as ClientUpdate
from fl_conformance.adapter import Setting as Setting
from fl_conformance.checking import RuleResult as RuleResult
from fl_conformance.checking import ScenarioResult as ScenarioResult
from fl_conformance.checking import check as check
from fl_conformance.scenario import ConformanceError as ConformanceError
from fl_conformance.scenario import rule_names as rule_names

__version__ = "0.1.0"
