"""Tables: parquet with the real pyarrow, saved data sets with the files of the real package."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from libra.data.formats import open_source
from libra.errors import DataError
from saved_datasets import datasets_module, save_to_disk

ROWS = [
    {"prompt": [{"role": "user", "content": "h\u00e9"}], "answer": "1", "level": 3},
    {"prompt": [{"role": "user", "content": "b"}], "answer": None, "level": None},
]


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(params=["parquet", "saved"])
def write(request, tmp_path, monkeypatch):
    """Write rows under a name, and say what is to be opened."""
    if request.param == "parquet":
        return lambda name, rows: write_parquet(tmp_path / f"{name}.parquet", rows)
    monkeypatch.setitem(sys.modules, "datasets", datasets_module())
    return lambda name, rows: save_to_disk(tmp_path / name, rows)


@pytest.mark.case("T-B43")
def test_rows_come_out_as_they_were_put_in(write):
    source = open_source(write("x", ROWS))
    assert [source.record(i) for i in range(len(source))] == ROWS
    assert source.location(1).endswith(":row 1")


def test_the_fingerprint_is_that_of_the_content(write):
    first, same = (open_source(write(name, ROWS)).fingerprint for name in ("x", "y"))
    other = open_source(write("z", [*ROWS[:1], {**ROWS[1], "answer": "2"}])).fingerprint
    assert first == same != other


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1xxxxPAR1"])
def test_a_damaged_table_is_a_data_error_that_names_it(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet: "):
        open_source(path)


def test_a_damaged_saved_data_set_is_a_data_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", datasets_module())
    path = save_to_disk(tmp_path / "x", ROWS)
    (path / "data-00000-of-00001.arrow").write_bytes(b"xx")
    with pytest.raises(DataError, match=r"/x: "):
        open_source(path)


def test_of_a_saved_dictionary_of_splits_one_has_to_be_named(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "x" / split, ROWS)
    (tmp_path / "x" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="holds several splits, name one of them: test, train"):
        open_source(tmp_path / "x")
