"""The configuration tree: where values come from, and what is said of bad ones."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig, ConfigError, client_api_key, load_config, parse_config

ROOT = Path(__file__).resolve().parents[2]
KEYED = {
    "tenancy": {
        "secret": "s" * 16,
        "keys": [{"tenant": "acme", "key": "k"}],
    }
}


def problem(tree: dict[str, object], *overrides: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, overrides=overrides, env=env)
    return str(caught.value)


_maybe_port = st.none() | st.integers(1, 65535)


@given(_maybe_port, _maybe_port, _maybe_port, _maybe_port)
def test_later_sources_win(
    in_file: int | None, in_env: int | None, in_flags: int | None, in_override: int | None
) -> None:
    config = parse_config(
        {} if in_file is None else {"listen": {"http_port": in_file}},
        env={} if in_env is None else {"PANDO_LISTEN__HTTP_PORT": str(in_env)},
        flags={"listen.http_port": in_flags},
        overrides=() if in_override is None else [f"listen.http_port={in_override}"],
    )
    given_ports = [p for p in (in_override, in_flags, in_env, in_file) if p is not None]
    assert config.listen.http_port == (given_ports[0] if given_ports else 8000)
    assert config.listen.grpc_port == 9000


def test_the_tree_given_is_left_as_it_was() -> None:
    tree: dict[str, object] = {"model": {"block_size": 16}}
    assert parse_config(tree, overrides=["model.block_size=32"], env={}).model.block_size == 32
    assert tree == {"model": {"block_size": 16}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("modell.name=a", "modell: there is no such key"),
        ("model.nam=a", "model.nam: there is no such key"),
        ("engine.threads=1", "engine.threads: there is no such key"),
        ("replicas.num_replicas=0", "replicas.num_replicas: "),
        ("replicas.num_replicas=many", "given: 'many'"),
        ("listen.http_port=65536", "given: 65536"),
        ("model.block_size=7", "block_size must be 8, 16, 32 or 64"),
        ("model.kv_dtype=int2", "kv_dtype must be one of"),
        ("index.lease_s=0.5", "lease_s must be at least twice heartbeat_s"),
        ("index.url=http://a", "url must begin with redis:// or rediss://"),
        ("listen.host=0.0.0.0", "tenancy.keys is empty"),
        ("app_name=a b", "app_name"),
        ("app_name.x=1", None),
        ("no-equals-sign", "not of the form section.key=value"),
        ("model.name=[", "not YAML"),
    ],
)
def test_bad_values_name_their_key(override: str, said: str | None) -> None:
    assert (said or "app_name") in problem({}, override)


def test_every_fault_is_told_at_once() -> None:
    assert len(problem({}, "model.a=1", "engine.b=2", "listen.http_port=0").splitlines()) == 3


def test_with_keys_any_address_will_do() -> None:
    config = parse_config(KEYED, overrides=["listen.host=0.0.0.0"], env={})
    assert config.listen.host == "0.0.0.0"


def test_a_proxy_that_hides_clients_needs_keys() -> None:
    hidden = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    assert "tenancy.keys is empty" in problem({}, **hidden)
    assert parse_config(KEYED, env=hidden).tenancy.keys
    assert not parse_config({}, env={"RAY_SERVE_ENABLE_HA_PROXY": "0"}).tenancy.keys


_secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=40)


@given(_secrets, st.integers(0, 4))
def test_no_message_and_no_dump_tells_a_secret(text: str, place: int) -> None:
    # Marked, so that it is found in a message only when it was taken from here.
    secret = f"#{text}#"
    trees: list[dict[str, object]] = [
        {"tenancy": {"secret": secret}},
        {"tenancy": {"secret": "s" * 16, "keys": [{"tenant": "a", "key_sha256": secret}]}},
        {"tenancy": {"secret": "s" * 16, "keys": [{"tenant": "a", "key": secret}] * 2}},
        {"index": {"url": f"redis://:{secret}@h:1/0"}},
        {"index": {"url": secret}},
    ]
    try:
        shown = repr(parse_config(trees[place], env={}).dump())
    except ConfigError as error:
        shown = str(error)
    assert secret not in shown


def test_variables() -> None:
    env = {
        "PANDO_MODEL__BLOCK_SIZE": "32",
        "PANDO_APP_NAME": "other",
        "PANDO_GATEWAY__SERVED_MODEL_NAMES": "[a, b]",
        "PANDO_API_KEY": "not a key of the tree",
        "UNRELATED": "x",
    }
    config = load_config(env=env)
    assert config.model.block_size == 32
    assert config.app_name == "other"
    assert config.gateway.served_model_names == ("a", "b")
    assert "no_such: there is no such key" in problem({}, PANDO_NO_SUCH="1")
    assert "PANDO_APP_NAME__X: app_name is not a section" in problem(
        {"app_name": "a"}, PANDO_APP_NAME__X="1"
    )


def test_the_key_that_commands_send() -> None:
    assert client_api_key({"PANDO_API_KEY": "k"}) == "k"
    assert client_api_key({"PANDO_API_KEY": ""}) is None
    assert client_api_key({}) is None


def test_the_file_that_a_variable_names(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {block_size: 64}\n")
    assert load_config(env={"PANDO_CONFIG": str(path)}).model.block_size == 64
    other = tmp_path / "b.yaml"
    other.write_text("")
    assert load_config(other, env={"PANDO_CONFIG": str(path)}) == ClusterConfig()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- 1", "must hold a mapping, not list"),
        (b"just words", "must hold a mapping, not str"),
        (b"applications: []", "exactly one application"),
        (b"applications: [{}, {}]", "exactly one application"),
        (b"applications: 5", "exactly one application"),
        (b"a: " + b"x" * (4 * 2**20), "is larger than"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_config(path, env={})


def test_a_serve_config_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    document = {
        "http_options": {"host": "127.0.0.1", "port": 8123},
        "grpc_options": {"port": 9123},
        "applications": [{"name": "mine", "args": {"model": {"block_size": 8}}}],
    }
    path.write_text(yaml.safe_dump(document))
    config = load_config(path, env={})
    assert (config.app_name, config.model.block_size) == ("mine", 8)
    assert (config.listen.http_port, config.listen.grpc_port) == (8123, 9123)


def test_the_file_in_deploy_is_valid() -> None:
    config = load_config(ROOT / "deploy" / "serve.yaml", env={})
    assert config.replicas.num_replicas == 2
    assert config.listen.host == "127.0.0.1"


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert ClusterConfig().model_cache_dir == Path("/var/cache/me/pando")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ClusterConfig().model_cache_dir == Path.home() / ".cache" / "pando"
    assert ClusterConfig(cache_dir=Path("/models")).model_cache_dir == Path("/models")
