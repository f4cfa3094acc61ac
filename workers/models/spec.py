"""What a decoder needs to know about itself, read from a checkpoint's config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.layers.rotary import RopeSpec
from workers.models import config_fields
from workers.models.config_fields import UnsupportedModel
from workers.models.rope_config import rope_from_config

_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True)
class Family:
    """How an architecture differs from plain Llama."""

    qkv_bias: bool | None  # None: as `attention_bias` says
    output_bias: bool | None
    qk_norm: bool
    has_window: bool


_architecture_to_family: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=False, has_window=False),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, qk_norm=False, has_window=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, qk_norm=False, has_window=True),
    "Qwen3ForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=True, has_window=True),
}
SUPPORTED_ARCHITECTURES = tuple(_architecture_to_family)


@dataclass(frozen=True)
class ModelSpec:
    """A model of the Llama family.

    Attributes:
        num_q_heads, num_kv_heads: equal in MHA; several query heads to a KV head in GQA; one KV head in MQA.
        sliding_window: one entry a layer: how many tokens a row sees, itself included; None: all.
        max_model_len: the most tokens of prompt and output together that the model was made for.
        eos_token_ids: each of them ends a generation.
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
        qk_norm: each query and key head is RMS-normalized before its rotation.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    norm_eps: float
    rope: RopeSpec
    sliding_window: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelSpec":
        """Reads config.json, and generation_config.json for further end-of-sequence ids.

        Raises:
            UnsupportedModel: see `from_config`; also a file that is missing, too large or not JSON.
        """
        config = read_json_object(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        if generation.exists():
            extra = config_fields.token_ids(read_json_object(generation), "eos_token_id")
            known = config_fields.token_ids(config, "eos_token_id")
            config = {**config, "eos_token_id": list(dict.fromkeys((*known, *extra)))}
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """The spec a config.json's content describes, in transformers' old and new spelling.

        Raises:
            UnsupportedModel: an architecture, rotary scaling, activation or weight format that is not
                built here, or a field with a bad value. The message names the field and the value.
        """
        architecture = _architecture(config)
        family = _architecture_to_family[architecture]
        _refuse_unbuilt(config)
        hidden_size = config_fields.positive_int(config, "hidden_size")
        num_q_heads = config_fields.positive_int(config, "num_attention_heads")
        num_kv_heads = config_fields.positive_int(config, "num_key_value_heads", num_q_heads)
        num_layers = config_fields.positive_int(config, "num_hidden_layers")
        if num_q_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {num_q_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = config_fields.positive_int(config, "head_dim", hidden_size // num_q_heads)
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even; got {head_dim}")
        rope = rope_from_config(config)
        attention_bias = config_fields.boolean(config, "attention_bias", False)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=config_fields.positive_int(config, "intermediate_size"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=config_fields.positive_int(config, "vocab_size"),
            max_model_len=rope.max_model_len,
            norm_eps=config_fields.positive_float(config, "rms_norm_eps", 1e-6),
            rope=rope.spec,
            sliding_window=_windows(config, family, num_layers),
            eos_token_ids=config_fields.token_ids(config, "eos_token_id"),
            tie_embeddings=config_fields.boolean(config, "tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=config_fields.boolean(config, "mlp_bias", False),
            qk_norm=family.qk_norm,
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's small file.

    Raises:
        UnsupportedModel: no such file, over 4 MiB, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UnsupportedModel(f"{path.name} is over {_MAX_CONFIG_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"the model directory has no {path.name}") from None
    except ValueError as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path.name} must hold an object; got {type(content).__name__}")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in _architecture_to_family:
            return str(architecture)
    raise UnsupportedModel(
        f"architectures {named} is not supported; supported are: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act must be silu; got {activation!r}")
    if quantization := config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "?"
        )
        raise UnsupportedModel(f"quantization_config.quant_method {method!r} is not supported")


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Which layers slide: as `layer_types` says, else Qwen's first `max_window_layers` do not."""
    is_off = not family.has_window or config.get("use_sliding_window") is False
    if is_off or config.get("sliding_window") is None:
        return (None,) * num_layers
    window = config_fields.positive_int(config, "sliding_window")
    if layer_types := config.get("layer_types"):
        if len(layer_types) != num_layers:
            raise UnsupportedModel(
                f"layer_types has {len(layer_types)} entries for {num_layers} layers"
            )
        return tuple(_window_of(layer_type, window) for layer_type in layer_types)
    if "use_sliding_window" in config:
        first = config_fields.non_negative_int(config, "max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    return (window,) * num_layers


def _window_of(layer_type: str, window: int) -> int | None:
    match layer_type:
        case "sliding_attention":
            return window
        case "full_attention":
            return None
        case _:
            raise UnsupportedModel(f"layer_types entry {layer_type!r} is not supported")
