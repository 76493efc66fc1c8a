"""The selections: who trains next. To add one, write a module in this folder and add a line to
`SELECTIONS`."""

from __future__ import annotations

from agents.selection.charged import Charged
from agents.selection.fastest import Fastest
from agents.selection.interface import ClientSelection
from agents.selection.oort import Oort
from agents.selection.round_robin import RoundRobin
from agents.selection.tifl import Tifl
from agents.selection.uniform import UniformSelection

SELECTIONS: dict[str, type[ClientSelection]] = {
    "charged": Charged,
    "fastest": Fastest,
    "oort": Oort,
    "round_robin": RoundRobin,
    "tifl": Tifl,
    "uniform": UniformSelection,
}
