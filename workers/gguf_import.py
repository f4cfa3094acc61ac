"""Turns a `.gguf` file into a directory of config.json, bf16 safetensors and tokenizer files, once."""

import json
import shutil
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from filelock import FileLock

from workers.progress import Progress

_STAGE = "converting gguf"


class GgufError(ValueError):
    """A `.gguf` file that cannot be converted."""


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> Path:
    """`target`, holding the converted model. Nothing is done when it exists already.

    Quantized weights are unpacked to bfloat16. Two processes that ask at once convert once: the second
    waits. `target` appears whole or not at all.

    Raises:
        GgufError: not a GGUF file, or one that transformers cannot read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise GgufError(f"{gguf.name} is not a GGUF file")
        total_bytes = gguf.stat().st_size
        progress(_STAGE, 0, total_bytes)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
        try:
            _write_model(gguf, partial)
            partial.chmod(0o755)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        progress(_STAGE, total_bytes, total_bytes)
    return target


def _write_model(gguf: Path, directory: Path) -> None:
    # transformers takes seconds to import, and only a conversion needs it.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with redirect_stderr(StringIO()):  # bars of its own; whoever gave us `progress` draws
        try:
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(**source)
        except (ValueError, KeyError, NotImplementedError, OSError) as error:
            raise GgufError(f"{gguf.name} cannot be converted: {error}") from error
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    _forget_quantization(directory / "config.json")


def _forget_quantization(config_path: Path) -> None:
    """The weights are plain now, whatever the file they came from said."""
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
