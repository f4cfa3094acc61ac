"""Where no CUDA device is, Triton kernels run in Triton's interpreter.

Triton decides when a kernel is defined, so the choice is made before any test module imports one.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="module")
def _silent_overflow() -> Iterator[None]:
    """Numbers overflow on a device without a word; the interpreter's numpy would warn."""
    with np.errstate(all="ignore"):
        yield
