"""deploy/kuberay.yaml: KubeRay's own resource definition, Kubernetes' own schemas, Ray's own inside."""

import gzip
import json
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError
from serve_schema import check_serve_config, passing_misspellings
from strict_schema import DEPLOY, KeyPath, closed, misspellings

from router.options import TenancyOptions

SCHEMAS = DEPLOY.parents[1] / "shared" / "schemas"
# Maps in which Kubernetes takes any key: labels, quantities, secret values, flags of `ray start`.
OPEN_MAPS = {"labels", "matchLabels", "stringData", "requests", "limits", "rayStartParams"}


@pytest.fixture(scope="module")
def documents() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


@pytest.fixture(scope="module")
def ray_service(documents: list[Any]) -> Any:
    return next(document for document in documents if document["kind"] == "RayService")


@pytest.fixture(scope="module")
def resource_definition() -> jsonschema_rs.Draft202012Validator:
    file = SCHEMAS / "ray.io_rayservices.yaml.gz"
    if not file.is_file():
        pytest.skip("KubeRay's resource definitions are not beside the checkout")
    definition = yaml.load(gzip.decompress(file.read_bytes()), Loader=yaml.CSafeLoader)
    versions = definition["spec"]["versions"]
    schema = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    # The API server itself checks metadata, so the definition leaves it open; the test must, too.
    return jsonschema_rs.Draft202012Validator(closed(schema))


def is_in_open_map(path: KeyPath, kind: str) -> bool:
    parent = path[-2] if len(path) > 1 else None
    return parent in OPEN_MAPS or (kind == "Service" and parent == "selector")


def test_the_ray_service_is_valid(
    ray_service: Any, resource_definition: jsonschema_rs.Draft202012Validator
) -> None:
    resource_definition.validate(ray_service)


def test_no_misspelt_key_of_the_ray_service_passes(
    ray_service: Any, resource_definition: jsonschema_rs.Draft202012Validator
) -> None:
    specs = {k: v for k, v in ray_service.items() if k == "spec"}
    passed = [
        path
        for path, changed in misspellings(specs)
        if resource_definition.is_valid({**ray_service, "spec": {}, **changed})
    ]
    assert [path for path in passed if not is_in_open_map(path, "RayService")] == []


def test_the_serve_config_inside_is_valid(ray_service: Any) -> None:
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    check_serve_config(config)
    serve_yaml = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    assert config["grpc_options"] == serve_yaml["grpc_options"]
    assert passing_misspellings(config) == []


def test_core_kinds_are_valid_and_no_misspelt_key_passes(documents: list[Any]) -> None:
    core = [document for document in documents if document["kind"] != "RayService"]
    assert {d["kind"] for d in core} == {"Secret", "Deployment", "Service", "NetworkPolicy"}
    version = kubernetes_validate.latest_version()
    passed = []
    for document in core:
        kubernetes_validate.validate(document, version, strict=True)
        for path, changed in misspellings(document):
            if not is_in_open_map(path, document["kind"]) and _is_valid_core(changed, version):
                passed.append((document["kind"], path))
    assert passed == []


def _is_valid_core(document: Any, version: str) -> bool:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError, KeyError):
        return False
    return True


def test_left_as_it_is_it_refuses_to_start(documents: list[Any]) -> None:
    secret = next(document for document in documents if document["kind"] == "Secret")["stringData"]
    assert all("<" in value for value in secret.values())
    keys = json.loads(secret["tenancy-keys"])
    with pytest.raises(ValidationError, match="key_sha256 must be 64"):
        TenancyOptions.model_validate({"secret": "a" * 64, "keys": keys})
    with pytest.raises(ValidationError, match="secret must have"):
        TenancyOptions.model_validate({"secret": secret["tenancy-secret"]})
    keys[0]["key_sha256"] = "a" * 64
    assert TenancyOptions.model_validate({"secret": "a" * 64, "keys": keys}).keys


def test_ray_everywhere_is_the_pinned_ray(ray_service: Any) -> None:
    pins = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    version = ray_service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in pins
    assert f"rayproject/ray:{version}-" in (DEPLOY / "Dockerfile").read_text()
