"""Which requests an engine could serve if it were alone. Pure."""

from kvstore.prefix_hash import num_tokens
from workers.errors import ContextTooLong, InvalidRequest
from workers.options import SchedulerOptions
from workers.protocol import GenerateRequest


def check_admissible(request: GenerateRequest, options: SchedulerOptions, pool_tokens: int) -> None:
    """Refuse now what would otherwise wait, or be preempted, for ever.

    Args:
        pool_tokens: how many token positions the whole KV pool has.

    Raises:
        InvalidRequest: an empty prompt, or a count out of range.
        ContextTooLong: prompt and output exceed the model's context or the pool.
    """
    num_prompt_tokens = num_tokens(request.tokens)
    max_tokens = request.sampling.max_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if not 1 <= request.n <= options.max_num_seqs:
        raise InvalidRequest(
            f"n is {request.n}; it must lie between 1 and {options.max_num_seqs}", param="n"
        )
    if max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; it must be at least 1", param="max_tokens"
        )
    for limit, what in ((options.max_model_len, "context"), (pool_tokens, "KV pool")):
        if num_prompt_tokens + max_tokens > limit:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, "
                f"together more than the {what} of {limit}",
                param="max_tokens",
            )
