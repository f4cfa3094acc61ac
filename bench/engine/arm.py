"""An arm is one engine in one configuration; here is how each is started."""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.options import EngineOptions

_CPU_WEIGHTS = ("int8", "auto")


@dataclass(frozen=True)
class Arm:
    """One engine in one configuration.

    Attributes:
        engine: pando, vllm or transformers.
        dtype: float32 or bfloat16, as torch names them.
        precision: what figures are compared within: fp32, bf16, or what Pando chose.
        settings: of this arm alone, beside those that all arms get.
        has_prefix_cache: whether a known prompt is found again.
    """

    name: str
    engine: str
    module: str
    dtype: str
    precision: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    has_prefix_cache: bool = True


def _pando(precision: str, dtype: str, options: Mapping[str, Any]) -> Arm:
    settings = {"kv_memory_gib": 1.0, "options": dict(options)}
    return Arm(f"pando-{precision}", "pando", "pando", dtype, precision, settings)


def _vllm(precision: str, dtype: str, suffix: str = "", *, is_eager: bool = True) -> Arm:
    # In one process: no messages between front and core, and one start instead of three.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    settings = {"max_model_len": 4096, "is_eager": is_eager}
    name = f"vllm-{precision}{suffix}"
    return Arm(name, "vllm", "vllm_cpu", dtype, precision, settings, environment)


def _transformers(precision: str, dtype: str) -> Arm:
    name = f"transformers-{precision}"
    return Arm(name, "transformers", "hugging_face", dtype, precision, has_prefix_cache=False)


def all_arms() -> dict[str, Arm]:
    """By name, in the order of the tables. Those of Pando's weight formats are there when the engine knows them."""
    known = {each.name for each in dataclasses.fields(EngineOptions)}
    has_formats = "cpu_weights" in known
    plain = {"cpu_weights": "fp32"} if has_formats else {}
    half = {"cpu_weights": "bf16"} if has_formats else {}
    arms = [_pando("fp32", "float32", plain), _pando("bf16", "bfloat16", half)]
    if has_formats:
        arms += [_pando(name, "float32", {"cpu_weights": name}) for name in _CPU_WEIGHTS]
    arms += [_vllm("fp32", "float32"), _vllm("bf16", "bfloat16")]
    arms += [_transformers("fp32", "float32"), _transformers("bf16", "bfloat16")]
    arms += [_vllm("fp32", "float32", "-compiled", is_eager=False)]
    return {arm.name: arm for arm in arms}


# Compiling takes minutes at each start, and gained nothing in decoding where it was tried.
NOT_BY_DEFAULT = ("vllm-fp32-compiled",)


def command_of(arm: Arm, vllm_python: Path | None) -> list[str]:
    """The arm's program. The checkout goes to the end of the path, so that it hides nothing of the peer's."""
    python = str(vllm_python) if arm.engine == "vllm" else sys.executable
    root = str(Path(__file__).resolve().parents[2])
    start = f"runpy.run_module('bench.engine.arms.{arm.module}', run_name='__main__')"
    return [python, "-c", f"import runpy, sys; sys.path.append({root!r}); {start}"]
