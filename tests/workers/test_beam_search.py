"""The pure search against transformers' own, on tiny random models: sequences and scores."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers.beam_search import BeamSearch, FinishedBeam, Offer
from workers.protocol import BeamParams

VOCAB = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.9,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def search(
    model: LlamaForCausalLM,
    prompt: list[int],
    params: BeamParams,
    stops: frozenset[int],
    max_tokens: int,
) -> list[FinishedBeam]:
    """The whole sequence computed anew at every step: no cache, no paging."""
    beams = BeamSearch(params, stops, max_tokens)
    outputs: list[list[int]] = [[]]
    while not beams.is_done:
        tokens = torch.tensor([prompt + output for output in outputs])
        logprobs = model(tokens).logits[:, -1].float().log_softmax(-1)
        values, ids = logprobs.topk(min(VOCAB, beams.num_candidates))
        offers = [
            [Offer(t, v) for t, v in zip(row_ids, row, strict=True)]
            for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
        survivors = beams.advance(outputs, offers)
        outputs = [[*outputs[s.parent], s.token_id] for s in survivors]
    return beams.results(params.width)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early_stopping", [True, False, None])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
def test_beams_equal_transformers(
    model: LlamaForCausalLM, width: int, early_stopping: bool | None, length_penalty: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    for case in range(5):
        length = 1 + case * 7
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        stops = frozenset([1, 2][: 1 + case % 2])
        ours = search(model, prompt, BeamParams(width, length_penalty, early_stopping), stops, 12)
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, length), num_beams=width,
            num_return_sequences=width, max_new_tokens=12, do_sample=False, eos_token_id=sorted(stops),
            pad_token_id=VOCAB - 1, early_stopping="never" if early_stopping is None else early_stopping,
            length_penalty=length_penalty, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        for beam, row, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
            generated = row[length:].tolist()
            expected = [
                *beam.tokens,
                *([next(t for t in generated if t in stops)] if beam.is_stopped else []),
            ]
            assert generated[: len(expected)] == expected
            assert set(generated[len(expected) :]) <= {VOCAB - 1}
            assert beam.score == pytest.approx(float(score), abs=2e-4)


def test_stop_tokens_wait_for_the_minimum() -> None:
    beams = BeamSearch(BeamParams(2), frozenset([1]), max_tokens=4, min_tokens=2)
    offers = [Offer(1, -0.1), Offer(2, -1.0), Offer(3, -2.0), Offer(4, -3.0)]
    survivors = beams.advance([[]], [offers])
    assert [s.token_id for s in survivors] == [2, 3]
