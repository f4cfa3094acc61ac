"""Tiny random models of each architecture, written to disk by transformers, which is also the judge."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workers.layers.linear import Linear, MakeProjection
from workers.models.decoder import CausalLM
from workers.weights import load_model

VOCAB_SIZE = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN_DEEPSEEK = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

_name_to_model: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama_gqa": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama_mqa": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 20}),
    "llama_rope3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama_linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN}),
    "llama_yarn_mscale": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN_DEEPSEEK}),
    "mistral_window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "mistral_full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}
MODEL_NAMES = tuple(_name_to_model)


def config_of(name: str) -> Any:
    _, config_class, changes = _name_to_model[name]
    return config_class(**{**_SHAPE, **changes})


@cache
def judge(name: str) -> PreTrainedModel:
    """transformers' own model, random weights wide enough that attention is not uniform."""
    model_class = _name_to_model[name][0]
    torch.manual_seed(7)
    model = model_class(config_of(name)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.25)
        elif parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@cache
def ours(name: str, make_projection: MakeProjection = Linear) -> CausalLM:
    with TemporaryDirectory() as model_dir:
        judge(name).save_pretrained(model_dir)
        return load_model(
            Path(model_dir),
            dtype=torch.float32,
            device=torch.device("cpu"),
            make_projection=make_projection,
        )


@cache
def judged_logits(name: str, token_ids: tuple[int, ...]) -> Tensor:
    """[num_tokens, vocab_size] of the whole sequence at once, no cache."""
    with torch.inference_mode():
        logits: Tensor = judge(name)(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
