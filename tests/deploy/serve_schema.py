"""What a Serve config must be: Ray's own schema, closed, and Pando's own configuration inside."""

from typing import Any

import jsonschema
from ray.serve.schema import ServeDeploySchema
from strict_schema import KeyPath, closed, misspellings

from cluster.config import ClusterConfig

_STRICT = closed(ServeDeploySchema.model_json_schema())


def check_serve_config(config: dict[str, Any]) -> None:
    """Raises:
    ValueError: Ray, or Pando under `args`, would refuse the config or silently drop a key of it.
    """
    parsed = ServeDeploySchema.model_validate(config)
    try:
        # Ray's models ignore keys they do not know; here a misspelt one is an error.
        jsonschema.validate(config, _STRICT)
    except jsonschema.ValidationError as error:
        raise ValueError(error.message) from error
    for application in parsed.applications:
        if application.import_path != "cluster.app:build_app":
            raise ValueError(f"import_path: {application.import_path} is not Pando's")
        ClusterConfig.model_validate(application.args)


def passing_misspellings(config: dict[str, Any]) -> list[KeyPath]:
    """Ways to the keys that may be misspelt without anybody noticing."""
    passed = []
    for path, changed in misspellings(config):
        try:
            check_serve_config(changed)
        except ValueError:
            continue
        passed.append(path)
    return passed
