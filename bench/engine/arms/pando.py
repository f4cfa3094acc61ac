"""The bare engine: no Ray, no Redis, no HTTP."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine.arms.loop import Generate, Prompts, serve
from kvstore.prefix_hash import pack_tokens
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.options import EngineOptions, ModelOptions
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    TokensEmitted,
)


def engine_of(settings: dict[str, Any]) -> Engine:
    """An engine that was not started. Settings: model_dir, dtype, kv_dtype, num_threads, kv_memory_gib, and what
    else `EngineOptions` knows under "options"."""
    options = EngineOptions(
        num_threads=settings["num_threads"],
        kv_memory_gib=settings["kv_memory_gib"],
        **settings.get("options", {}),
    )
    model = ModelOptions(
        name=settings["model_dir"],
        dtype=settings["dtype"],
        kv_dtype=settings.get("kv_dtype", "auto"),
        device="cpu",
    )
    return build_engine(model, options, cache_dir=Path(settings["model_dir"])).engine


class Batch:
    """Requests handed in together, and their tokens as they come.

    Raises:
        RuntimeError: from `wait`, when a request failed.
    """

    def __init__(self, engine: Engine, prompts: Prompts, num_tokens: int, name: str) -> None:
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._failures: list[str] = []
        self._num_open = len(prompts)
        self._done = threading.Event()
        for i, prompt in enumerate(prompts):
            engine.submit(_request(f"{name}-{i}", prompt, num_tokens), self._sink(i))

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> list[list[int]]:
        """Each request's tokens, once all are complete."""
        self._done.wait()
        if self._failures:
            raise RuntimeError(self._failures[0])
        return self._tokens

    def _sink(self, index: int) -> Callable[[tuple[EngineEvent, ...]], None]:
        def sink(events: tuple[EngineEvent, ...]) -> None:
            for event in events:
                match event:
                    case TokensEmitted(token_ids=token_ids):
                        self._tokens[index] += token_ids
                    case RequestFailed(message=message):
                        self._failures.append(message)
                        self._close_one()
                    case SequenceFinished():
                        self._close_one()

        return sink

    def _close_one(self) -> None:
        # Sinks are called from the engine's one thread.
        self._num_open -= 1
        if self._num_open == 0:
            self._done.set()


def _request(name: str, prompt: list[int], num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        tokens=pack_tokens(prompt),
        fingerprint="",
        salt=b"bench",
        block_hashes=b"",
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )


def make(settings: dict[str, Any]) -> Generate:
    engine = engine_of(settings)
    engine.start()
    num_batches = 0

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        nonlocal num_batches
        num_batches += 1
        return Batch(engine, prompts, num_tokens, f"batch-{num_batches}").wait()

    return generate


if __name__ == "__main__":
    serve(make)
