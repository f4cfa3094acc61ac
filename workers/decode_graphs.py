"""Decode steps captured once for each batch size and replayed: a launch costs the host the same for any model.

A captured step reads its inputs where the staging buffer puts them, at the same addresses for equal sizes, and
block tables from the rows that are always on the device. Rows that stand for no sequence fill the batch up.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.device_batch import DeviceBatch
from workers.step_inputs import InputBuilder, StepInputs

# Padding to the next size costs a step at most half of its rows again, which weigh little where weights rule.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Compute = Callable[[], Tensor]


class Captured(Protocol):
    """A computation bound to its inputs' addresses."""

    def replay(self) -> Tensor:
        """Compute again from what stands at those addresses; the result is overwritten by the next replay."""
        ...


Capture = Callable[[Compute], Captured]
# Token ids, positions and batch of a step → logits, one row a sequence.
Step = Callable[[StepInputs, AttentionBatch], Tensor]


class CudaGraphs:
    """Captures computations as CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> "CudaGraph":
        # What is compiled or allocated at a first call must not happen under capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = compute()
        return CudaGraph(graph, output)


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class DecodeGraphs:
    """The captured decode steps of one runner.

    Args:
        compute: the step to capture.
        max_num_seqs: the largest batch.
        max_model_len: launches are sized for it, whatever the contexts are.
    """

    def __init__(
        self,
        compute: Step,
        inputs: InputBuilder,
        capture: Capture,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._inputs = inputs
        self._max_model_len = max_model_len
        sizes = [size for size in _SIZES if size < max_num_seqs]
        self._sizes = [*sizes, max_num_seqs] if max_num_seqs <= _SIZES[-1] else sizes
        self._size_to_captured = {
            size: self._capture(compute, capture, size) for size in reversed(self._sizes)
        }

    def _capture(self, compute: Step, capture: Capture, size: int) -> Captured:
        """Largest first, so that the smaller ones find their memory in its pool."""
        inputs = self._inputs.build((), size)
        self._inputs.send()
        return capture(lambda: compute(inputs, self._batch(inputs, size)))

    def _batch(self, inputs: StepInputs, size: int) -> AttentionBatch:
        tables = self._inputs.tables.index_select(0, inputs.places)
        batch = AttentionBatch(
            slots=inputs.slots,
            block_tables=tables,
            query_starts=tuple(range(size + 1)),
            context_lens=(1,) * size,  # of no meaning: kernels read those on the device
            block_size=self._inputs.block_size,
        )
        batch.memo[DeviceBatch] = DeviceBatch(
            slots=inputs.slots,
            block_tables=tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            max_query_len=1,
            max_context_len=self._max_model_len,
            block_size=self._inputs.block_size,
        )
        return batch

    def size_for(self, num_rows: int) -> int | None:
        """The padded size for so many decoding rows; None: more than was captured."""
        return next((size for size in self._sizes if size >= num_rows), None)

    def replay(self, size: int) -> Tensor:
        """Logits [size, vocab_size] of the inputs that were sent; rows of padding hold anything."""
        return self._size_to_captured[size].replay()
