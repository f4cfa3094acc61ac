"""The chain of prefix hashes: what it must tell apart, and what it must not."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import prefix_hash as ph

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)
salts = st.binary(max_size=40)
names = st.text(max_size=20)
fields = st.dictionaries(
    st.text(max_size=8), st.one_of(st.text(max_size=8), st.integers(), st.none()), max_size=5
)


@given(token_lists)
def test_packing_is_four_little_endian_bytes_a_token_and_reversible(tokens: list[int]) -> None:
    packed = ph.pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert ph.unpack_tokens(packed) == tokens
    assert ph.num_tokens(packed) == len(tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_outside_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        ph.pack_tokens([token])


@given(token_lists, token_lists, st.integers(1, 7))
def test_chain_of_a_prefix_is_a_prefix_of_the_chain(
    head: list[int], tail: list[int], block_size: int
) -> None:
    root = ph.root_hash("model", b"salt")
    short = ph.split_hashes(ph.chain(root, ph.pack_tokens(head), block_size))
    long = ph.split_hashes(ph.chain(root, ph.pack_tokens(head + tail), block_size))
    assert len(short) == len(head) // block_size
    assert len(long) == len(head + tail) // block_size
    assert long[: len(short)] == short


@given(st.lists(st.integers(0, 9), min_size=8, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_every_later_one_only(
    tokens: list[int], data: st.DataObject
) -> None:
    root = ph.root_hash("model", b"salt")
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    before = ph.split_hashes(ph.chain(root, ph.pack_tokens(tokens), 4))
    after = ph.split_hashes(ph.chain(root, ph.pack_tokens(changed), 4))
    assert [a == b for a, b in zip(before, after, strict=True)] == [
        i < at // 4 for i in range(len(before))
    ]


def test_chain_is_blake2b_over_parent_and_block() -> None:
    packed = ph.pack_tokens(range(8))
    root = ph.root_hash("model", b"salt")
    first = blake2b(root + packed[:16], digest_size=16, person=b"pando-block-v1").digest()
    second = blake2b(first + packed[16:], digest_size=16, person=b"pando-block-v1").digest()
    assert ph.chain(root, packed, 4) == first + second


@given(names, salts, names, salts)
def test_roots_are_equal_only_when_model_and_salt_are(
    model: str, salt: bytes, other_model: str, other_salt: bytes
) -> None:
    same = ph.root_hash(model, salt) == ph.root_hash(other_model, other_salt)
    assert same == ((model, salt) == (other_model, other_salt))


@given(st.text("ab", max_size=6), st.integers(0, 6))
def test_moving_bytes_between_model_and_salt_changes_the_root(text: str, at: int) -> None:
    whole = ph.root_hash(text, b"")
    moved = ph.root_hash(text[:at], text[at:].encode())
    assert (whole == moved) == (text[at:] == "")


@given(fields, fields)
def test_fingerprints_are_equal_only_when_fields_are(
    ours: dict[str, str | int | None], theirs: dict[str, str | int | None]
) -> None:
    assert (ph.fingerprint(ours) == ph.fingerprint(theirs)) == (ours == theirs)


def test_fingerprint_ignores_order_and_tells_kinds_and_boundaries_apart() -> None:
    assert ph.fingerprint({"a": 1, "b": 2}) == ph.fingerprint({"b": 2, "a": 1})
    assert ph.fingerprint({"a": 1}) != ph.fingerprint({"a": "1"})
    assert ph.fingerprint({"ab": "c"}) != ph.fingerprint({"a": "bc"})
    assert ph.fingerprint({"a": None}) != ph.fingerprint({})


@given(st.sets(st.binary(min_size=16, max_size=16), max_size=20), st.data())
def test_digest_depends_on_the_set_not_the_order_and_takes_changes_one_by_one(
    hashes: set[bytes], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(sorted(hashes)))
    digest = ph.digest_of(order)
    assert digest == ph.digest_of(sorted(hashes))
    assert digest < 2**64
    for h in order:
        digest ^= ph.digest_of([h])
    assert digest == 0
