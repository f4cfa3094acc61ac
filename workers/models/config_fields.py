"""Reads single fields of a config.json, naming the field and the value when it is wrong."""

from collections.abc import Mapping
from typing import Any


class UnsupportedModel(ValueError):
    """A checkpoint that cannot be served here; the message says which field, its value, and what could be."""


_MAX_INT = 1 << 31


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A missing or null field takes `default`."""
    return _int_from(config, key, default, 1)


def non_negative_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A missing or null field takes `default`."""
    return _int_from(config, key, default, 0)


def _int_from(config: Mapping[str, Any], key: str, default: int | None, low: int) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _MAX_INT:
        raise UnsupportedModel(f"{key} must be an integer from {low} to 2**31; got {value!r}")
    return value


def positive_float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A missing or null field takes `default`."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UnsupportedModel(f"{key} must be a positive number; got {value!r}")
    return float(value)


def boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A missing or null field takes `default`."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{key} must be true or false; got {value!r}")
    return value


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing."""
    value = config.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < _MAX_INT:
            raise UnsupportedModel(f"{key} must be a token id or a list of them; got {value!r}")
    return tuple(listed)
