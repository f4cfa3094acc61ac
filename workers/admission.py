"""Which requests an engine could serve if it were alone. Pure."""

from kvstore.prefix_hash import num_tokens
from workers.errors import ContextTooLong, InvalidRequest
from workers.options import SchedulerOptions
from workers.protocol import GenerateRequest


def check_admissible(
    request: GenerateRequest, options: SchedulerOptions, num_blocks: int, block_size: int
) -> None:
    """Refuse now what would otherwise wait, or be preempted, for ever.

    Args:
        num_blocks: what the whole KV pool has.

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
    for limit, what in (
        (options.max_model_len, "context"),
        (num_blocks * block_size, "KV pool"),
    ):
        if num_prompt_tokens + max_tokens > limit:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, "
                f"together more than the {what} of {limit}",
                param="max_tokens",
            )
    if request.beam is not None:
        _check_beams(request, request.beam.width, options, num_blocks, block_size)


def _check_beams(
    request: GenerateRequest,
    width: int,
    options: SchedulerOptions,
    num_blocks: int,
    block_size: int,
) -> None:
    """Beams step together, so all of them must fit at once: a shared prompt and a private tail each."""
    most = min(options.max_num_seqs, options.max_num_batched_tokens)
    if not request.n <= width <= most:
        raise InvalidRequest(
            f"the beam width is {width}; it must lie between n ({request.n}) and {most}",
            param="best_of",
        )
    num_prompt_blocks = num_tokens(request.tokens) // block_size
    num_all_blocks = -(-(num_tokens(request.tokens) + request.sampling.max_tokens) // block_size)
    num_shared_blocks = num_prompt_blocks if options.enable_prefix_caching else 0
    num_wanted = num_shared_blocks + width * (num_all_blocks - num_shared_blocks)
    if num_wanted > num_blocks:
        raise ContextTooLong(
            f"{width} beams of {num_tokens(request.tokens)} + {request.sampling.max_tokens} tokens take "
            f"{num_wanted} blocks at once, more than the KV pool's {num_blocks}",
            param="max_tokens",
        )
