"""Checks a request against the limits and the model, and turns it into what the engine takes. Pure."""

from collections.abc import Mapping
from typing import TypeVar

from router.options import MAX_PRIORITY, MIN_PRIORITY, GatewayOptions
from router.requests import BeamFields, InferenceRequest, SamplingFields
from workers.errors import ContextTooLong, InvalidRequest
from workers.protocol import BeamParams, ReplicaInfo, SamplingParams

Number = TypeVar("Number", int, float)

_SHOWN_CHARS = 80
_SEED_MASK = 2**63 - 1
_MAX_LENGTH_PENALTY = 10.0
# Sampling field → the values under which it asks for nothing, so that beam search keeps its promise.
_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[object, ...]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}


def shown(value: object) -> str:
    """`value` for an error message: escaped, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def check_request(request: InferenceRequest, options: GatewayOptions) -> None:
    """What can be checked before tokenizing.

    Raises:
        InvalidRequest: n, best_of, priority or the stop strings are out of their limits, or a field does not
            go with beam search.
    """
    _check_range("n", request.n, 1, options.max_n)
    if request.best_of is not None and not request.n <= request.best_of <= options.max_n:
        raise InvalidRequest(
            f"best_of is {shown(request.best_of)}, must be between n ({request.n}) and {options.max_n}",
            param="best_of",
        )
    _check_range("priority", request.priority, MIN_PRIORITY, MAX_PRIORITY)
    if request.beam is not None:
        _check_beam(request.beam, request.sampling)
    if len(request.stop) > options.max_stop_strings:
        raise InvalidRequest(
            f"stop has {len(request.stop)} strings, the limit is {options.max_stop_strings}",
            param="stop",
        )
    for stop in request.stop:
        if not stop:
            raise InvalidRequest("stop holds an empty string", param="stop")
        if len(stop) > options.max_stop_string_chars:
            raise InvalidRequest(
                f"stop holds a string of {len(stop)} characters, "
                f"the limit is {options.max_stop_string_chars}",
                param="stop",
            )


def beam_params(request: InferenceRequest) -> BeamParams | None:
    """What the engine is told about beams, of a request that `check_request` let through."""
    if request.beam is None:
        return None
    return BeamParams(
        width=request.num_computed,
        length_penalty=request.beam.length_penalty,
        early_stopping=request.beam.early_stopping,
    )


def check_token_ids(name: str, token_ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    """Raises InvalidRequest when an id is negative or not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} holds token id {shown(token_id)}, the vocabulary has ids 0 to {vocab_size - 1}",
                param=name,
            )


def max_prompt_tokens(info: ReplicaInfo) -> int:
    """The longest prompt that leaves room for one token of output."""
    return context_length(info) - 1


