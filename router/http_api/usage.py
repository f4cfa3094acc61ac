"""Token counts and log-probabilities in OpenAI's shapes."""

from collections.abc import Sequence

from router.requests import TokenChoice, TokenDetail, Usage

# JSON has no minus infinity.
_LEAST_LOGPROB = -9999.0


def usage_body(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def chat_logprobs(details: Sequence[TokenDetail]) -> dict[str, object]:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            {
                **_choice(detail.chosen),
                "top_logprobs": [_choice(other) for other in detail.top],
            }
            for detail in details
        ],
        "refusal": None,
    }


def completion_logprobs(details: Sequence[TokenDetail]) -> dict[str, object]:
    """`choices[].logprobs` of a completion: parallel arrays, the chosen token always among the top ones."""
    return {
        "tokens": [token_text(d.chosen.data) for d in details],
        "token_logprobs": [_finite(d.chosen.logprob) for d in details],
        "top_logprobs": [
            {token_text(c.data): _finite(c.logprob) for c in (*d.top, d.chosen)} for d in details
        ],
        "text_offset": [d.text_offset for d in details],
    }


def token_text(data: bytes) -> str:
    """A token's text, or `bytes:\\xe4…` for one that is no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choice(choice: TokenChoice) -> dict[str, object]:
    return {
        "token": token_text(choice.data),
        "logprob": _finite(choice.logprob),
        "bytes": list(choice.data),
    }


def _finite(logprob: float) -> float:
    # Written so that NaN, which compares false with everything, becomes the least one too.
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
