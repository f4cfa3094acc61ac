"""Checkpoints as they come: sharded, tied, half precision, and broken in every way that has a name."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from tiny_models import judge, judged_logits, ours, random_tokens
from torch import Tensor

from kvstore.kv_layout import KvDtype
from workers.checkpoint import CheckpointError
from workers.models.decoder import CausalLM
from workers.weights import load_model

TOKENS = random_tokens(40, 9)


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(model_dir, dtype=dtype, device=torch.device("cpu"))


def logits_of(model: CausalLM, kv_dtype: KvDtype = KvDtype.AUTO) -> Tensor:
    driver = PagedDriver(model, kv_dtype=kv_dtype)
    return driver.run(driver.start(TOKENS), chunk=40)


def edit_weights(model_dir: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    judge("llama_gqa").save_pretrained(tmp_path)
    return tmp_path


def test_sharded_equals_whole(tmp_path: Path) -> None:
    judge("llama_gqa").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen: list[tuple[str, int, int | None]] = []
    model = load_model(
        tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda *report: seen.append(report),
    )
    assert torch.equal(logits_of(model), logits_of(ours("llama_gqa")))
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == seen[-1][2] == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))


def test_bfloat16_stays_near_transformers_in_bfloat16(model_dir: Path) -> None:
    model = load(model_dir, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    exact = judged_logits("llama_gqa", tuple(TOKENS))
    with torch.inference_mode():
        half = deepcopy(judge("llama_gqa")).to(torch.bfloat16)
        theirs = half(torch.tensor([TOKENS])).logits[0].float()
    our_error = (logits_of(model) - exact).abs().mean()
    assert our_error < 1.5 * (theirs - exact).abs().mean()


def test_fp8_pool_stays_near_the_compute_dtype() -> None:
    for name in ("llama_gqa", "qwen3", "mistral_window"):
        exact = judged_logits(name, tuple(TOKENS))
        approximate = logits_of(ours(name), KvDtype.FP8_E4M3)
        assert approximate.isfinite().all()
        divergence = torch.nn.functional.kl_div(
            approximate.log_softmax(-1),
            exact.log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        assert 0 < divergence < 0.05, name


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    judge("llama_tied").save_pretrained(tmp_path)
    edit_weights(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert torch.equal(logits_of(load(tmp_path)), logits_of(ours("llama_tied")))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight$"),
        (lambda t: t.update(stray=torch.zeros(1)), "unexpected tensors: stray$"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(7)}),
            r"tensor model\.norm\.weight has shape \[7\]; config.json implies \[48\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}),
            r"tensor model\.norm\.weight holds torch\.int32",
        ),
        (dict.clear, "missing tensors: lm_head.weight, .* and 25 more"),
    ],
)
def test_wrong_tensors_are_named(model_dir: Path, edit: Any, message: str) -> None:
    edit_weights(model_dir, edit)
    with pytest.raises(CheckpointError, match=message):
        load(model_dir)


def test_broken_file_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is broken"):
        load(model_dir)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../outside.safetensors"}, "not a plain file name"),
        ({"a": "gone.safetensors"}, "gone.safetensors', which is missing"),
        ({}, "has no weight_map"),
    ],
)
def test_bad_index_is_refused(model_dir: Path, weight_map: dict[str, str], message: str) -> None:
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        load(model_dir)
