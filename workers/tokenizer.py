"""Text to token ids and back, and chats to prompts. No torch here: a Gateway holds one of these.

Reads what a Hugging Face model directory holds: `tokenizer.json`, `tokenizer_config.json` and, when it
is there, `chat_template.jinja`.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from workers.content_guard import ContentGuard
from workers.errors import InvalidRequest

# Its annotations say less than it does: it returns the texts and, beside them, token ranges.
_render_jinja_template = cast(Callable[..., tuple[list[str], object]], render_jinja_template)

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so text that still ends in U+FFFD after more tokens never heals.
_MAX_HELD_TOKENS = 8
_PROMPT_TAIL_TOKENS = 6
# What a turn marker looks like: a name between signs, as [INST]. Added words or runs of spaces are none.
_MARKER = re.compile(r"[^\w\s].*\w.*[^\w\s]")
# A short chat, to see which tokens a template itself writes.
_PROBE = tuple({"role": role, "content": "x"} for role in ("user", "assistant", "user"))


class Detokenizer(Protocol):
    """Turns one sequence's token ids into text piece by piece; the pieces joined are the whole text."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: whole characters only, so possibly none yet."""

    def flush(self) -> str:
        """What is still held back when the sequence ends: U+FFFD for a character cut short. Once only."""


class Tokenizer:
    """One model's tokenizer and chat template.

    Args:
        backend: the tokenizer itself.
        chat_template: Jinja source, or None when the model has none.
        special_tokens: `bos_token`, `eos_token` and others by name, as the template sees them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = _is_byte_level(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read a model directory.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is not what its name says.
        """
        source = directory / "tokenizer.json"
        if not source.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{source} is not a tokenizer: {error}") from error
        # A file may ask for truncation or padding, which are for training batches.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        return cls(backend, _chat_template(directory, config), _special_tokens(config))

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows; the model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's BOS where its tokenizer adds one.

        Raises:
            InvalidRequest: the text holds a lone surrogate, which no encoding of Unicode can carry.
        """
        _check_encodable(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know are left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special tokens by their name, before any joining of characters."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _bytes_of_byte_level(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for a sequence that continues `prompt_token_ids`.

        Special tokens give no text. With a byte-level tokenizer the joined text is exactly
        `decode(token_ids)`; with others it is what `token_ids` add to the prompt's text, so that a
        word's leading space survives.
        """
        if self._is_byte_level:
            return _ByteDetokenizer(self, self._special_ids)
        tail = [i for i in prompt_token_ids[-_PROMPT_TAIL_TOKENS:] if i not in self._special_ids]
        return _WindowDetokenizer(self, self._special_ids, tail)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, allow_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's next message begins.

        The template runs in Jinja's sandbox.

        Args:
            messages: each with `role` and `content`.
            allow_special_tokens: let control tokens act that are written out in `messages`; else they are
                plain text there.

        Raises:
            InvalidRequest: the model has no chat template, the template refuses these messages, or they hold
                a lone surrogate.
        """
        if allow_special_tokens:
            return self.encode(self._render(messages), add_special_tokens=False)
        guard = self._content_guard
        marked = [{key: guard.mark(text) for key, text in m.items()} for m in messages]
        text = self._render(marked)
        # The guards have a tokenizer of their own; most chats need none.
        if all(dict(m) == own for m, own in zip(messages, marked, strict=True)):
            return self.encode(text, add_special_tokens=False)
        _check_encodable(text)
        return guard.encode(text)

    @cached_property
    def _content_guard(self) -> ContentGuard:
        try:
            written = self._render(_PROBE)
        except InvalidRequest:  # an exacting template; its special tokens are known all the same
            written = ""
        # Some models mark turns by added tokens that are not declared special.
        control_tokens = [
            token.content
            for token in self._backend.get_added_tokens_decoder().values()
            if token.special or (token.content in written and _MARKER.fullmatch(token.content))
        ]
        return ContentGuard(self._backend, control_tokens)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions", param="messages"
            )
        try:
            texts, _ = _render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._chat_template,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return texts[0]

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


class _ByteDetokenizer:
    """For byte-level vocabularies: tokens are runs of bytes, decoded as UTF-8 as they come."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """For decoders that look at neighbours: decode a short window and keep what is new at its end.

    ids:   … ─ start ───────── read ───────── end
               └ gave text ────┘└ held back ──┘     text(start:end) minus text(start:read) is new
    """

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], prompt_tail: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        seen = tokenizer.decode(prompt_tail)
        # A prompt cut inside a character would shift every later difference.
        self._ids = [] if seen.endswith(_REPLACEMENT) else list(prompt_tail)
        self._read = len(self._ids)
        self._seen = seen if self._ids else ""

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        num_held = len(self._ids) - self._read
        if text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._seen) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._seen = self._tokenizer.decode(self._ids)
        return new


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the text holds a lone surrogate and is not valid Unicode") from None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence":
        return [part.get("type") for part in decoder.get("decoders", ())] == ["ByteLevel"]
    return bool(decoder.get("type") == "ByteLevel")


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of the GPT-2 alphabet: printable Latin-1 stands for itself, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    char_to_byte = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    char_to_byte.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return char_to_byte


def _bytes_of_byte_level(token: str) -> bytes:
    char_to_byte = _byte_level_alphabet()
    try:
        return bytes(char_to_byte[char] for char in token)
    except KeyError:  # an added token, which is written in plain text
        return token.encode()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    name_to_token: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_KEYS:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            name_to_token[name] = token
    return name_to_token


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template is {type(template).__name__}, not text")
    return template
