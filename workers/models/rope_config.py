"""Reads rotary parameters: `rope_parameters` as transformers 5 writes them, or `rope_theta` and
`rope_scaling` as older versions did."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.layers.rotary import RopeSpec, RopeType
from workers.models.config_fields import UnsupportedModel, boolean, positive_float, positive_int

_DEFAULT_THETA = 10000.0
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    spec: RopeSpec
    max_model_len: int


def rope_from_config(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary parameters, and how long a context they carry: `max_position_embeddings`, or the length
    YaRN stretches its original context to when that is more.

    Raises:
        UnsupportedModel: a scaling that is not built here, or a bad value.
    """
    parameters = _parameters(config)
    rope_type = _rope_type(parameters)
    max_len = positive_int(config, "max_position_embeddings")
    # Models of the transformers 4 era keep the original length beside rope_scaling instead of in it.
    original = parameters.get(_ORIGINAL) or config.get(_ORIGINAL)
    original_max_len = positive_int({_ORIGINAL: original}, _ORIGINAL, max_len)
    if rope_type is RopeType.DEFAULT:
        factor = 1.0
    elif rope_type is RopeType.YARN:
        factor = positive_float(parameters, "factor", max_len / original_max_len)
        if original is not None:
            max_len = max(max_len, int(original_max_len * factor))
    else:
        factor = positive_float(parameters, "factor")
    spec = RopeSpec(
        rope_type=rope_type,
        theta=positive_float(parameters, "rope_theta", _DEFAULT_THETA),
        factor=factor,
        original_max_len=original_max_len,
        low_freq_factor=positive_float(parameters, "low_freq_factor", 1.0),
        high_freq_factor=positive_float(parameters, "high_freq_factor", 4.0),
        beta_fast=positive_float(parameters, "beta_fast", 32.0),
        beta_slow=positive_float(parameters, "beta_slow", 1.0),
        truncate=boolean(parameters, "truncate", True),
        attention_factor=_attention_factor(parameters, factor)
        if rope_type is RopeType.YARN
        else 1.0,
    )
    if rope_type is RopeType.LLAMA3 and spec.high_freq_factor <= spec.low_freq_factor:
        raise UnsupportedModel(
            f"high_freq_factor {spec.high_freq_factor} must be over "
            f"low_freq_factor {spec.low_freq_factor}"
        )
    return RopeConfig(spec, max_len)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise UnsupportedModel(f"rope_parameters must be one flat object; got {scaling!r}")
    parameters = {"rope_theta": config.get("rope_theta"), **scaling}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor must be 1; got {share!r}")
    return parameters


def _rope_type(parameters: Mapping[str, Any]) -> RopeType:
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        return RopeType(named)
    except ValueError:
        supported = ", ".join(RopeType)
        raise UnsupportedModel(
            f"rope_type {named!r} is not supported; supported are: {supported}"
        ) from None


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature on cos and sin (arXiv 2309.00071, eq. 22), or DeepSeek's ratio of two of them."""
    if parameters.get("attention_factor") is not None:
        return positive_float(parameters, "attention_factor")

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale = positive_float(parameters, "mscale")
        return temperature(mscale) / temperature(positive_float(parameters, "mscale_all_dim"))
    return temperature(1.0)
