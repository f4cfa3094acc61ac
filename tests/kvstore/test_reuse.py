"""The meter against the real radix tree: what it predicts is what a replay does."""

import gzip
import json
import threading
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.eviction.ranked import LfuPolicy
from kvstore.prefix_hash import HASH_BYTES
from kvstore.radix_tree import RadixTree
from kvstore.reuse.distance_histogram import DistanceHistogram, bin_of, bin_start
from kvstore.reuse.meter import MAX_SCALE, OTHER_ROOTS, ReuseMeter
from kvstore.reuse.prompt_log import LoggedPath
from kvstore.reuse.recency_stack import RecencyStack
from kvstore.reuse.replay import MakeTree, lru_tree, replay, replay_log, serve

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
ROOT = b"r" * HASH_BYTES
Path_ = tuple[int, ...]


def hash_of(block: int) -> bytes:
    return blake2b(block.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()


def hashes_of(path: Path_) -> bytes:
    return b"".join(map(hash_of, path))


def lookups(paths: list[Path_]) -> list[LoggedPath]:
    return [LoggedPath(path, is_lookup=True) for path in paths]


def lfu_tree(pool: BlockPool) -> RadixTree:
    return RadixTree(pool, block_size=1, policy=LfuPolicy())


def measure(
    meter: ReuseMeter, paths: list[Path_], num_blocks: int, make_tree: MakeTree = lru_tree
) -> None:
    """Serve `paths` from a real tree and let the meter watch."""
    pool = BlockPool(num_blocks)
    tree = make_tree(pool)
    for path in paths:
        meter.record(ROOT, hashes_of(path), serve(pool, tree, path))
    meter.check_invariants()


def exact_sizes(first: int, last: int) -> list[int]:
    """Sizes at which a bin of distances begins: between them the curve is interpolated."""
    return [size for size in range(first, last + 1) if bin_start(bin_of(size)) == size]


# A tree in which block b's parent is b // 2: a path is a node with all its ancestors, and paths share heads.
@st.composite
def binary_tree_paths(draw: st.DrawFn) -> list[Path_]:
    ends = draw(st.lists(st.integers(1, 63), min_size=1, max_size=60))
    return [tuple(end >> shift for shift in reversed(range(end.bit_length()))) for end in ends]


@given(binary_tree_paths(), st.integers(6, 24))
def test_every_size_is_predicted_exactly_where_all_blocks_are_followed(
    paths: list[Path_], num_blocks: int
) -> None:
    meter = ReuseMeter(num_blocks, max_samples=1000)
    measure(meter, paths, num_blocks)
    curve = meter.curve()
    for size in exact_sizes(6, MAX_SCALE * num_blocks):
        assert curve.hit_ratio(size) == pytest.approx(replay(lookups(paths), size).hit_ratio), size
    assert curve.measured == pytest.approx(curve.hit_ratio(num_blocks))


@given(binary_tree_paths(), st.integers(6, 24))
def test_what_the_pool_itself_does_changes_no_prediction(
    paths: list[Path_], num_blocks: int
) -> None:
    meter = ReuseMeter(num_blocks, max_samples=1000)
    measure(meter, paths, num_blocks, lfu_tree)
    for size in exact_sizes(6, MAX_SCALE * num_blocks):
        predicted = meter.curve().hit_ratio(size)
        assert predicted == pytest.approx(replay(lookups(paths), size).hit_ratio), size


@given(binary_tree_paths(), st.integers(6, 24), st.data())
def test_paths_stored_without_a_lookup_count_as_use_and_not_as_lookup(
    paths: list[Path_], num_blocks: int, data: st.DataObject
) -> None:
    logged = [LoggedPath(path, data.draw(st.booleans())) for path in paths]
    meter = ReuseMeter(num_blocks, max_samples=1000)
    pool = BlockPool(num_blocks)
    tree = lru_tree(pool)
    for path in logged:
        num_found = serve(pool, tree, path.blocks)
        if path.is_lookup:
            meter.record(ROOT, hashes_of(path.blocks), num_found)
        else:
            meter.store(hashes_of(path.blocks))
    for size in range(6, 2 * num_blocks):
        assert meter.curve().hit_ratio(size) == pytest.approx(replay(logged, size).hit_ratio), size


@given(st.lists(st.lists(st.integers(0, 40), unique=True, max_size=8), max_size=40))
def test_the_stack_is_a_list_of_blocks_by_last_use(paths: list[list[int]]) -> None:
    stack = RecencyStack(max_samples=100, max_distance=1000)
    model: list[int] = []  # newest first
    for path in paths:
        expected = [model.index(key) if key in model else None for key in path]
        assert stack.distances(path) == expected
        has_new = any(key not in model for key in path)
        assert stack.use(path) is has_new
        model = path + [key for key in model if key not in path]
        stack.check_invariants()
    assert len(stack) == len(model)


@given(st.integers(2, 40), st.integers(1, 200), st.lists(st.integers(0, 300), max_size=200))
def test_the_stack_is_bounded_by_samples_and_by_depth(
    max_samples: int, max_distance: int, blocks: list[int]
) -> None:
    stack = RecencyStack(max_samples, max_distance)
    for block in blocks:
        stack.use(stack.sample(hash_of(block)))
        stack.check_invariants()
        assert len(stack) <= min(max_samples, max_distance // stack.weight + 1)


def test_sampling_follows_all_uses_of_a_block_or_none() -> None:
    stack = RecencyStack(max_samples=64, max_distance=10**6)
    for block in range(4096):
        stack.use(stack.sample(hash_of(block)))
    assert stack.weight >= 64
    followed = [block for block in range(4096) if stack.sample(hash_of(block))]
    assert len(followed) == len(stack)
    everything = stack.sample(b"".join(map(hash_of, range(4096))))
    assert everything == [stack.sample(hash_of(block))[0] for block in followed]


@given(st.integers(0, 2**40))
def test_bins_cover_every_distance_once(distance: int) -> None:
    index = bin_of(distance)
    assert bin_start(index) <= distance < bin_start(index + 1)
    assert bin_start(index + 1) - bin_start(index) <= max(1, distance // 16)


def test_a_histogram_counts_what_is_below() -> None:
    histogram = DistanceHistogram()
    histogram.add([0, 5, None, 100], weight=2)
    assert [histogram.num_below(d) for d in (0, 1, 5, 6, 1000)] == [0, 2, 2, 4, 6]
    assert (histogram.total, histogram.num_unknown) == (8, 2)


def test_what_left_the_window_is_forgotten() -> None:
    meter = ReuseMeter(100, window_s=60, num_windows=6)
    meter.advance(1000)
    meter.record(ROOT, hashes_of((1, 2)), 0)
    meter.advance(1055)
    meter.record(ROOT, hashes_of((1, 2)), 2)
    assert meter.curve().counts.num_lookups == 4
    assert meter.covered_s == 55
    meter.advance(1061)
    assert meter.curve().counts.num_lookups == 2
    assert meter.curve().measured == 1
    assert [path.blocks for path in meter.log().paths] == [(0, 1)]
    assert meter.covered_s <= 60
    meter.advance(5000)
    assert meter.curve().counts.num_lookups == 0
    assert meter.curve().hit_ratio(100) == 0
    assert meter.log().paths == ()
    assert meter.root_to_curve() == {}


def test_each_root_has_a_curve_in_the_pool_that_all_share() -> None:
    meter = ReuseMeter(8)
    a, b = b"a" * HASH_BYTES, b"b" * HASH_BYTES
    meter.record(a, hashes_of((1, 2)), 0)
    meter.record(b, hashes_of(tuple(range(10, 20))), 0)
    meter.record(a, hashes_of((1, 2)), 0)
    curves = meter.root_to_curve()
    assert set(curves) == {a, b}
    # Ten blocks of b came between: a's two are found again only where twelve fit.
    assert [curves[a].hit_ratio(size) for size in (10, 11, 12)] == [0, 0.25, 0.5]
    assert curves[b].hit_ratio(32) == 0


def test_roots_are_bounded_and_none_is_lost() -> None:
    meter = ReuseMeter(8, max_roots=3)
    for i in range(10):
        meter.record(bytes([i]) * HASH_BYTES, hashes_of((i,)), 0)
    curves = meter.root_to_curve()
    assert len(curves) == 4
    assert curves[OTHER_ROOTS].counts.num_lookups == 7
    assert sum(curve.counts.num_lookups for curve in curves.values()) == 10


def test_a_log_is_bounded_and_replays_to_the_same() -> None:
    paths = [(1, 2, 3), (1, 2, 4), (9, 8), (1, 2, 3), (9, 8, 7)] * 20
    meter = ReuseMeter(5)
    measure(meter, paths, 5)
    meter.store(hashes_of((1, 2)))  # nothing new: not logged again
    log = meter.log()
    assert (log.weight, len(log.paths)) == (1, len(paths))
    assert replay(log.paths, 5) == replay(lookups(paths), 5)
    assert (log.num_lookups, log.num_hits) == (280, replay(lookups(paths), 5).num_hits)
    assert log.num_sampled_hits == log.num_hits

    bounded = ReuseMeter(5, max_logged=30)
    measure(bounded, paths, 5)
    assert 25 <= sum(len(path.blocks) for path in bounded.log().paths) <= 30


def test_a_log_counts_prompts_without_a_sampled_block_too() -> None:
    meter = ReuseMeter(1000, max_samples=16)
    for block in range(1000):
        meter.record(ROOT, hashes_of((block,)), 0)
        meter.record(ROOT, hashes_of((block,)), 1)
    log = meter.log()
    assert len(log.paths) < 200
    assert (log.num_lookups, log.num_hits) == (2000, 1000)
    assert replay_log(log, 1000) == pytest.approx(0.5, abs=0.01)


def test_a_block_that_everybody_uses_does_not_mislead_a_replay() -> None:
    """Its share of the lookups is half, whether it is in the sample or not."""
    meter = ReuseMeter(4096, max_samples=64)
    paths = [(0, block) for block in range(1, 4000)]
    measure(meter, paths, 4096)
    assert meter.weight > 16
    is_in_sample = bool(meter._stack.sample(hash_of(0)))
    assert not is_in_sample  # with this hash; else every sampled prompt would have two blocks
    assert replay(meter.log().paths, 100).hit_ratio == 0
    assert replay_log(meter.log(), 4096) == pytest.approx(0.5, abs=0.01)


def test_a_thinned_log_is_still_a_tree() -> None:
    """Each block that is left always comes after the same blocks."""
    meter = ReuseMeter(4096, max_samples=64)
    paths = [tuple(e >> s for s in reversed(range(e.bit_length()))) for e in range(1, 2048)]
    measure(meter, paths, 4096)
    log = meter.log()
    assert log.weight > 1
    heads: dict[int, Path_] = {}
    for path in log.paths:
        for i, block in enumerate(path.blocks):
            assert heads.setdefault(block, path.blocks[:i]) == path.blocks[:i]
    assert len(heads) > 10


def test_reading_while_recording() -> None:
    meter = ReuseMeter(64, max_samples=32, window_s=0.5, num_windows=5, max_roots=4)
    failures: list[BaseException] = []

    def record() -> None:
        try:
            for i in range(3000):
                meter.advance(i / 100)
                meter.record(bytes([i % 9]) * HASH_BYTES, hashes_of((i % 50, i % 70 + 100)), 0)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=record)
    writer.start()
    while writer.is_alive():
        meter.curve().hit_ratio(10)
        meter.root_to_curve()
        meter.log()
    writer.join()
    assert failures == []


@pytest.mark.parametrize(("max_samples", "num_blocks"), [(1, 10), (100, 0)])
def test_bounds_that_are_none(max_samples: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        ReuseMeter(num_blocks, max_samples=max_samples)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_prediction_is_within_two_points_of_a_replay(name: str) -> None:
    """Pools of 1, 2, 5, 10 and 20 % of the working set, each predicted from the one at 5 %."""
    file = TRACES / f"{name}_trace.jsonl.gz"
    if not file.is_file():
        pytest.skip("the Mooncake traces are not here")
    with gzip.open(file, "rt") as lines:
        paths = [tuple(json.loads(line)["hash_ids"]) for line in lines]
    num_distinct = len({block for path in paths for block in path})
    present = int(num_distinct * 0.05)
    meter = ReuseMeter(present, max_samples=8192, window_s=1e9)
    meter.advance(0)
    measure(meter, paths, present)
    assert meter.weight > 1
    curve = meter.curve()
    for share in (0.01, 0.02, 0.05, 0.1, 0.2):
        size = int(num_distinct * share)
        replayed = replay(lookups(paths), size).hit_ratio
        print(f"{name} {share:.0%}: predicted {curve.hit_ratio(size):.4f}, replayed {replayed:.4f}")
        assert abs(curve.hit_ratio(size) - replayed) < 0.02, share
    log = meter.log()
    assert log.num_lookups == sum(map(len, paths))
    assert abs(replay_log(log, present) - curve.measured) < 0.02
