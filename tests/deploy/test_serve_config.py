"""deploy/serve.yaml against Ray's schema and Pando's own configuration."""

from typing import Any

import pytest
import yaml
from serve_schema import check_serve_config, passing_misspellings
from strict_schema import DEPLOY


@pytest.fixture(scope="module")
def config() -> Any:
    return yaml.safe_load((DEPLOY / "serve.yaml").read_text())


def test_is_valid_and_stays_on_this_machine(config: Any) -> None:
    check_serve_config(config)
    assert config["http_options"]["host"] == "127.0.0.1"
    assert config["applications"][0]["args"]["replicas"]["num_replicas"] == 2


def test_no_misspelt_key_passes(config: Any) -> None:
    assert passing_misspellings(config) == []
