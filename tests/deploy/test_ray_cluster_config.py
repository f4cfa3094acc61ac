"""deploy/ray-cluster.yaml against the schema that `ray up` uses."""

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml
from strict_schema import DEPLOY, misspellings


@pytest.fixture(scope="module")
def schema() -> Any:
    return json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text())


@pytest.fixture(scope="module")
def config() -> Any:
    return yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())


def test_is_valid(config: Any, schema: Any) -> None:
    jsonschema.validate(config, schema)


def test_no_misspelt_key_passes(config: Any, schema: Any) -> None:
    validator = jsonschema.Draft7Validator(schema)
    passed = [path for path, changed in misspellings(config) if validator.is_valid(changed)]
    # A provider is a plug-in and takes what keys it likes; mounts are the operator's own paths.
    assert [path for path in passed if path[:-1] not in {("provider",), ("file_mounts",)}] == []


def test_what_it_mounts_is_there(config: Any) -> None:
    assert config["file_mounts"]
    for source in config["file_mounts"].values():
        assert (DEPLOY.parent / source).is_file()
