import gzip

import pytest

from libra.data.formats import open_source
from libra.data.jsonl import JsonlSource
from libra.data.source import BadRow
from libra.errors import DataError, SiteError


def write(path, content):
    path.write_bytes(content)
    return path


def records(source):
    return [source.record(i) for i in range(len(source))]


@pytest.mark.case("T-B39")
@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        (b'{"a":', 6, "Expecting value"),
        (b"[1]", 1, "expected an object, found a list"),
        (b"  null", 3, "expected an object, found null"),
        (b"5", 1, "expected an object, found a number"),
        (b"true", 1, "expected an object, found a boolean"),
        (b'"x"', 1, "expected an object, found a string"),
        (b'{"a": NaN}', 7, "NaN is not JSON"),
        (b'{"a": "\xc3\xa9\xff"}', 9, "byte 0xff is not UTF-8"),
        (b'{"a": 1} {"a": 2}', 10, "Extra data"),
        (b'{"a": "' + b"\x01" + b'"}', 8, "Invalid control character at"),
        (b"[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_column(tmp_path, line, column, reason):
    path = write(tmp_path / "x.jsonl", b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    assert records(JsonlSource(path)) == [
        {"a": 1},
        BadRow(f"{path}:3:{column}", reason),
        {"a": 2},
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\n{"a": 2}',
        b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\r\n',
    ],
)
def test_byte_order_marks_line_ends_and_blank_lines_make_no_difference(tmp_path, content):
    source = JsonlSource(write(tmp_path / "x.jsonl", content))
    assert records(source) == [{"a": 1}, {"a": 2}]


def test_only_a_newline_ends_a_line(tmp_path):
    text = "a\u2028b\u2029c\x85d\u000be"
    path = write(tmp_path / "x.jsonl", f'{{"a": "{text[:-2]}"}}\n{{"b": 1}}\n'.encode())
    assert records(JsonlSource(path)) == [{"a": text[:-2]}, {"b": 1}]


def test_a_compressed_file_has_the_rows_and_the_fingerprint_of_the_plain_one(tmp_path):
    content = b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n'
    plain = open_source(write(tmp_path / "x.jsonl", content))
    packed = open_source(write(tmp_path / "x.jsonl.gz", gzip.compress(content)))
    assert records(packed) == records(plain)
    assert packed.fingerprint == plain.fingerprint


@pytest.mark.parametrize("other", [b'{"a": 2}\n', b'{"a": 1} \n', b'{"a": 1}'])
def test_the_fingerprint_changes_with_one_byte(tmp_path, other):
    first = JsonlSource(write(tmp_path / "x.jsonl", b'{"a": 1}\n')).fingerprint
    assert JsonlSource(write(tmp_path / "x.jsonl", other)).fingerprint != first


@pytest.mark.parametrize("cut", [10, 30])
def test_a_damaged_compressed_file_is_a_data_error(tmp_path, cut):
    path = write(tmp_path / "x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 50)[:cut])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz"):
        open_source(path)


def test_a_file_that_shrinks_under_the_run_is_a_data_error(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"a": 1}\n{"a": 2}\n')
    source = JsonlSource(path)
    write(path, b"{")
    with pytest.raises(DataError, match="became shorter"):
        source.record(1)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        source.record(1)


@pytest.mark.case("T-B43")
def test_the_reader_is_chosen_by_suffix_and_others_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"x\.csv: expected \.jsonl, \.jsonl\.gz, \.parquet"):
        open_source(write(tmp_path / "x.csv", b""))
    with pytest.raises(DataError, match="no such file or directory"):
        open_source(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"not a directory written by datasets\.save_to_disk"):
        open_source(tmp_path)


@pytest.mark.case("T-B43")
def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(SiteError, match=r"pip install 'libra-rl\[parquet\]'"):
        open_source(write(tmp_path / "x.parquet", b"PAR1"))
    write(tmp_path / "dataset_info.json", b"{}")
    with pytest.raises(SiteError, match=r"pip install 'libra-rl\[datasets\]'"):
        open_source(tmp_path)
