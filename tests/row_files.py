"""Rows, alike in files of every format: `WRITERS[format](folder, rows)` writes them and returns the path."""

import csv
import gzip
import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from small_data import write_lines

needs_json = pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets has no Json")


def write_json_lines(folder, rows):
    return write_lines(folder / "rows.jsonl", *map(json.dumps, rows))


def write_json(folder, rows):
    (folder / "rows.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    return folder / "rows.json"


def write_gzip(folder, rows):
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def write_zstd(folder, rows):
    path = folder / "rows.json.zst"
    path.write_bytes(pyarrow.compress(json.dumps(rows).encode(), "zstd", asbytes=True))
    return path


def cell_of(value):
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def write_cells(name, delimiter):
    def write(folder, rows):
        keys = sorted({key for row in rows for key in row})
        text = io.StringIO()
        cells = csv.writer(text, delimiter=delimiter)
        cells.writerow(keys)
        cells.writerows([cell_of(row.get(key)) for key in keys] for row in rows)
        whole = text.getvalue().encode()
        (folder / name).write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)
        return folder / name

    return write


def table_of(rows):
    """With an index of pandas beside the columns, as its files have."""
    names = {key: None for row in rows for key in row}
    table = pyarrow.Table.from_pylist([names | row for row in rows])
    return table.append_column("__index_level_0__", [list(range(len(rows)))])


def write_parquet(folder, rows):
    pyarrow.parquet.write_table(table_of(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_arrow(new):
    def write(folder, rows):
        table = table_of(rows)
        with new(str(folder / "rows.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return folder / "rows.arrow"

    return write


def wide(kind):
    """The type with large lists, string views and encoded texts."""
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(field.name, wide(field.type)) for field in kind])
    if pyarrow.types.is_list(kind):
        return pyarrow.large_list(wide(kind.value_type))
    return pyarrow.large_string() if pyarrow.types.is_string(kind) else kind


def write_wide(folder, rows):
    table = pyarrow.Table.from_pylist(rows)
    schema = pyarrow.schema([(field.name, wide(field.type)) for field in table.schema])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), folder / "rows.parquet", row_group_size=9)
    return folder / "rows.parquet"


def write_data_set(folder, rows, **how):
    path = folder / "rows.parquet"
    datasets.Dataset.from_list(rows, **how).to_parquet(path)
    return path


def save_to_disk(folder, rows, **how):
    datasets.Dataset.from_list(rows, **how).save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


def as_json(rows, shape):
    """Features of `datasets` for whole columns, or for their items, of JSON."""
    return datasets.Features({key: shape(datasets.Json()) for key in {key: None for row in rows for key in row}})


WRITERS = {
    "json": write_json,
    "gz": write_gzip,
    "zst": write_zstd,
    "csv": write_cells("rows.csv", ","),
    "tsv": write_cells("rows.tsv", "\t"),
    "csv.gz": write_cells("rows.csv.gz", ","),
    "parquet": write_parquet,
    "large types": write_wide,
    "arrow stream": write_arrow(pyarrow.ipc.new_stream),
    "arrow file": write_arrow(pyarrow.ipc.new_file),
    "datasets, parquet": write_data_set,
    "datasets, saved": save_to_disk,
}
JSON_WRITERS = {
    "whole columns": lambda folder, rows: write_data_set(folder, rows, features=as_json(rows, lambda value: value)),
    "items, saved": lambda folder, rows: save_to_disk(folder, rows, features=as_json(rows, datasets.List)),
    "mixed types": lambda folder, rows: write_data_set(folder, rows, on_mixed_types="use_json"),
}
