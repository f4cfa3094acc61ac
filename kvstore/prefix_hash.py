"""One hash scheme everywhere: chained, keyed by root, 16 bytes a full block.

    H_i = blake2b-128(H_{i-1} ‖ packed tokens of block i)          H_{-1} = root
    root = blake2b-128(length-prefixed (fingerprint, salt))

The root carries the model's fingerprint and the tenant's salt, so equal text under another model, another
KV scheme or another tenant has nothing in common with it, in the radix tree as in Redis.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4
_ROOT_PERSON = b"pando-root-v1"
_BLOCK_PERSON = b"pando-block-v1"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    ids = array("I")
    ids.frombytes(tokens)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return ids.tolist()


def num_tokens(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def fingerprint(fields: Mapping[str, str | int | float | bool | None]) -> str:
    """Hex digest of tagged, length-prefixed fields: model revision, tokenizer, block size, KV scheme, …"""
    digest = blake2b(digest_size=HASH_BYTES, person=b"pando-model-v1")
    for key in sorted(fields):
        _feed(digest, key.encode())
        _feed(digest, repr(fields[key]).encode())
    return digest.hexdigest()


def root_hash(model_fingerprint: str, salt: bytes) -> bytes:
    """Where a tenant's chain of prefix hashes begins under one model."""
    digest = blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    _feed(digest, model_fingerprint.encode())
    _feed(digest, salt)
    return digest.digest()


def extend(parent: bytes, block_tokens: bytes) -> bytes:
    """The hash of the block with these packed tokens after the prefix whose hash is `parent`."""
    return blake2b(parent + block_tokens, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest()


def chain(root: bytes, tokens: bytes, block_size: int) -> bytes:
    """Hashes of all full blocks of packed `tokens`, concatenated, HASH_BYTES each."""
    block_bytes = block_size * TOKEN_BYTES
    hashes = bytearray()
    parent = root
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = extend(parent, tokens[start : start + block_bytes])
        hashes += parent
    return bytes(hashes)


def split_hashes(hashes: bytes) -> list[bytes]:
    """A concatenation of hashes as a list."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def digest_of(hashes: Sequence[bytes]) -> int:
    """XOR of the hashes' first 64 bits: equal sets have equal digests, and one change is one XOR."""
    value = 0
    for h in hashes:
        value ^= int.from_bytes(h[:8], "little")
    return value


def _feed(digest: "blake2b", field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
