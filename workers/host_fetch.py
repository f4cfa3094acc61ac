"""From the device back to the host without holding up what was launched since."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostFetch:
    """Copies of small tensors on their way to the host; on a CPU the tensors themselves.

    Reading a CUDA tensor directly would wait for all that its stream has been given, the next step included.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._hosts = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._hosts = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in the order in which they were given."""
        if self._event is not None:
            self._event.synchronize()
        return self._hosts