def context_length(info: ReplicaInfo) -> int:
    """Tokens of prompt and output together: the model's limit or the whole pool, whichever is less."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def check_prompt_length(num_tokens: int, info: ReplicaInfo, param: str) -> None:
    """Raises InvalidRequest for an empty prompt, ContextTooLong for one that leaves no room to answer."""
    if num_tokens < 1:
        raise InvalidRequest(f"{param} is empty: it must have at least one token", param=param)
    if num_tokens > max_prompt_tokens(info):
        raise ContextTooLong(
            f"{param} has {num_tokens} tokens, but the context has room for {context_length(info)} "
            "and at least one is needed for the output",
            param=param,
        )


def sampling_params(
    request: InferenceRequest, num_prompt_tokens: int, info: ReplicaInfo, options: GatewayOptions
) -> SamplingParams:
    """The engine's sampling parameters. Where the best are to be chosen, with log-probabilities to choose by.

    Raises:
        InvalidRequest: a field is out of its range.
        ContextTooLong: prompt and max_tokens together do not fit the context.
    """
    fields = request.sampling
    default = request.default_max_tokens or options.default_max_tokens
    max_tokens = _max_tokens(fields, default, num_prompt_tokens, info)
    check_token_ids("stop_token_ids", fields.stop_token_ids, info.vocab_size)
    if len(fields.stop_token_ids) > options.max_stop_token_ids:
        raise InvalidRequest(
            f"stop_token_ids has {len(fields.stop_token_ids)} ids, "
            f"the limit is {options.max_stop_token_ids}",
            param="stop_token_ids",
        )
    logprobs = fields.logprobs
    if logprobs is not None:
        _check_range(fields.logprobs_name, logprobs, 0, min(options.max_logprobs, info.vocab_size))
    elif request.is_ranked:
        logprobs = 0
    default_temperature = 1.0 if request.beam is None else 0.0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_in_range("min_tokens", fields.min_tokens, 0, 0, max_tokens),
        temperature=_in_range("temperature", fields.temperature, default_temperature, 0.0, 2.0),
        top_k=_top_k(fields.top_k, info.vocab_size),
        top_p=_above_zero("top_p", fields.top_p, 1.0, 1.0),
        min_p=_in_range("min_p", fields.min_p, 0.0, 0.0, 1.0),
        seed=_seed(fields.seed),
        repetition_penalty=_above_zero("repetition_penalty", fields.repetition_penalty, 1.0, 10.0),
        presence_penalty=_in_range("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_in_range("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.logit_bias, info.vocab_size, options.max_logit_bias_entries),
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
    )


def _check_beam(beam: BeamFields, sampling: SamplingFields) -> None:
    _check_range("length_penalty", beam.length_penalty, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY)
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(sampling, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"{name} {shown(value)} is not supported with {beam.name}", param=name
            )
    if sampling.logprobs is not None:
        raise InvalidRequest(f"logprobs is not supported with {beam.name}", param="logprobs")


def _max_tokens(
    fields: SamplingFields, default: int | None, num_prompt_tokens: int, info: ReplicaInfo
) -> int:
    room = context_length(info) - num_prompt_tokens
    name = fields.max_tokens_name
    if fields.max_tokens is None:
        return room if default is None else min(default, room)
    if fields.max_tokens < 1:
        raise InvalidRequest(
            f"{name} is {shown(fields.max_tokens)}, must be at least 1", param=name
        )
    if fields.max_tokens > room:
        raise ContextTooLong(
            f"{name} is {shown(fields.max_tokens)}, but after the prompt's {num_prompt_tokens} tokens "
            f"the context of {context_length(info)} has room for {room}",
            param=name,
        )
    return fields.max_tokens


def _top_k(value: int | None, vocab_size: int) -> int:
    # Both 0 and −1 are in use for "off".
    if value is None or value in (-1, 0):
        return 0
    if value < 0:
        raise InvalidRequest(
            f"top_k is {shown(value)}, must be at least 1, or 0 or -1 for off", param="top_k"
        )
    return min(value, vocab_size)


def _seed(value: int | None) -> int | None:
    if value is None:
        return None
    _check_range("seed", value, -(2**63), 2**63 - 1)
    # The engine counts seeds from 0; negative ones keep their own, repeatable, place.
    return value & _SEED_MASK


def _logit_bias(
    token_id_to_bias: Mapping[int, float], vocab_size: int, max_entries: int
) -> tuple[tuple[int, float], ...]:
    if len(token_id_to_bias) > max_entries:
        raise InvalidRequest(
            f"logit_bias has {len(token_id_to_bias)} entries, the limit is {max_entries}",
            param="logit_bias",
        )
    check_token_ids("logit_bias", tuple(token_id_to_bias), vocab_size)
    for token_id, bias in token_id_to_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias of token id {token_id} is {shown(bias)}, must be between -100 and 100",
                param="logit_bias",
            )
    return tuple(sorted(token_id_to_bias.items()))


def _in_range(
    name: str, value: Number | None, default: Number, low: Number, high: Number
) -> Number:
    if value is None:
        return default
    _check_range(name, value, low, high)
    return value


def _above_zero(name: str, value: float | None, default: float, high: float) -> float:
    if value is None:
        return default
    if not 0.0 < value <= high:
        raise InvalidRequest(
            f"{name} is {shown(value)}, must be above 0 and at most {high:g}", param=name
        )
    return value


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} is {shown(value)}, must be between {low} and {high}", param=name
        )
