"""transformers' `generate` with its own KV cache; all prompts of a batch have one length, so nothing is padded."""

from typing import Any

from bench.engine.arms.loop import Generate, Prompts, serve


def make(settings: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["num_threads"])
    dtype = getattr(torch, settings["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model_dir"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # go on past it

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        token_ids = torch.tensor(prompts)
        with torch.inference_mode():
            rows = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        tokens: list[list[int]] = rows[:, token_ids.shape[1] :].tolist()
        return tokens

    return generate


if __name__ == "__main__":
    serve(make)
