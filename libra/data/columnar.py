"""Tables: parquet files (extra `parquet`) and saved Hugging Face datasets (extra `datasets`)."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import xxhash

from libra.data.source import BadRow, Record, RowSource
from libra.errors import DataError, SiteError

_READ_BYTES = 1 << 20


class Table(Protocol):
    """What both kinds of tables can do."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Record: ...


class TableSource:
    """Rows of a table; every row is an object, so none is bad by itself."""

    def __init__(self, path: Path, table: Table, fingerprint: str) -> None:
        self._path = path
        self._table = table
        self._fingerprint = fingerprint

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._table)

    def location(self, index: int) -> str:
        return f"{self._path}:row {index}"

    def record(self, index: int) -> Record | BadRow:
        return self._table.row(index)


def open_parquet(path: Path) -> RowSource:
    """Open a parquet file, held in memory as Arrow columns."""
    parquet = _extra("pyarrow.parquet", extra="parquet", path=path)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path}: {error}") from error
    return TableSource(path, _ArrowTable(table), _file_digest(path))


def open_saved_dataset(path: Path) -> RowSource:
    """Open a directory that `datasets.Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise DataError(f"{path}: holds several splits, name one of them: {', '.join(splits)}")
    if not (path / "dataset_info.json").is_file():
        raise DataError(f"{path}: not a directory written by datasets.save_to_disk")
    datasets = _extra("datasets", extra="datasets", path=path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    files = sorted(path.glob("*.arrow"))
    digest = xxhash.xxh3_128("".join(_file_digest(f) for f in files).encode()).hexdigest()
    return TableSource(path, _SavedDataset(dataset), digest)


class _ArrowTable:
    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Record:
        record: Record = self._table.slice(index, 1).to_pylist()[0]
        return record


class _SavedDataset:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Record:
        return dict(self._dataset[index])


def _extra(module: str, *, extra: str, path: Path) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise SiteError(
            f"{path} needs the package {module.partition('.')[0]}: pip install 'libra-rl[{extra}]'"
        ) from error


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
