"""Prints what an engine step costs beside the model: `python -m bench.step`.

Plan, inputs, draws, commit and delivery, with a model that computes nothing and a vocabulary of sixteen tokens.
"""

import argparse
import gc
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.step.null_model import VOCAB_SIZE, ignore, null_engine, request

_NUM_SEQUENCES = (1, 16, 64, 128, 256)
_CONTEXTS = (1_000, 8_000)
_TEMPERATURES = (0.0, 1.0)
_NUM_WARM_UP_STEPS = 8


def step_s(
    num_sequences: int, num_context_tokens: int, temperature: float, num_steps: int
) -> float:
    """Median seconds of a step in which all sequences decode.

    Lengths differ by up to 32 tokens, so that every step has some blocks to seal.
    """
    num_tokens = _NUM_WARM_UP_STEPS + num_steps + 8
    engine = null_engine(num_sequences, num_context_tokens, num_tokens + 32)
    numbers = random.Random(1)
    for i in range(num_sequences):
        length = num_context_tokens - numbers.randrange(32)
        tokens = array("I", [numbers.randrange(VOCAB_SIZE) for _ in range(length)])
        engine.submit(request(f"r{i}", tokens, num_tokens, temperature), ignore)
    engine.step()
    while engine.report().stats.num_waiting:
        engine.step()
    for _ in range(_NUM_WARM_UP_STEPS):
        engine.step()
    gc.collect()
    gc.freeze()
    laps = []
    for _ in range(num_steps):
        begun_s = perf_counter()
        engine.step()
        laps.append(perf_counter() - begun_s)
    assert engine.report().stats.num_running == num_sequences
    return median(laps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=_NUM_SEQUENCES)
    parser.add_argument("--contexts", type=int, nargs="+", default=_CONTEXTS)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(f"{'sequences':>9} {'context':>8} {'draws':>8} {'ms a step':>10} {'us a sequence':>14}")
    for temperature in _TEMPERATURES:
        for context in options.contexts:
            for count in options.sequences:
                seconds = step_s(count, context, temperature, options.steps)
                draws = "sampled" if temperature else "greedy"
                print(
                    f"{count:>9} {context:>8} {draws:>8} {seconds * 1e3:>10.3f}"
                    f" {seconds * 1e6 / count:>14.1f}",
                    flush=True,
                )
                rows.append(
                    {"sequences": count, "context": context, "draws": draws, "step_s": seconds}
                )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
