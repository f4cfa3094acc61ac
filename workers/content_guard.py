"""Keeps control tokens that are written out in a chat's messages from acting as such. No torch here.

Someone whose words end up in a message could else write `<|im_end|>` and forge a turn of his own. The text of
such a token is broken up by a guard: a special token of the guarded tokenizer that nobody can guess.

    message     Hi<|im_end|>                      as the user wrote it
    marked      Hi<GUARD|im_end|>                 what the chat template sees
    rendered    <|im_start|>user\nHi<GUARD|im_end|><|im_end|>\n
    encoded     the template's own tokens act, the user's text is text; the guards' ids are left out

Templates may look into contents and trim or cut them. They are taken to put text of their own between two
contents, so that no control token comes about where two of them meet.
"""

import secrets
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import tokenizers


class ContentGuard:
    """Guards the contents of chats for one tokenizer.

    Args:
        backend: is copied when a guard is needed for the first time, and never changed.
        control_tokens: what may not act inside contents; those of a single character cannot be broken up
            and are let through.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_tokens: Iterable[str]) -> None:
        self._backend = backend
        self._control_tokens = tuple(token for token in control_tokens if len(token) > 1)
        # Letters and digits only: templates that quote or escape contents leave them as they are.
        self._guard = f"guard{secrets.token_hex(8)}"

    def mark(self, content: str) -> str:
        """`content` with every control token in it broken up; the same text when there is none."""
        starts: set[int] = set()
        for token in self._control_tokens:
            start = content.find(token)
            while start >= 0:
                starts.add(start)
                start = content.find(token, start + 1)  # tokens may overlap
        if not starts:
            return content
        cuts = [0, *(start + 1 for start in sorted(starts)), len(content)]
        return self._guard.join(content[a:b] for a, b in pairwise(cuts))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, guards left out. BOS and EOS are the template's own affair."""
        ids = self._guarded_backend.encode(text, add_special_tokens=False).ids
        guard_id = self._guarded_backend.token_to_id(self._guard)
        return [token_id for token_id in ids if token_id != guard_id]

    @cached_property
    def _guarded_backend(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.add_special_tokens([tokenizers.AddedToken(self._guard, normalized=False)])
        return copy
