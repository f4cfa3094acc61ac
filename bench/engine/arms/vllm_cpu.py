"""vLLM's offline engine, in an environment of its own."""

from importlib import import_module
from typing import Any

from bench.engine.arms.loop import Generate, Prompts, serve


def make(settings: dict[str, Any]) -> Generate:
    vllm: Any = import_module("vllm")  # not in our environment
    engine = vllm.LLM(
        settings["model_dir"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        enforce_eager=settings["is_eager"],
        enable_prefix_caching=True,
    )

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tasks = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(tasks, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(make)
