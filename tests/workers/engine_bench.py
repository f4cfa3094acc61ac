"""An engine over a pool of token ids, driven step by step."""

from slot_model import SlotRunner, make_info, make_request

from workers.engine import Engine
from workers.options import SchedulerOptions
from workers.protocol import EngineEvent, RequestStarted, SequenceFinished

BLOCK = 4


class Bench:
    """One engine without its thread, and everything each request was told."""

    plans_ahead = False

    def __init__(self, num_blocks: int = 64, **options: int | bool | str) -> None:
        self.runner = SlotRunner(num_blocks, BLOCK)
        info = make_info(num_blocks, BLOCK, options.get("max_model_len", 4096))
        self.engine = Engine(
            self.runner,
            info,
            SchedulerOptions(**options),
            frozenset({49}),
            plans_ahead=self.plans_ahead,
        )  # type: ignore[arg-type]
        self.events: dict[str, list[EngineEvent]] = {}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: object) -> None:
        told = self.events[request_id] = []
        self.engine.submit(make_request(request_id, prompt, max_tokens, **fields), told.extend)  # type: ignore[arg-type]

    def run(self) -> None:
        for _ in range(10_000):
            if not self.engine.step():
                return
            self.engine.check_invariants()
        raise AssertionError("the engine never came to rest")

    def started(self, request_id: str) -> RequestStarted:
        return next(e for e in self.events[request_id] if isinstance(e, RequestStarted))

    def finish(self, request_id: str) -> list[SequenceFinished]:
        return [e for e in self.events[request_id] if isinstance(e, SequenceFinished)]

    @property
    def pool(self) -> tuple[int, int]:
        stats = self.engine.report().stats
        return stats.num_used_blocks, stats.num_free_blocks + stats.num_cached_blocks
