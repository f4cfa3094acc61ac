"""What holds for every test: one BLAS thread, repeatable examples in CI, GPU tests only where a GPU is, and
Triton kernels in Triton's interpreter where there is none."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before any test module imports torch, tokenizers or ray: each reads these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Triton reads it once, when it is first imported, which several libraries do on their own. Asked of the system,
# because asking torch takes seconds that most runs of a single test can spare.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# For a first look at a failure: --hypothesis-profile=unshrunk
settings.register_profile(
    "unshrunk", parent=settings.get_profile("local"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device, and say why."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch  # costs seconds, so only when a collected test asks for it

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
