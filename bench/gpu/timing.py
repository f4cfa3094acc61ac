"""How long calls take on a device: events and graph replays on a GPU, a clock on a CPU."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

Call = Callable[[], object]
# A round shorter than this says more about the clock than about the call.
_MIN_ROUND_S = 0.02
_MAX_REPEATS = 200


class Timer:
    """Times calls on one device.

    Args:
        num_rounds: the median is over so many.

    Attributes:
        was_captured: whether the last calls were replayed as one graph, which leaves the host's launches out.
    """

    def __init__(self, device: torch.device, num_rounds: int = 7) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_rounds = num_rounds
        self.was_captured = False

    def seconds(self, calls: Sequence[Call], *, can_capture: bool = True) -> float:
        """The median time of one call.

        Args:
            calls: of equal work on different memory, together more than the caches hold; run in turn.
            can_capture: False for calls that bring something from the host to the device.
        """
        run = self._as_one(calls, can_capture and self._is_cuda)
        times = [self._round_s(run, 1)]
        num_repeats = min(max(1, round(_MIN_ROUND_S / max(times[0], 1e-9))), _MAX_REPEATS)
        if num_repeats > 1:
            times = []
        while len(times) < self._num_rounds:
            times.append(self._round_s(run, num_repeats))
        return median(times) / (num_repeats * len(calls))

    def _as_one(self, calls: Sequence[Call], can_capture: bool) -> Call:
        def run() -> None:
            for call in calls:
                call()

        self.was_captured = False
        run()  # compiles, and allocates what is kept
        if not can_capture:
            return run
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:  # an operation that waits for the host cannot be captured
            print(f"timed without a graph: {error}", flush=True)
            torch.cuda.synchronize()
            return run
        self.was_captured = True
        return graph.replay

    def _round_s(self, run: Call, num_repeats: int) -> float:
        if not self._is_cuda:
            begin_s = perf_counter()
            for _ in range(num_repeats):
                run()
            return perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_repeats):
            run()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000
