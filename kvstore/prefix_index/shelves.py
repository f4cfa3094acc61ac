"""The mirror's storage: which row (one epoch of one replica) holds which hash, as bit masks. Not thread-safe.

shelf of a fingerprint:   confirmed  hash → mask of rows     said by replicas
                          guessed    hash → mask of rows     said by a router, for a few seconds
row:                      its bit, and the set of its confirmed hashes
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Shelf:
    """Everything under one fingerprint. `live` masks the rows that may be answered."""

    confirmed: dict[bytes, int] = field(default_factory=dict)
    guessed: dict[bytes, int] = field(default_factory=dict)
    live: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """One epoch of one replica. `epoch` None: only guessed about, no lease seen yet."""

    bit: int
    replica_id: str
    epoch: str | None
    fingerprint: str
    shelf: Shelf
    facts: str = "{}"
    seq: int = 0
    digest: int = 0
    is_synced: bool = False
    exact_at: float = 0.0
    hashes: set[bytes] = field(default_factory=set)
    hash_to_expiry: dict[bytes, float] = field(default_factory=dict)  # guesses


@dataclass(frozen=True, slots=True)
class Reach:
    """The rows in `mask` hold exactly the first `num_blocks` of the hashes asked for."""

    mask: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Guesses:
    expires_at: float
    row: Row
    hashes: list[bytes]  # one list a call: an object a hash would keep the garbage collector busy


class Shelves:
    """Rows and what they hold, at most `max_entries` (row, hash) pairs, guesses included.

    A pair that does not fit is not stored; nothing else makes room for it.
    """

    def __init__(self, max_entries: int, speculative_s: float) -> None:
        self._max_entries = max_entries
        self._speculative_s = speculative_s
        self._fingerprint_to_shelf: dict[str, Shelf] = {}
        self._rows: list[Row] = []  # live and retired
        self._used_bits = 0
        self._queue: deque[_Guesses] = deque()  # by expiry; outdated ones stay until their turn
        self._num_guessed = 0
        self._num_confirmed = 0

    @property
    def num_entries(self) -> int:
        return self._num_confirmed + self._num_guessed

    @property
    def has_guesses(self) -> bool:
        return self._num_guessed > 0

    def shelf(self, fingerprint: str) -> Shelf | None:
        return self._fingerprint_to_shelf.get(fingerprint)

    def open_row(self, replica_id: str, epoch: str | None, fingerprint: str) -> Row:
        """A new empty row that is answered from now on."""
        bit = ~self._used_bits & (self._used_bits + 1)  # the lowest free one
        self._used_bits |= bit
        shelf = self._fingerprint_to_shelf.setdefault(fingerprint, Shelf())
        shelf.live |= bit
        row = Row(bit, replica_id, epoch, fingerprint, shelf)
        self._rows.append(row)
        return row

    def retire(self, row: Row) -> None:
        """Answer the row no more. Its entries, and then its bit, are given back by `sweep`."""
        row.shelf.live &= ~row.bit

    def sweep(self, max_hashes: int) -> bool:
        """Give back up to `max_hashes` entries of retired rows; whether that was the limit."""
        for row in [row for row in self._rows if not row.shelf.live & row.bit]:
            part = [h for h, _ in zip(row.hashes, range(max_hashes), strict=False)]
            self.remove(row, part)
            max_hashes -= len(part)
            if not row.hashes and not row.hash_to_expiry:
                self._rows.remove(row)
                self._used_bits &= ~row.bit
                if not any(other.shelf is row.shelf for other in self._rows):
                    del self._fingerprint_to_shelf[row.fingerprint]
        return not max_hashes

    def reaches(self, shelf: Shelf, hashes: Sequence[bytes], *, with_view: bool) -> list[Reach]:
        """How far each live row follows `hashes`; rows without the first are left out. A hole ends a row's reach.

        `with_view` False leaves out what replicas said and answers from guesses alone.
        """
        confirmed = shelf.confirmed if with_view else {}
        guessed = shelf.guessed
        reaches: list[Reach] = []
        mask, num_blocks = shelf.live, 0
        for h in hashes:
            held = mask & (confirmed.get(h, 0) | guessed.get(h, 0))
            if held != mask:
                reaches.append(Reach(mask ^ held, num_blocks))
                mask = held
                if not mask:
                    break
            num_blocks += 1
        reaches.append(Reach(mask, num_blocks))
        return [reach for reach in reaches if reach.mask and reach.num_blocks]

    def add(self, row: Row, hashes: Iterable[bytes]) -> None:
        """The replica said it holds `hashes`; a guess of the same is thereby settled."""
        confirmed, bit = row.shelf.confirmed, row.bit
        for h in hashes:
            if h in row.hash_to_expiry:
                self._drop_guess(row, h)
            if h not in row.hashes and self.num_entries < self._max_entries:
                row.hashes.add(h)
                confirmed[h] = confirmed.get(h, 0) | bit
                self._num_confirmed += 1

    def remove(self, row: Row, hashes: Iterable[bytes]) -> None:
        """The replica said it holds `hashes` no more; ones it never held are skipped."""
        for h in hashes:
            if h in row.hashes:
                row.hashes.remove(h)
                _clear_bit(row.shelf.confirmed, h, row.bit)
                self._num_confirmed -= 1

    def guess(self, row: Row, hashes: Iterable[bytes], now: float) -> None:
        """Believe until `now + speculative_s` that the row holds `hashes`.

        A guess that is still in the first half of its life is not renewed, which bounds the queue at three
        entries a guess however often a prefix is routed.
        """
        expires_at = now + self._speculative_s
        hash_to_expiry, guessed = row.hash_to_expiry, row.shelf.guessed
        noted: list[bytes] = []
        for h in hashes:
            known = hash_to_expiry.get(h)
            if known is None:
                if self.num_entries >= self._max_entries:
                    break
                self._num_guessed += 1
                guessed[h] = guessed.get(h, 0) | row.bit
            elif expires_at - known < self._speculative_s / 2:
                continue
            hash_to_expiry[h] = expires_at
            noted.append(h)
        if noted:
            self._queue.append(_Guesses(expires_at, row, noted))

    def expire(self, now: float) -> None:
        """Drop guesses whose life is over. `now` must not decrease."""
        while self._queue and self._queue[0].expires_at <= now:
            guesses = self._queue.popleft()
            for h in guesses.hashes:
                if guesses.row.hash_to_expiry.get(h) == guesses.expires_at:
                    self._drop_guess(guesses.row, h)

    def check_invariants(self) -> None:
        """Assert that masks, rows, guesses and counters tell one story. Linear in what is held."""
        bits = [row.bit for row in self._rows]
        assert sum(bits) == self._used_bits
        assert len(set(bits)) == len(bits)
        assert self._num_confirmed == sum(len(row.hashes) for row in self._rows)
        assert self.num_entries <= self._max_entries
        assert self._num_guessed == sum(len(row.hash_to_expiry) for row in self._rows)
        for shelf in self._fingerprint_to_shelf.values():
            rows = [row for row in self._rows if row.shelf is shelf]
            assert rows
            assert shelf.confirmed == _masks((row.bit, row.hashes) for row in rows)
            assert shelf.guessed == _masks((row.bit, row.hash_to_expiry) for row in rows)

    def _drop_guess(self, row: Row, h: bytes) -> None:
        del row.hash_to_expiry[h]
        self._num_guessed -= 1
        _clear_bit(row.shelf.guessed, h, row.bit)


def _masks(bits_and_hashes: Iterable[tuple[int, Iterable[bytes]]]) -> dict[bytes, int]:
    hash_to_mask: dict[bytes, int] = {}
    for bit, hashes in bits_and_hashes:
        for h in hashes:
            hash_to_mask[h] = hash_to_mask.get(h, 0) | bit
    return hash_to_mask


def _clear_bit(hash_to_mask: dict[bytes, int], h: bytes, bit: int) -> None:
    mask = hash_to_mask[h] & ~bit
    if mask:
        hash_to_mask[h] = mask
    else:
        del hash_to_mask[h]
