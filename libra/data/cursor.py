"""Which prompt comes next: a position in a sequence that depends on the seed alone."""

import msgspec
import numpy as np

from libra.errors import DataError
from libra.ids import PromptId


class PromptRef(msgspec.Struct, frozen=True):
    """One visit of the cursor to one row."""

    prompt_id: PromptId
    """The row's identity; the same in every epoch."""

    row: int
    """Index of the row in its source, bad and skipped rows counted."""

    epoch: int


class CursorState(msgspec.Struct, frozen=True):
    """Where a cursor stands, and in which sequence."""

    fingerprint: str
    seed: int
    epoch: int
    position: int
    """Index into the epoch's permutation of the next row to hand out."""


class Cursor:
    """Hands out the rows of a dataset epoch after epoch, for ever or for `max_visits` rows.

    With `shuffle`, the order of an epoch is `permutation(seed, epoch, number of rows)`; else it is
    the order of the file. Rows are never left over at the end of an epoch: a batch that needs more
    goes on with the next one.
    """

    def __init__(
        self,
        rows: np.ndarray,
        *,
        fingerprint: str,
        seed: int,
        shuffle: bool,
        max_visits: int | None = None,
    ) -> None:
        if not len(rows):
            raise DataError("no prompt is left to train on: the data holds no usable row")
        self._rows = rows
        self._fingerprint = fingerprint
        self._seed = seed
        self._shuffle = shuffle
        self._max_visits = max_visits
        self._go_to(epoch=0, position=0)

    @property
    def num_prompts(self) -> int:
        """Usable rows of the dataset."""
        return len(self._rows)

    def next(self) -> PromptRef | None:
        """The next visit; None when `max_visits` rows have been handed out."""
        num_visits = self._epoch * len(self._rows) + self._position
        if self._max_visits is not None and num_visits >= self._max_visits:
            return None
        return self.next_beyond()

    def next_beyond(self) -> PromptRef:
        """The next visit, whether or not `max_visits` rows have been handed out."""
        if self._position == len(self._rows):
            self._go_to(epoch=self._epoch + 1, position=0)
        row = int(self._rows[self._order[self._position]])
        self._position += 1
        return PromptRef(PromptId(f"row-{row}"), row, self._epoch)

    def dump(self) -> bytes:
        """What `restore` takes."""
        state = CursorState(self._fingerprint, self._seed, self._epoch, self._position)
        return msgspec.msgpack.encode(state)

    def restore(self, state: bytes) -> None:
        """Go on where `dump` was called.

        Raises DataError when the data or the seed is another one: going on would repeat some rows
        and leave out others without a word.
        """
        try:
            saved = msgspec.msgpack.decode(state, type=CursorState)
        except msgspec.MsgspecError as error:
            raise DataError(f"the saved position in the data cannot be read: {error}") from error
        if saved.fingerprint != self._fingerprint:
            raise DataError(
                "the training data, or which of its rows are used, changed since the checkpoint "
                f"was written (fingerprint {saved.fingerprint}, now {self._fingerprint}): restore "
                "the old file and limits, or start a new run"
            )
        if saved.seed != self._seed:
            raise DataError(f"the checkpoint was written with seed {saved.seed}, not {self._seed}")
        self._go_to(epoch=saved.epoch, position=saved.position)

    def _go_to(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        num_rows = len(self._rows)
        in_file_order = np.arange(num_rows)
        self._order = permutation(self._seed, epoch, num_rows) if self._shuffle else in_file_order


def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The order of an epoch: int64[num_rows], equal on every machine and with every numpy.

    Rows are sorted by the raw words of Philox4x64-10 keyed with (seed, epoch), ties by index.
    numpy promises the raw words of its bit generators, not what `Generator.permutation` makes of
    them.
    """
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def visits_of_epochs(*, num_prompts: int, epochs: int, prompts_per_step: int) -> int:
    """Visits after which every prompt has been seen `epochs` times, rounded up to whole steps."""
    return -(-num_prompts * epochs // prompts_per_step) * prompts_per_step
