"""The data dictionary describes exactly the columns of the tables that are written and committed."""

import re

import pandas as pd
import pytest
from pyarrow import parquet

from analysis import dictionary, schema
from analysis.load import COMMITTED, FIGURES


def described(name, columns):
    """Whether the dictionary has each of these columns, and no other."""
    patterns = [column.name.replace("<i>", "[0-9]+") for column in dictionary.TABLES[name].columns]
    unknown = [column for column in columns if not any(re.fullmatch(pattern, column) for pattern in patterns)]
    absent = [pattern for pattern in patterns if not any(re.fullmatch(pattern, column) for column in columns)]
    return not unknown and not absent, (name, unknown, absent)


@pytest.mark.parametrize("source", COMMITTED)
def test_committed_tables_have_the_described_columns(source):
    for name, table in dictionary.TABLES.items():
        path = FIGURES / source / table.file
        columns = parquet.read_schema(path).names if path.suffix == ".parquet" else pd.read_csv(path, nrows=0).columns
        holds, detail = described(name, columns)
        assert holds, detail
    assert {path.name for path in (FIGURES / source).glob("*.parquet")} <= {t.file for t in dictionary.TABLES.values()}


def test_every_loaded_table_is_described(demo):
    assert set(demo.nonzeros) <= set(dictionary.TABLES)
    for name in ("rows", "curves", "settings"):
        holds, detail = described(name, getattr(demo, name).columns)
        assert holds, detail


def test_the_page_has_a_line_for_each_column():
    lines = dictionary.markdown().splitlines()
    cells = {line.split("|")[1].strip().strip("`") for line in lines if line.startswith("| ")}
    columns = [column for table in dictionary.TABLES.values() for column in table.columns]
    assert {column.name for column in columns} | {*schema.METRICS, *schema.OPS, *schema.PLANS} <= cells
    assert all(column.meaning for column in columns)
    assert all(f"## {table.file}" in lines for table in dictionary.TABLES.values())
