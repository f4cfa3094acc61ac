"""The command itself, and `pando config`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_driver import failure_of, pando

from cluster.config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PANDO_API_KEY", "PANDO_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_help_names_every_verb() -> None:
    run = pando("--help")
    assert run.exit_code == 0
    for verb in ("serve", "demo", "status", "doctor", "config"):
        assert f" {verb} " in run.stdout
        assert pando(verb, "--help").exit_code == 0


def test_version() -> None:
    run = pando("--version")
    assert run.exit_code == 0
    assert run.stdout.startswith("pando")


@pytest.mark.parametrize(
    "args",
    [["nonsense"], ["status", "--nonsense"], ["status", "-o", "xml"], ["config", "nonsense"]],
)
def test_usage_errors_exit_with_2(args: list[str]) -> None:
    run = pando(*args)
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr


def test_the_command_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, cluster.cli.main\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'redis') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_config_show_is_a_file_that_config_takes(tmp_path: Path) -> None:
    run = pando("config", "show", "--set", "model.block_size=32", "--set", "index.namespace=a.b")
    assert run.exit_code == 0, run.stderr
    path = tmp_path / "shown.yaml"
    path.write_text(run.stdout)
    config = load_config(path, env={})
    assert (config.model.block_size, config.index.namespace) == (32, "a.b")
    assert config == load_config(overrides=["model.block_size=32", "index.namespace=a.b"], env={})
    as_json = pando("config", "show", "--config", str(path), "--output", "json").parsed
    assert as_json == yaml.safe_load(run.stdout)


def test_config_show_masks_every_secret(tmp_path: Path) -> None:
    path = tmp_path / "pando.yaml"
    tenancy = {"secret": "hush-hush-hush-hush", "keys": [{"tenant": "acme", "key": "tell-nobody"}]}
    url = "redis://:open-sesame@10.0.0.1:6379/0"
    path.write_text(yaml.safe_dump({"tenancy": tenancy, "index": {"url": url}}))
    for output in ("text", "json"):
        run = pando("config", "show", "--config", str(path), "--output", output)
        assert run.exit_code == 0
        for secret in ("hush-hush", "tell-nobody", "open-sesame"):
            assert secret not in run.stdout
        assert "acme" in run.stdout


def test_config_faults_are_one_line_each() -> None:
    run = pando("config", "show", "--set", "model.blk=1", "--set", "listen.http_port=0")
    assert (run.exit_code, run.stdout) == (1, "")
    lines = run.stderr.splitlines()
    assert len(lines) == 2
    assert any("model.blk: there is no such key" in line for line in lines)
    assert any("listen.http_port" in line and "given: 0" in line for line in lines)


def test_a_file_that_is_not_there() -> None:
    line = failure_of("config", "show", "--config", "nowhere.yaml")
    assert line == "pando config show: cannot read nowhere.yaml: No such file or directory"


def test_json_is_what_it_says() -> None:
    run = pando("config", "show", "-o", "json")
    assert json.loads(run.stdout)["app_name"] == "pando"
