"""Comparison as a table for a paper: CSV, Markdown, LaTeX. To add a format, add a row to FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import pandas as pd

from analysis import comparison
from analysis.comparison import ComparisonRow

_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    ">": "$>$",
    "<": "$<$",
    "ε": r"$\varepsilon$",
}


def frame(rows: Sequence[ComparisonRow]) -> pd.DataFrame:
    """Fields of `ComparisonRow`. An interval such as `time` (s) has the columns `time_mean`, `time_low`
    and `time_high`, a cost also `time_median` and `time_above`, a setting one such as
    `settings_rule`."""
    table = pd.json_normalize([asdict(row) for row in rows], sep="_")
    return table.drop(columns=table.filter(regex="_count$").columns)


def _csv(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    return str(frame(rows).to_csv(index=False))


def _markdown(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    headings, cells = comparison.texts(rows)
    rule = [":--", *["--:"] * (len(headings) - 1)]
    lines = [" | ".join(cell.replace("|", r"\|") for cell in line) for line in (headings, rule, *cells)]
    table = "\n".join(f"| {line} |" for line in lines)
    return f"{table}\n\n{comparison.caption(rows, given=given)}\n"


def _latex(rows: Sequence[ComparisonRow], given: bool) -> str:  # noqa: FBT001
    headings, cells = comparison.texts(rows)
    table = pd.DataFrame([[_escaped(cell) for cell in line] for line in cells])
    text = table.to_latex(
        index=False,
        header=[_escaped(heading) for heading in headings],
        escape=False,
        column_format="l" + "r" * (len(headings) - 1),
    )
    return f"% {comparison.caption(rows, given=given)}\n% Needs \\usepackage{{booktabs}}\n{text}"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


FORMATS: Mapping[str, Callable[[Sequence[ComparisonRow], bool], str]] = {
    ".csv": _csv,
    ".md": _markdown,
    ".tex": _latex,
}
"""By suffix of the file. Parameters: the rows, and whether the user has set the target."""
