"""Loads a checkpoint's safetensors into a `CausalLM`, packing what runs as one projection."""

from pathlib import Path

import torch
from torch import Tensor

from workers.checkpoint import Checkpoint
from workers.layers.attention import Attention
from workers.layers.linear import Linear, MakeProjection, Projection
from workers.layers.mlp import GatedMlp
from workers.layers.norm import RmsNorm
from workers.layers.rotary import RotaryEmbedding
from workers.models.decoder import CausalLM, DecoderLayer
from workers.models.spec import ModelSpec
from workers.progress import Progress, silent


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    make_projection: MakeProjection = Linear,
) -> CausalLM:
    """The model in `model_dir` (config.json and safetensors, sharded or not), its weights cast to `dtype`.

    Args:
        make_projection: from each matrix that activations are multiplied by.

    Raises:
        UnsupportedModel: config.json asks for something not built here.
        CheckpointError: a tensor is missing, unexpected or of another shape, or a file is broken.
    """
    spec = ModelSpec.from_dir(model_dir)
    with Checkpoint(model_dir, dtype, device, progress or silent) as checkpoint:
        checkpoint.expect(expected_shapes(spec), optional=_optional_names(spec))
        return _build(spec, checkpoint, dtype, device, make_projection)


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a checkpoint of this model holds."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.output_bias),
        "mlp.gate_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.up_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, mlp, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        for name, (num_rows, num_columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_rows, num_columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


def _optional_names(spec: ModelSpec) -> frozenset[str]:
    """Tensors some checkpoints carry though they follow from the rest."""
    names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(spec.num_layers)}
    return frozenset(names | {"lm_head.weight"} if spec.tie_embeddings else names)


def _build(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    make_projection: MakeProjection,
) -> CausalLM:
    embedding = checkpoint.take("model.embed_tokens.weight")
    head = embedding if spec.tie_embeddings else checkpoint.take("lm_head.weight")
    return CausalLM(
        spec=spec,
        embedding=embedding,
        rotary=RotaryEmbedding(spec.rope, spec.head_dim, dtype, device),
        layers=tuple(
            _build_layer(spec, checkpoint, i, make_projection) for i in range(spec.num_layers)
        ),
        norm=RmsNorm(checkpoint.take("model.norm.weight"), spec.norm_eps),
        head=make_projection(head, None),
    )


def _build_layer(
    spec: ModelSpec, checkpoint: Checkpoint, index: int, make_projection: MakeProjection
) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def norm(name: str) -> RmsNorm:
        return RmsNorm(checkpoint.take(f"{prefix}{name}.weight"), spec.norm_eps)

    def linear(*names: str, has_bias: bool) -> Projection:
        """The named projections' rows, one after another."""
        weight = _stack([checkpoint.take(f"{prefix}{name}.weight") for name in names])
        if not has_bias:
            return make_projection(weight, None)
        biases = [checkpoint.take(f"{prefix}{name}.bias") for name in names]
        return make_projection(weight, _stack(biases))

    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention=Attention(
            qkv=linear(
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=spec.qkv_bias
            ),
            output=linear("self_attn.o_proj", has_bias=spec.output_bias),
            qk_norm=_qk_norm(spec, checkpoint, prefix) if spec.qk_norm else None,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            sliding_window=spec.sliding_window[index],
        ),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMlp(
            gate_up=linear("mlp.gate_proj", "mlp.up_proj", has_bias=spec.mlp_bias),
            down=linear("mlp.down_proj", has_bias=spec.mlp_bias),
        ),
    )


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _qk_norm(spec: ModelSpec, checkpoint: Checkpoint, prefix: str) -> RmsNorm:
    """One weight a head, so that query and key heads are normalized in one go."""
    query = checkpoint.take(f"{prefix}self_attn.q_norm.weight")
    key = checkpoint.take(f"{prefix}self_attn.k_norm.weight")
    weight = torch.cat((query.expand(spec.num_q_heads, -1), key.expand(spec.num_kv_heads, -1)))
    return RmsNorm(weight, spec.norm_eps)
