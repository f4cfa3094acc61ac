"""A model of a given shape with random weights, made on the device: no files, no copies."""

import torch

from workers.layers.attention import Attention
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMlp
from workers.layers.norm import RmsNorm
from workers.layers.rotary import RopeSpec, RotaryEmbedding
from workers.models.decoder import CausalLM, DecoderLayer
from workers.models.spec import ModelSpec

# Small enough that activations stay finite through any number of layers.
_STD = 0.02


def llama_spec(
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_model_len: int,
) -> ModelSpec:
    """Plain Llama of that shape, its head not tied to its embedding."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500_000.0),
        sliding_window=(None,) * num_layers,
        eos_token_ids=(),
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def llama_3_8b(max_model_len: int) -> ModelSpec:
    """The shape that Meta-Llama-3-8B's config.json states."""
    return llama_spec(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_model_len=max_model_len,
    )


def random_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Normally distributed weights."""

    def linear(num_rows: int, num_columns: int) -> Linear:
        weight = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
        return Linear(weight.normal_(std=_STD))

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(spec.hidden_size, dtype=dtype, device=device), spec.norm_eps)

    q_size = spec.num_q_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    layers = tuple(
        DecoderLayer(
            attention_norm=norm(),
            attention=Attention(
                qkv=linear(q_size + 2 * kv_size, spec.hidden_size),
                output=linear(spec.hidden_size, q_size),
                qk_norm=None,
                num_q_heads=spec.num_q_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                sliding_window=None,
            ),
            mlp_norm=norm(),
            mlp=GatedMlp(
                gate_up=linear(2 * spec.intermediate_size, spec.hidden_size),
                down=linear(spec.hidden_size, spec.intermediate_size),
            ),
        )
        for _ in range(spec.num_layers)
    )
    return CausalLM(
        spec=spec,
        embedding=linear(spec.vocab_size, spec.hidden_size).weight,
        rotary=RotaryEmbedding(spec.rope, spec.head_dim, dtype, device),
        layers=layers,
        norm=norm(),
        head=linear(spec.vocab_size, spec.hidden_size),
    )


def step_weight_bytes(model: CausalLM) -> int:
    """What every step reads: all weights but the embedding, of which it picks single rows."""
    linears = [model.head]
    for layer in model.layers:
        linears += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    return sum(each.weight.numel() * each.weight.element_size() for each in linears)
