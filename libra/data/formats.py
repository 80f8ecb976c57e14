"""One reader per kind of file, chosen by suffix."""

from pathlib import Path

from libra.data.columnar import open_parquet, open_saved_dataset
from libra.data.jsonl import JsonlSource
from libra.data.source import RowSource
from libra.errors import DataError


def open_source(path: Path) -> RowSource:
    """Open the rows of `path`: .jsonl, .jsonl.gz, .parquet, or a saved Hugging Face dataset.

    Raises DataError when the file cannot be read, is of another kind, or needs a package that is
    not installed.
    """
    if path.is_dir():
        return open_saved_dataset(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file or directory")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return JsonlSource(path)
    if path.suffix == ".parquet":
        return open_parquet(path)
    raise DataError(
        f"{path}: expected .jsonl, .jsonl.gz, .parquet or a directory written by "
        "datasets.save_to_disk"
    )
