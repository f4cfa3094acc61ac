"""Requests as applications send them, in rounds: what one round asks may build on the answers of those before.

Every workload is a generator: it yields the requests of a round, all of them under way at once, and is sent their
outputs. Random text under fixed seeds; whatever two requests have in common, they have because the workload says so.
"""

from array import array
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import numpy as np

from bench.kv_memory.driver import random_tokens

Outputs = list[list[int]]  # of one request, a list for each of its n sequences


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: "array[int]"
    max_tokens: int
    n: int = 1


Workload = Generator[list[Ask], list[Outputs], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload by name; `make` starts it afresh and always alike."""

    name: str
    make: Callable[[], Workload]


def agents(
    num_agents: int,
    num_steps: int = 20,
    num_head_tokens: int = 4096,
    tokens_a_step: tuple[int, int] = (200, 800),
    seed: int = 3,
) -> Workload:
    """Agents with one common head (instructions and tools). At each step an observation is added to everything so
    far, and the answer, a quarter of the step's tokens, is added to that."""
    random = np.random.default_rng(seed)
    head = random_tokens(random, num_head_tokens)
    histories = [head[:] for _ in range(num_agents)]
    for _ in range(num_steps):
        sizes = random.integers(*tokens_a_step, size=num_agents, endpoint=True)
        asks = []
        for history, size in zip(histories, sizes, strict=True):
            num_answer_tokens = int(size) // 4
            history.extend(random_tokens(random, int(size) - num_answer_tokens))
            asks.append(Ask(history[:], num_answer_tokens))
        _extend(histories, (yield asks))


def few_shot(
    num_questions: int = 160, num_head_tokens: int = 1500, rounds: int = 4, seed: int = 4
) -> Workload:
    """Questions of 30–100 tokens behind the same examples; short answers."""
    random = np.random.default_rng(seed)
    head = random_tokens(random, num_head_tokens)
    for _ in range(rounds):
        yield [
            Ask(head + random_tokens(random, int(size)), 8)
            for size in random.integers(30, 100, size=num_questions // rounds, endpoint=True)
        ]


def chats(
    num_chats: int = 24, num_turns: int = 6, num_head_tokens: int = 300, seed: int = 5
) -> Workload:
    """Conversations under one system prompt, all of them a turn a round: 20–150 tokens asked, 50–200 answered."""
    random = np.random.default_rng(seed)
    head = random_tokens(random, num_head_tokens)
    histories = [head[:] for _ in range(num_chats)]
    for _ in range(num_turns):
        asks = []
        for history in histories:
            history.extend(random_tokens(random, int(random.integers(20, 150, endpoint=True))))
            asks.append(Ask(history[:], int(random.integers(50, 200, endpoint=True))))
        _extend(histories, (yield asks))


def tree_of_thought(
    num_problems: int = 8,
    depth: int = 3,
    num_kept: int = 3,
    num_thoughts: int = 5,
    num_problem_tokens: int = 400,
    seed: int = 6,
) -> Workload:
    """Breadth-first search: from each kept node several thoughts of 60 tokens are sampled (one request with n), each
    thought is judged in a request of its own, and some are kept."""
    random = np.random.default_rng(seed)
    judge = random_tokens(random, 40)
    frontiers = [[random_tokens(random, num_problem_tokens)] for _ in range(num_problems)]
    for _ in range(depth):
        nodes = [node for frontier in frontiers for node in frontier]
        answers = yield [Ask(node, 60, num_thoughts) for node in nodes]
        thoughts = [
            [node + array("I", output) for output in outputs]
            for node, outputs in zip(nodes, answers, strict=True)
        ]
        yield [Ask(thought + judge, 3) for siblings in thoughts for thought in siblings]
        start = 0
        for i, frontier in enumerate(frontiers):
            children = [t for siblings in thoughts[start : start + len(frontier)] for t in siblings]
            start += len(frontier)
            kept = random.choice(len(children), size=num_kept, replace=False)
            frontiers[i] = [children[k] for k in sorted(kept)]


def _extend(histories: "list[array[int]]", answers: Iterable[Outputs]) -> None:
    for history, outputs in zip(histories, answers, strict=True):
        history.extend(outputs[0])


SHAPES = (
    Shape("agents", lambda: agents(num_agents=6)),
    Shape("few-shot", few_shot),
    Shape("chats", chats),
    Shape("tree of thought", tree_of_thought),
)
