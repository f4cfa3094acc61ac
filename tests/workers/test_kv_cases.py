"""Faults that other servers had, as inputs: an engine on a tiny real model over a pool that starts full of NaN."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import pytest
import tiny_models
import torch
from paged_driver import fill_with_nan

from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.options import SchedulerOptions
from workers.protocol import (
    BeamParams,
    EngineEvent,
    GenerateRequest,
    PromptScored,
    ReplicaInfo,
    RequestFailed,
    RequestStarted,
    SamplingParams,
    SequenceFinished,
    TokenLogprobs,
    TokensEmitted,
)

VOCAB = tiny_models.VOCAB_SIZE


@dataclass(frozen=True)
class Told:
    """What one request was told, in a form to compare."""

    events: tuple[EngineEvent, ...]

    @property
    def num_cached(self) -> int:
        return next(e for e in self.events if isinstance(e, RequestStarted)).num_cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        (scored,) = (e for e in self.events if isinstance(e, PromptScored))
        return scored.logprobs

    @property
    def scores(self) -> list[float | None]:
        return [e.score for e in self.events if isinstance(e, SequenceFinished)]

    def output(self, index: int = 0) -> list[int]:
        return [
            token
            for e in self.events
            if isinstance(e, TokensEmitted) and e.index == index
            for token in e.token_ids
        ]

    def logprobs(self) -> list[float]:
        return [
            one.logprob
            for e in self.events
            if isinstance(e, TokensEmitted) and e.logprobs
            for one in e.logprobs
        ]


class Server:
    """An engine without its thread."""

    def __init__(
        self,
        *,
        name: str = "llama_gqa",
        num_blocks: int = 64,
        block_size: int = 16,
        kv_dtype: KvDtype = KvDtype.AUTO,
        **options: object,
    ) -> None:
        model = tiny_models.ours(name)
        spec = model.spec
        layout = KvLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, kv_dtype, model.dtype
        )
        pool = KvPool(layout, num_blocks, torch.device("cpu"))
        fill_with_nan(pool)
        self.info = ReplicaInfo(
            "r", "e", name, "f", block_size, num_blocks, kv_dtype, layout.bytes_per_token,
            "float32", "cpu", 512, VOCAB,
        )  # fmt: skip
        limits = SchedulerOptions(**{"max_model_len": 512, **options})  # type: ignore[arg-type]
        self.engine = Engine(
            ModelRunner(model, pool, torch.device("cpu"), limits), self.info, limits, frozenset({2})
        )
        self._num_requests = 0
        self._told: dict[str, list[EngineEvent]] = {}

    def submit(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        beam: BeamParams | None = None,
        **sampling: object,
    ) -> str:
        self._num_requests += 1
        name = f"q{self._num_requests}"
        packed = pack_tokens(prompt)
        params = SamplingParams(
            max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **sampling}  # type: ignore[arg-type]
        )  # fmt: skip
        request = GenerateRequest(
            name, packed, "f", b"t", chain(root_hash("f", b"t"), packed, self.info.block_size),
            params, n, beam,
        )  # fmt: skip
        told = self._told[name] = []
        self.engine.submit(request, told.extend)
        return name

    def run(self) -> None:
        for _ in range(20_000):
            if not self.engine.step():
                self.engine.check_invariants()
                return
        raise AssertionError("the engine never came to rest")

    def told(self, name: str) -> Told:
        return Told(tuple(self._told[name]))

    def ask(self, prompt: SequenceOf[int], max_tokens: int = 8, **fields: object) -> Told:
        name = self.submit(prompt, max_tokens, **fields)  # type: ignore[arg-type]
        self.run()
        return self.told(name)

    def is_empty(self) -> bool:
        stats = self.engine.report().stats
        return stats.num_used_blocks == 0 and (
            stats.num_free_blocks + stats.num_cached_blocks == self.info.num_blocks
        )


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("chunk", [512, 17])
def test_1_prompt_logprobs_of_a_prompt_sent_twice(chunk: int) -> None:
    server = Server(max_num_batched_tokens=chunk)
    prompt = tokens(117)
    first, second = (server.ask(prompt, prompt_logprobs=2) for _ in range(2))
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 116
    one, two = ([e.logprob for e in t.prompt_logprobs] for t in (first, second))
    assert all(torch.isfinite(torch.tensor(one)))
    assert one == pytest.approx(two, abs=1e-4)
    reference = tiny_models.judged_logits("llama_gqa", tuple(prompt)).log_softmax(-1)
    expected = reference[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert one == pytest.approx(expected.tolist(), abs=1e-4)
    assert second.output() == first.output()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64])
def test_2_lengths_around_block_borders_sent_again_and_longer(length: int, block_size: int) -> None:
    server = Server(block_size=block_size)
    prompt = tokens(length)
    first, second = server.ask(prompt, 2), server.ask(prompt, 2)
    longer = server.ask([*prompt, 5], 2)
    assert first.output() == second.output()
    whole = (length - 1) // block_size * block_size
    assert first.num_cached == 0
    assert whole <= second.num_cached < length
    assert length // block_size * block_size <= longer.num_cached < length + 1


def test_3_a_short_prompt_with_a_longer_answer_twice() -> None:
    server = Server()
    first, second = (server.ask(tokens(5), 15) for _ in range(2))
    assert first.output() == second.output()
    assert second.num_cached == 4  # the answer filled the block in which the prompt lies


def test_4_scored_long_prompt_twice() -> None:
    server = Server()
    first, second = (server.ask(tokens(480), 4, prompt_logprobs=1) for _ in range(2))
    for one, two in zip(first.prompt_logprobs, second.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_5_order_of_prompts_with_a_common_head_does_not_matter() -> None:
    head, a, b = tokens(40), [7, 8, 9], [10, 11]
    results = {}
    for order in ("ab", "ba"):
        server = Server()
        for which in order:
            told = server.ask(head + (a if which == "a" else b), 6)
            results[order, which] = (told.output(), told.logprobs())
    for which in "ab":
        assert results["ab", which][0] == results["ba", which][0]
        assert results["ab", which][1] == pytest.approx(results["ba", which][1], abs=1e-4)


def test_6_sixteen_prompts_with_and_without_the_cache() -> None:
    prompts = [tokens(20 + 13 * i, seed=i % 5) for i in range(16)]
    on, off = Server(), Server(enable_prefix_caching=False)
    for prompt in prompts:
        assert on.ask(prompt).output() == off.ask(prompt).output()


def test_7_twenty_times_one_distinct_output() -> None:
    server = Server(num_blocks=256)
    for shared in (1, 100, 300):
        head = tokens(shared, seed=shared)
        outputs = set()
        for i in range(20):
            for other in range(i % 4):
                server.submit(tokens(5 + 40 * other, seed=other), 10)
            name = server.submit([*head, 4, 5, 6], 10)
            server.run()
            outputs.add(tuple(server.told(name).output()))
        assert len(outputs) == 1


def test_8_the_same_text_at_another_offset_does_not_match() -> None:
    server = Server()
    text = tokens(32)
    server.ask(text, 1)
    shifted = server.ask([9, *text], 4)
    assert shifted.num_cached == 0
    assert shifted.output() == Server().ask([9, *text], 4).output()


def test_9_a_long_prompt_with_a_short_ones_head_under_scaled_rope() -> None:
    """Scaling whose factor depends on the length is refused at load; the static kinds share safely."""
    server, fresh = Server(name="llama_yarn"), Server(name="llama_yarn")
    server.ask(tokens(40), 1)
    long = tokens(40) + tokens(300, seed=1)
    again = server.ask(long, 6)
    assert again.num_cached >= 32
    assert again.output() == fresh.ask(long, 6).output()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_10_four_samples_of_hardly_any_tokens(max_tokens: int) -> None:
    server = Server()
    told = server.ask(tokens(33), max_tokens, n=4, temperature=1.0, seed=3)
    assert told.num_cached == 0
    assert [len(told.output(i)) for i in range(4)] == [max_tokens] * 4
    assert server.ask(tokens(33), max_tokens, n=4).num_cached == 32


def test_11_a_client_of_two_samples_leaves_after_one_step() -> None:
    server = Server()
    name = server.submit(tokens(20), 100, n=2)
    for _ in range(2):
        server.engine.step()
    server.engine.cancel(name)
    server.engine.step()
    assert server.is_empty()


def test_12_a_seed_with_samples_that_differ_and_repeat() -> None:
    server = Server()
    server.ask(tokens(20), 1)
    sets = [server.ask(tokens(20), 8, n=4, temperature=1.0, seed=5) for _ in range(2)]
    samples = [[told.output(i) for i in range(4)] for told in sets]
    assert samples[0] == samples[1]
    assert len({tuple(s) for s in samples[0]}) == 4


@pytest.mark.parametrize("num_blocks", [64, 15])
@pytest.mark.parametrize("case", range(5))
def test_13_beams_equal_transformers_with_and_without_pressure(case: int, num_blocks: int) -> None:
    server = Server(num_blocks=num_blocks, block_size=8)
    prompt = tokens(30, seed=case)
    other = server.submit(tokens(9, seed=99), 70) if num_blocks < 64 else None
    name = server.submit(prompt, 12, n=4, beam=BeamParams(4), ignore_eos=False, logprobs=None)
    server.run()
    told = server.told(name)
    theirs = tiny_models.judge("llama_gqa").generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 30), num_beams=4, do_sample=False,
        num_return_sequences=4, max_new_tokens=12, eos_token_id=2, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    for i in range(4):
        expected, output = theirs.sequences[i, 30:].tolist(), told.output(i)
        assert output == expected[: len(output)]
        assert len(output) == 12 or expected[len(output)] == 2
    assert told.scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    if other is not None:
        assert len(server.told(other).output()) == 70
    assert server.is_empty()


@pytest.mark.parametrize("width", [2, 4, 8])
def test_13_beams_of_fifty_prompts_equal_transformers(width: int) -> None:
    server = Server(num_blocks=256)
    judge = tiny_models.judge("llama_gqa")
    for case in range(50):
        prompt = tokens(1 + case, seed=100 + case)
        told = server.ask(
            prompt, 8, n=width, beam=BeamParams(width), ignore_eos=False, logprobs=None
        )
        theirs = judge.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width,
            do_sample=False, num_return_sequences=width, max_new_tokens=8, eos_token_id=2,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        for i in range(width):
            expected, output = theirs.sequences[i, len(prompt) :].tolist(), told.output(i)
            assert output == expected[: len(output)]
            assert len(output) == 8 or expected[len(output)] == 2
        assert told.scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    assert server.is_empty()


def test_greedy_forks_equal_separate_requests() -> None:
    forked = Server().ask(tokens(21), 12, n=3)
    alone = Server().ask(tokens(21), 12).output()
    assert [forked.output(i) for i in range(3)] == [alone] * 3


def test_the_order_of_arrival_does_not_change_answers() -> None:
    prompts = [tokens(5 + 17 * i, seed=i) for i in range(6)]
    answers = []
    for order in (range(6), reversed(range(6))):
        server = Server(max_num_batched_tokens=40)
        names = {i: server.submit(prompts[i]) for i in order}
        server.run()
        answers.append([server.told(names[i]).output() for i in range(6)])
    assert answers[0] == answers[1]


def test_14_two_samples_share_the_full_block_and_own_the_second() -> None:
    server = Server()
    server.submit(tokens(17), 8, n=2, temperature=1.0, seed=1)
    server.engine.step()
    one, two = (s.table.block_ids for s in server.engine._scheduler._running)
    pool = server.engine._scheduler.memory.pool
    assert one[0] == two[0] and one[1] != two[1]
    assert [pool.ref_count(b) for b in (one[0], one[1], two[1])] == [2, 1, 1]


def test_15_ten_blocks_and_two_requests_of_101_tokens() -> None:
    server = Server(num_blocks=10)
    names = [server.submit(tokens(5, seed=i), 96) for i in range(2)]
    server.run()
    assert server.engine.report().stats.preemptions_total > 0
    for i, name in enumerate(names):
        assert server.told(name).output() == Server().ask(tokens(5, seed=i), 96).output()


def test_16_a_long_answer_preempted_on_its_way() -> None:
    server = Server(num_blocks=34)
    older = server.submit(tokens(40, seed=1), 440)
    name = server.submit(tokens(3), 300)
    server.run()
    assert server.engine.report().stats.preemptions_total > 0
    assert server.told(name).output() == Server().ask(tokens(3), 300).output()
    assert len(server.told(older).output()) == 440


def test_17_larger_than_the_whole_pool() -> None:
    server = Server(num_blocks=4)
    (failure,) = server.ask(tokens(60), 10).events
    assert isinstance(failure, RequestFailed)
    assert failure.code == "context_length_exceeded"
    assert "60 tokens and max_tokens is 10" in failure.message and "64" in failure.message
    assert server.ask(tokens(10), 3).output()


def test_18_many_requests_with_random_cancels() -> None:
    rng = random.Random(4)
    server = Server(num_blocks=24, max_num_seqs=16)
    names = []
    for i in range(250):
        names.append(server.submit(tokens(rng.randrange(1, 60), seed=i % 7), rng.randrange(1, 12)))
        if rng.random() < 0.4:
            server.engine.cancel(rng.choice(names))
        for _ in range(rng.randrange(3)):
            server.engine.step()
    server.run()
    assert server.is_empty()


def test_19_a_sequence_that_ends_on_a_block_border_leaves_no_stale_hash() -> None:
    server = Server(num_blocks=3)
    server.ask(tokens(16), 17)  # 32 computed tokens: two full blocks, and the pool has three
    server.ask(tokens(20, seed=8), 20)
    again = server.ask(tokens(16), 4)
    assert again.output() == Server().ask(tokens(16), 4).output()


@pytest.mark.parametrize("kv_dtype", [KvDtype.AUTO, KvDtype.FP8_E4M3])
def test_20_a_pool_full_of_nan_never_shows(kv_dtype: KvDtype) -> None:
    server = Server(kv_dtype=kv_dtype)
    for length in (1, 16, 17, 100):
        told = server.ask(tokens(length, seed=length), 20)
        assert len(told.output()) == 20
        assert all(torch.isfinite(torch.tensor(told.logprobs())))


@pytest.mark.parametrize("chunk", [1, 15, 16, 17])
def test_21_chunks_do_not_change_the_answer(chunk: int) -> None:
    prompt = tokens(70)
    assert (
        Server(max_num_batched_tokens=chunk).ask(prompt).output() == Server().ask(prompt).output()
    )


def test_22_several_long_prompts_in_one_batch() -> None:
    server = Server(max_num_batched_tokens=64)
    prompts = [tokens(90 + i, seed=i) for i in range(5)]
    names = [server.submit(prompt) for prompt in prompts]
    server.run()
    for name, prompt in zip(names, prompts, strict=True):
        assert server.told(name).output() == Server().ask(prompt).output()


@pytest.mark.parametrize("chunk", [1, 7, 16, 31])
def test_23_prompt_logprobs_across_chunk_borders(chunk: int) -> None:
    prompt = tokens(50)
    whole = Server().ask(prompt, prompt_logprobs=0).prompt_logprobs
    chunked = Server(max_num_batched_tokens=chunk).ask(prompt, prompt_logprobs=0).prompt_logprobs
    assert len(chunked) == 49
    for one, two in zip(whole, chunked, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
