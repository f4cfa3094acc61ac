"""Between sequences and blocks: what is found, taken, shared, sealed and given back. Decides nothing about who runs.

take_prefix ─▶ (give_back)           a tentative match, rolled back when the sequence is not admitted
take_prefix ─▶ take_partial ─▶ grow ─▶ seal … ─▶ fork … ─▶ retire
"""

from dataclasses import replace

from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockCopy, BlockTable
from kvstore.prefix_hash import HASH_BYTES, split_hashes
from kvstore.radix_messages import Insertion
from kvstore.radix_tree import RadixTree
from kvstore.reuse.meter import ReuseMeter
from workers.options import SchedulerOptions
from workers.pending_prefixes import PendingPrefixes
from workers.sequence import Sequence, SequenceState


class SequenceMemory:
    """Owns the pool, the tree over it, and the copies that the next step must begin with.

    Args:
        options: whether prefixes are shared, and from how many tokens on a partial block is copied.
        meter: hears which blocks were looked up, and which were left behind.
    """

    def __init__(
        self, options: SchedulerOptions, pool: BlockPool, tree: RadixTree, meter: ReuseMeter
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.meter = meter
        self._options = options
        self._pending = PendingPrefixes()
        self._copies: list[BlockCopy] = []

    def drain_copies(self) -> tuple[BlockCopy, ...]:
        """What the step now planned must copy before it writes anything."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_prefix(self, sequence: Sequence) -> None:
        """Point the table at the longest known prefix, keeping the last token to be computed."""
        if not self._looks_up(sequence):
            return
        num_tokens = sequence.num_tokens
        found = self.tree.match(
            sequence.root,
            sequence.packed(0, num_tokens),
            num_tokens - 1,
            is_reuse=not sequence.has_looked_up,  # asking again is no second use
        )
        sequence.has_looked_up = True
        # Before anything is allocated: an eviction must not take the blocks just found.
        self.pool.acquire(found.block_ids)
        sequence.table.append(list(found.block_ids))
        sequence.num_computed_tokens = len(found.block_ids) * sequence.table.block_size
        sequence.num_sealed_blocks = len(found.block_ids)
        sequence.partial = found.partial

    def _looks_up(self, sequence: Sequence) -> bool:
        """A prompt whose tokens are to be scored is computed whole: what was looked up has no logits."""
        return self._options.enable_prefix_caching and sequence.prompt_logprobs is None

    def give_back(self, sequence: Sequence) -> None:
        """Undo `take_prefix`."""
        sequence.table.release(self.pool)
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
        sequence.partial = None

    def is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to seal the very next block that this one would compute."""
        num_known = sequence.num_sealed_blocks
        if not self._looks_up(sequence):
            return False
        if num_known >= (sequence.num_tokens - 1) // sequence.table.block_size:
            return False
        return sequence.hashes_of(num_known, num_known + 1) in self._pending

    def take_partial(self, sequence: Sequence) -> None:
        """Copy the known head of the block that comes next, when there is one worth it.

        A copy costs one block's bytes read and written; computing a token costs a pass over all weights.
        Must follow `take_prefix` of the same sequence. One block must be available.
        """
        partial, sequence.partial = sequence.partial, None
        if partial is None or partial.num_tokens < self._options.min_partial_tokens:
            return
        self.tree.use_partial(partial)
        (target,) = self._allocate(1)
        sequence.table.append([target])
        # The source may have been evicted for this very block, or be evicted for the next: copies come before
        # all writes of the step, so what it holds is still there.
        self._copies.append(BlockCopy(partial.block_id, target))
        sequence.num_computed_tokens += partial.num_tokens

    def record_lookup(self, sequence: Sequence) -> None:
        """Once for each request, when it is admitted: what it could have found, and what it did find."""
        if not self._looks_up(sequence):
            return
        num_lookups = (sequence.num_tokens - 1) // sequence.table.block_size
        self.meter.record(
            sequence.root, sequence.hashes_of(0, num_lookups), sequence.num_sealed_blocks
        )

    def announce(self, sequence: Sequence) -> None:
        """Tell siblings which blocks this sequence, now running, is going to seal."""
        if not self._options.enable_prefix_caching:
            return
        sequence.num_announced_blocks = sequence.num_tokens // sequence.table.block_size
        self._pending.announce(
            split_hashes(
                sequence.hashes_of(sequence.num_sealed_blocks, sequence.num_announced_blocks)
            )
        )

    def can_hold(self, sequence: Sequence, num_tokens: int, num_reserved_blocks: int = 0) -> bool:
        """Whether the table could hold `num_tokens`, evicting what is idle, with some blocks to spare."""
        num_blocks = sequence.table.num_blocks_to_hold(num_tokens)
        num_evictable_or_free = self.pool.num_available - self.tree.num_held_back
        return num_evictable_or_free >= num_blocks + num_reserved_blocks

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the table hold `num_tokens`; `can_hold` must be true."""
        sequence.table.append(self._allocate(sequence.table.num_blocks_to_hold(num_tokens)))

    def _allocate(self, num_blocks: int) -> list[int]:
        if self.pool.num_free < num_blocks:
            self.tree.evict(num_blocks - self.pool.num_free)
        return self.pool.allocate(num_blocks)

    def seal(self, sequence: Sequence) -> None:
        """Offer newly full blocks to the tree; where it knows them already, use its copy."""
        num_full = sequence.num_computed_tokens // sequence.table.block_size
        if num_full <= sequence.num_sealed_blocks or not self._options.enable_prefix_caching:
            return
        self._settle(sequence, num_full)
        first = sequence.num_sealed_blocks
        insertion = self._extend(sequence, first, num_full) if first else None
        if insertion is None:
            first = 0
            insertion = self.tree.insert(sequence.root, *self._sealed(sequence, 0, num_full))
        sequence.num_sealed_blocks = num_full
        sequence.path_end = insertion.end
        for duplicate in insertion.duplicates:
            sequence.table.replace(first + duplicate.index, duplicate.block_id, self.pool)

    def _extend(self, sequence: Sequence, first: int, end: int) -> Insertion | None:
        if sequence.path_end is None:
            return None
        last_block_id = sequence.table.block_ids[first - 1]
        return self.tree.extend(
            sequence.path_end, last_block_id, *self._sealed(sequence, first, end)
        )

    def _sealed(self, sequence: Sequence, first: int, end: int) -> tuple[bytes, list[int], bytes]:
        """Tokens, blocks and hashes of blocks first … end−1."""
        block_size = sequence.table.block_size
        return (
            sequence.packed(first * block_size, end * block_size),
            sequence.table.block_ids[first:end],
            sequence.hashes_of(first, end),
        )

    def fork(self, parent: Sequence, index: int) -> Sequence | None:
        """A sibling that shares every full block; its partial block is copied before the next step runs.

        None: it needs a block of its own and none can be had.
        """
        if parent.num_computed_tokens % parent.table.block_size and not self.pool.num_available:
            return None
        if not self.pool.num_free:
            self.tree.evict(1)
        fork = parent.table.fork(parent.num_computed_tokens, self.pool)
        if fork.copy is not None:
            self._copies.append(fork.copy)
        return twin(parent, index, fork.table)

    def retire(self, sequence: Sequence) -> None:
        """Give the blocks back; what was sealed stays in the tree, freshly used."""
        # A copy that was planned into these blocks must not run once they belong to somebody else.
        if self._copies:
            own = set(sequence.table.block_ids)
            self._copies = [copy for copy in self._copies if copy.target not in own]
        if sequence.num_sealed_blocks:
            num_tokens = sequence.num_sealed_blocks * sequence.table.block_size
            self.tree.match(
                sequence.root, sequence.packed(0, num_tokens), num_tokens, is_reuse=False
            )
            self.meter.store(sequence.hashes_of(0, sequence.num_sealed_blocks))
        self._settle(sequence, sequence.num_announced_blocks)
        sequence.num_announced_blocks = 0
        sequence.table.release(self.pool)
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
        sequence.path_end = None
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []
        sequence.state = SequenceState.FINISHED

    def _settle(self, sequence: Sequence, num_blocks: int) -> None:
        """What was announced of blocks num_sealed_blocks … num_blocks−1 is there now, or will not come."""
        end = min(num_blocks, sequence.num_announced_blocks)
        if sequence.num_sealed_blocks < end:
            self._pending.settle(split_hashes(sequence.hashes_of(sequence.num_sealed_blocks, end)))

    def check_invariants(self, running: list[Sequence]) -> None:
        """Conservation, references = owners, announcements = what the running ones still owe."""
        self.pool.check_invariants()
        self.tree.check_invariants()
        counts = [0] * self.pool.num_blocks
        num_pending = 0
        for sequence in running:
            assert sequence.table.num_blocks_to_hold(sequence.num_computed_tokens) == 0
            assert len(sequence.hashes) // HASH_BYTES >= sequence.num_sealed_blocks
            num_pending += max(0, sequence.num_announced_blocks - sequence.num_sealed_blocks)
            for block_id in sequence.table.block_ids:
                counts[block_id] += 1
        assert num_pending == self._pending.num_announced
        for block_id, count in enumerate(counts):
            assert count == self.pool.ref_count(block_id), f"block {block_id} leaks"
        written = [copy.target for copy in self._copies]
        assert len(set(written)) == len(written), "two copies into one block"


def twin(parent: Sequence, index: int, table: BlockTable) -> Sequence:
    """The same tokens in another sequence, with a table of its own."""
    return replace(
        parent,
        index=index,
        tokens=parent.tokens[:],
        hashes=parent.hashes[:],
        table=table,
        num_announced_blocks=0,
        place=-1,
    )


def bare_twin(parent: Sequence, index: int) -> Sequence:
    """The same tokens in another sequence, which has to compute or to find them."""
    child = twin(parent, index, BlockTable(parent.table.block_size))
    child.num_computed_tokens = child.num_sealed_blocks = 0
    return child
