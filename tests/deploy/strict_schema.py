"""JSON schemas made strict, and misspelt copies of a document to try them on."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TYPO = "Misspelt"

Json = Any
KeyPath = tuple[str | int, ...]


def closed(schema: Json) -> Json:
    """A copy in which every object with named properties takes no others.

    Objects that say themselves what else they take keep their word: `additionalProperties` of
    another kind, or Kubernetes' `x-kubernetes-preserve-unknown-fields`.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and not is_open:
        strict.setdefault("additionalProperties", False)
    return strict


def misspellings(document: Json) -> Iterator[tuple[KeyPath, Json]]:
    """Each key of each mapping misspelt once: the way to it, and the copy that has it wrong."""
    for path in key_paths(document):
        changed = copy.deepcopy(document)
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        parent[f"{path[-1]}{TYPO}"] = parent.pop(path[-1])
        yield path, changed


def key_paths(node: Json) -> Iterator[KeyPath]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield (key,)
            yield from ((key, *rest) for rest in key_paths(value))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from ((index, *rest) for rest in key_paths(value))
