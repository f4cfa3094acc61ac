"""One copy from host to device for all the small arrays of a step."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 16


class StagingBuffer:
    """Arrays put in lie one after another in one buffer, so that one copy brings them all to the device.

    On a CUDA device two page-locked host buffers take turns: the copy of one step may still run while the
    next step's arrays are put in. Before the step after that, the first must have ended. What `put` returns
    keeps its address from step to step as long as sizes and order of what is put are the same, which a
    captured graph relies on. On a CPU host and device buffer are one.

    Args:
        num_bytes: the most that one step puts in.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            for _ in range(2 if is_cuda else 1)
        ]
        self._device = (
            torch.empty(num_bytes, dtype=torch.uint8, device=device) if is_cuda else self._hosts[0]
        )
        self._turn = 0
        self._host_bytes = self._hosts[0].numpy()
        self._end = 0

    def begin(self) -> None:
        """A new step; what the last one put is gone."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._host_bytes = self._hosts[self._turn].numpy()
        self._end = 0

    def put(self, array: NDArray[np.generic]) -> Tensor:
        """The array's place on the device; its numbers are there after `flush`."""
        start = -(-self._end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._end = start + array.nbytes
        assert self._end <= len(self._host_bytes), "more than the buffer was made for"
        self._host_bytes[start : self._end].view(array.dtype)[:] = array.reshape(-1)
        dtype = _numpy_to_torch[array.dtype]
        return self._device[start : self._end].view(dtype).view(array.shape)

    def flush(self) -> None:
        """Send what was put; does not wait for it."""
        host = self._hosts[self._turn]
        if host is not self._device:
            self._device[: self._end].copy_(host[: self._end], non_blocking=True)


_numpy_to_torch = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
