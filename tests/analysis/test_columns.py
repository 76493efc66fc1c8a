"""Definitions of the columns of all tables: complete, and in the exported files."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import parquet

from analysis import export
from analysis.columns import COLUMNS
from analysis.features import FeatureTables
from analysis.load import Run, load
from tests.analysis.conftest import EVENTS, MANIFEST, write_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of a language task, whose tables have all columns."""
    folder = tmp_path / "run"
    folder.mkdir()
    figures = {"group": "pi", "cpu": {"asked": 0.5, "got": 0.4, "error": -20.0}}
    (folder / "fidelity.json").write_text(json.dumps({"devices": {"fast": figures}}))
    return load(write_run(folder, EVENTS, "name: a\n", MANIFEST | {"perplexity": True}))


def test_every_column_of_every_table_is_defined(run: Run, tmp_path: Path) -> None:
    (*_, runs) = export.export_runs([run], tmp_path / "tables")
    found = {name: set(table.columns) for name, table in run.tables.items()}
    found["runs"] = set(pd.read_parquet(runs).columns)
    assert found == {name: set(columns) for name, columns in COLUMNS.items()}


def test_every_table_of_a_feature_is_an_attribute_that_type_checkers_know(run: Run) -> None:
    declared = {name for base in FeatureTables.__mro__ for name in vars(base).get("__annotations__", {})}
    assert declared == set(run.more)
    assert all(getattr(run, name) is table for name, table in run.more.items())


def test_numbers_have_unit_and_sign(run: Run) -> None:
    for name, table in run.tables.items():
        for key in table.select_dtypes("number").columns:
            column = COLUMNS[name][key]
            assert column.unit, (name, key)
            assert column.sign, (name, key)


def test_parquet_files_have_the_definitions_as_metadata(run: Run, tmp_path: Path) -> None:
    run.export(tmp_path / "tables")
    schema = parquet.read_schema(tmp_path / "tables" / "telemetry.parquet")
    assert {key.decode(): text.decode() for key, text in schema.field("sent").metadata.items()} == {
        "meaning": "Bytes sent over the link",
        "unit": "byte",
        "sign": "≥ 0",
        "cumulative": "start of the device's container or process",
    }
    assert b"cumulative" not in schema.field("memory").metadata
    again = pd.read_parquet(tmp_path / "tables" / "updates.parquet")
    pd.testing.assert_frame_equal(again, run.updates)
