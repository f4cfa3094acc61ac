"""The safetensors files of a model directory, as one map from tensor name to tensor."""

from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.models.spec import read_json_object
from workers.progress import Progress

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STAGE = "loading weights"
_MAX_NAMED = 5


class CheckpointError(ValueError):
    """A checkpoint's tensors are not the ones its config.json promises; the message names them."""


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model: the index's shards, or the single file.

    Raises:
        CheckpointError: there are none, the index is malformed, or a shard it names is missing.
    """
    index = model_dir / _INDEX
    if not index.exists():
        if not (model_dir / _SINGLE).exists():
            raise CheckpointError(f"the model directory has neither {_SINGLE} nor {_INDEX}")
        return [model_dir / _SINGLE]
    name_to_file = read_json_object(index).get("weight_map")
    if not isinstance(name_to_file, dict) or not name_to_file:
        raise CheckpointError(f"{_INDEX} has no weight_map")
    file_names = sorted(set(map(str, name_to_file.values())))
    for file_name in file_names:
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{_INDEX} names {file_name!r}, which is not a plain file name")
        if not (model_dir / file_name).exists():
            raise CheckpointError(f"{_INDEX} names {file_name!r}, which is missing")
    return [model_dir / file_name for file_name in file_names]


class Checkpoint:
    """Open while in its `with` block. Tensors are mapped from disk and read when taken."""

    def __init__(
        self, model_dir: Path, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = weight_files(model_dir)
        self._total_bytes = sum(path.stat().st_size for path in self._files)
        self._done_bytes = 0
        self._name_to_file: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for path in self._files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                self._stack.close()
                raise CheckpointError(f"{path.name} is broken: {error}") from None
            self._name_to_file |= dict.fromkeys(file.keys(), file)
        self._progress(_STAGE, 0, self._total_bytes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        if error is None:
            self._progress(_STAGE, self._total_bytes, self._total_bytes)

    def expect(self, name_to_shape: Mapping[str, tuple[int, ...]], optional: Set[str]) -> None:
        """Checks names and shapes before anything is read.

        Raises:
            CheckpointError: naming the tensors at fault.
        """
        present = self._name_to_file.keys()
        if missing := sorted(name_to_shape.keys() - present):
            raise CheckpointError(f"missing tensors: {_named(missing)}")
        if unexpected := sorted(present - name_to_shape.keys() - optional):
            raise CheckpointError(f"unexpected tensors: {_named(unexpected)}")
        for name, shape in name_to_shape.items():
            found = tuple(self._name_to_file[name].get_slice(name).get_shape())
            if found != shape:
                raise CheckpointError(
                    f"tensor {name} has shape {list(found)}; config.json implies {list(shape)}"
                )

    def take(self, name: str) -> Tensor:
        """The tensor of this name, cast and moved.

        Raises:
            CheckpointError: it does not hold floating-point numbers.
        """
        stored: Tensor = self._name_to_file[name].get_tensor(name)
        if not stored.is_floating_point() or stored.itemsize < torch.float16.itemsize:
            raise CheckpointError(f"tensor {name} holds {stored.dtype}, which is not supported")
        self._done_bytes += stored.nbytes
        self._progress(_STAGE, self._done_bytes, self._total_bytes)
        return stored.to(self._device, self._dtype)


def _named(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
