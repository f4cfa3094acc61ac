"""Fields that would change what the answer means and that we do not serve: refused, never ignored."""

from collections.abc import Mapping
from typing import Any

from router.http_api.schemas import GenerationBody
from router.validation import shown
from workers.errors import InvalidRequest

# Field → the values that ask for nothing, which are let through.
_COMMON: Mapping[str, tuple[Any, ...]] = {
    "structured_outputs": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "logits_processors": ([],),
    "thinking_token_budget": (),
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "prompt_embeds": (),
}
_REMOVED_PREFIX = "guided_"


def refuse_unsupported_chat(body: GenerationBody) -> None:
    """Raises InvalidRequest for a field of a chat that is not served."""
    _refuse(body, _CHAT)


def refuse_unsupported_completion(body: GenerationBody) -> None:
    """Raises InvalidRequest for a field of a completion that is not served."""
    _refuse(body, _COMPLETION)


def _refuse(body: GenerationBody, field_to_neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in (body.model_extra or {}).items():
        if value is None:
            continue
        if name.startswith(_REMOVED_PREFIX):
            raise InvalidRequest(
                f"{shown(name)} is not a field any more; its successor structured_outputs "
                "is not supported yet",
                param=shown(name),
            )
        if name in field_to_neutral and value not in field_to_neutral[name]:
            raise InvalidRequest(f"{name} {shown(value)} is not supported yet", param=name)
