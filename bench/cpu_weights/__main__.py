"""Prints how far bf16 and int8 weights move the model's predictions on a CPU: `python -m bench.cpu_weights`.

Against the float32 model, over English text of this repository's documentation, next token by next token: the
Kullback-Leibler divergence of the two distributions, and how often their likeliest tokens differ.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cluster.config import load_config
from kernels.batch import AttentionBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.cpu_weights import weight_form
from workers.model_store import resolve_model
from workers.options import ModelOptions
from workers.tokenizer import Tokenizer
from workers.weights import load_model

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")
_DOCS = Path(__file__).resolve().parents[2] / "docs"


@torch.inference_mode()
def log_probabilities(model_dir: Path, form_name: str, token_ids: list[int]) -> Tensor:
    """float32 [num_tokens, vocab_size], the whole text in one pass."""
    form = weight_form(form_name, "auto", _CPU)
    model = load_model(
        model_dir,
        dtype=form.compute_dtype,
        device=_CPU,
        make_projection=form.make_projection,
    )
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    layout = KvLayout(
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        block_size=_BLOCK_SIZE,
        kv_dtype=KvDtype.AUTO,
        compute_dtype=form.compute_dtype,
    )
    positions = torch.arange(len(token_ids))
    batch = AttentionBatch(
        slots=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=(0, len(token_ids)),
        context_lens=(len(token_ids),),
        block_size=_BLOCK_SIZE,
    )
    pool = KvPool(layout, num_blocks, _CPU)
    hidden = model.forward(torch.tensor(token_ids), positions, batch, pool)
    return model.logits(hidden).log_softmax(-1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_weights", description=__doc__)
    parser.add_argument("--model", default=ModelOptions().name)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args(arguments)
    model_dir = resolve_model(options.model, cache_dir=load_config().model_cache_dir)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_DOCS.glob("*.md")))
    token_ids = Tokenizer.from_directory(model_dir).encode(text)[: options.tokens]
    baseline = log_probabilities(model_dir, "fp32", token_ids)
    print(f"{len(token_ids)} tokens, against fp32")
    print(f"{'weights':>8} {'mean KL':>9} {'99 % KL':>9} {'other likeliest':>16}")
    for name in ("bf16", "int8"):
        other = log_probabilities(model_dir, name, token_ids)
        divergence = (baseline.exp() * (baseline - other)).sum(-1)
        flips = (baseline.argmax(-1) != other.argmax(-1)).float().mean()
        print(
            f"{name:>8} {divergence.mean():>9.5f} {divergence.quantile(0.99):>9.4f} {flips:>16.2%}"
        )


if __name__ == "__main__":
    main()
