"""The tokenizer against the `tokenizers` library itself and against transformers' own classes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from workers.errors import InvalidRequest
from workers.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_SPECIAL = ["<s>", "</s>"]


def _byte_level() -> BackendTokenizer:
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=_SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat", "你好 你好 😀😀"], trainer)
    return backend


def _byte_fallback() -> BackendTokenizer:
    """As Llama 2's: words after '▁', and a token for each byte that no other token covers."""
    tokens = [
        *_SPECIAL,
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdefgh",
        "▁a",
        "▁b",
    ]
    merges = [("▁", "a"), ("▁", "b")]
    backend = BackendTokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(_SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


BYTE_LEVEL = Tokenizer(_byte_level(), TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
BYTE_FALLBACK = Tokenizer(_byte_fallback())


def _streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5)))
def test_byte_level_stream_joins_to_decode_for_any_ids(ids: list[int]) -> None:
    assert "".join(_streamed(BYTE_LEVEL, ids)) == _byte_level_oracle().decode(ids)


@given(st.text())
def test_byte_level_pieces_are_whole_characters(text: str) -> None:
    pieces = _streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@given(st.text(alphabet="abcd efgh😀你é", min_size=1).filter(lambda t: not t.startswith(" ")))
def test_byte_fallback_pieces_join_to_the_text(text: str) -> None:
    pieces = _streamed(BYTE_FALLBACK, BYTE_FALLBACK.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.text(alphabet="abc 你", max_size=12).filter(lambda t: not t.startswith(" ")),
    st.text(alphabet="abc 你😀", max_size=12),
)
def test_byte_fallback_text_continues_the_prompt(prompt: str, answer: str) -> None:
    ids = BYTE_FALLBACK.encode(prompt + answer)
    prompt_ids = BYTE_FALLBACK.encode(prompt)
    if ids[: len(prompt_ids)] != prompt_ids or not prompt:
        return  # the tokens straddle the boundary, so there is no such continuation
    assert "".join(_streamed(BYTE_FALLBACK, ids[len(prompt_ids) :], prompt_ids)) == answer


@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), max_size=40))
def test_byte_fallback_stream_never_fails_and_never_shows_specials(ids: list[int]) -> None:
    assert "<s>" not in "".join(_streamed(BYTE_FALLBACK, ids))


def test_character_cut_short_is_flushed_once() -> None:
    ids = BYTE_LEVEL.encode("a🦊")[:-1]
    detokenizer = BYTE_LEVEL.detokenizer()
    assert "".join(detokenizer.push(i) for i in ids) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_invalid_bytes_are_not_held_back_for_ever() -> None:
    lead_byte = BYTE_FALLBACK.encode("é")[-2]
    pieces = _streamed(BYTE_FALLBACK, [lead_byte] * 100)[:-1]
    assert sum(map(len, pieces)) > 80


def test_token_bytes_join_to_the_text() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode("a b 你😀")
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode().strip() == "a b 你😀"
    assert BYTE_LEVEL.token_bytes(0) == b"<s>"
    assert BYTE_LEVEL.token_bytes(10**6) == b""


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTE_LEVEL.encode("\ud800")


def test_chat_equals_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), bos_token="<s>", eos_token="</s>"
    )
    oracle.chat_template = TEMPLATE
    oracle.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "你好 <s> the cat"},
    ]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.render_chat(messages, allow_special_tokens=True) == expected
    assert ours.render_chat(messages) != expected
    assert (ours.bos_token_id, ours.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert ours.vocab_size == len(oracle)
    assert ours.encode("the cat") == oracle.encode("the cat")


def test_template_that_refuses_is_a_bad_request() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Tokenizer(_byte_level(), template).render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(_byte_level()).render_chat([{"role": "user", "content": "x"}])


def test_template_cannot_leave_the_sandbox() -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        Tokenizer(_byte_level(), template).render_chat([{"role": "user", "content": "x"}])


def test_directory_forms(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    _byte_level().save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer.from_directory(tmp_path).has_chat_template
    config = {
        "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": "hi"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "x"}])) == "hi"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.render_chat([])) == "from its own file"


def test_a_gateway_needs_no_torch() -> None:
    modules = "workers.tokenizer, router.http_api.app, router.grpc_api"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _byte_level_oracle() -> BackendTokenizer:
    return BYTE_LEVEL._backend
