"""config.json in both spellings, and every refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODEL_NAMES, config_of, judge

from workers.layers.rotary import RopeType, inverse_frequencies
from workers.models.config_fields import UnsupportedModel
from workers.models.spec import SUPPORTED_ARCHITECTURES, ModelSpec

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**PLAIN, **changes})


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_frequencies_equal_transformers(name: str) -> None:
    config = {**config_of(name).to_dict(), "architectures": [type(judge(name)).__name__]}
    ours = ModelSpec.from_config(config)
    theirs = judge(name).model.rotary_emb
    frequencies = inverse_frequencies(ours.rope, ours.head_dim)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.rope.attention_factor == pytest.approx(theirs.attention_scaling)


def test_old_and_new_spelling_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = spec(
        rope_theta=5e5,
        rope_scaling={"type": "llama3", "original_max_position_embeddings": 512, **scaling},
        torch_dtype="bfloat16",
    )
    new = spec(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 512,
            **scaling,
        },
        dtype="bfloat16",
    )
    assert old == new
    assert old.rope.rope_type is RopeType.LLAMA3
    assert old.rope.theta == 5e5


def test_context_length() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert spec().max_model_len == 2048
    assert spec(rope_scaling=yarn).max_model_len == 8192
    assert spec(rope_scaling={"rope_type": "linear", "factor": 4.0}).max_model_len == 2048


def test_heads() -> None:
    assert spec().num_kv_heads == 4
    assert spec(num_key_value_heads=1).num_kv_heads == 1
    assert spec().head_dim == 16
    assert spec(head_dim=32).head_dim == 32
    assert spec(head_dim=None).head_dim == 16


def test_sliding_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert spec(**mistral, sliding_window=100).sliding_window == (100, 100)
    assert spec(**mistral, sliding_window=None).sliding_window == (None, None)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}
    assert spec(**qwen, use_sliding_window=False).sliding_window == (None, None)
    in_old = spec(**qwen, use_sliding_window=True, max_window_layers=1)
    in_new = spec(
        **qwen, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]
    )
    assert in_old.sliding_window == in_new.sliding_window == (None, 100)
    assert spec(sliding_window=100).sliding_window == (None, None)


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "eos_token_id": 7}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*" + SUPPORTED_ARCHITECTURES[-1]),
        ({"architectures": None}, "is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported.*yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number; got None"),
        ({"rope_parameters": {"full_attention": {}}}, "one flat object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1; got 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu; got 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be an integer.*got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be .*got 0"),
        ({"vocab_size": True}, "vocab_size must be .*got True"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even; got 15"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number; got -1"),
        ({"attention_bias": 1}, "attention_bias must be true or false; got 1"),
    ],
)
def test_refusals_name_the_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "is not JSON"), ("[]", "must hold an object; got list")],
)
def test_unreadable_config(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_dir(tmp_path)
