"""Conformance kit: does an implementation of an aggregation rule compute what the paper says?

    python -m testbed.conformance my_adapter:Adapter --rule fedbuff

`Adapter` is the interface that an implementation needs. `check` does the same from Python. The kit
imports NumPy and PyYAML only. topologies/conformance/README.md has an example.
"""

from __future__ import annotations

from testbed.conformance.adapter import Adapter as Adapter
from testbed.conformance.adapter import Client as Client
from testbed.conformance.adapter import ClientUpdate as ClientUpdate
from testbed.conformance.adapter import Setting as Setting
from testbed.conformance.checking import RuleResult as RuleResult
from testbed.conformance.checking import ScenarioResult as ScenarioResult
from testbed.conformance.checking import check as check
from testbed.conformance.scenario import rule_names as rule_names
