"""The measuring end of an arm's process."""

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from bench.engine.arm import Arm, command_of
from bench.engine.arms.loop import Prompts

_STOP_TIMEOUT_S = 30
_LOG_TAIL_CHARS = 2000


class ArmFailed(RuntimeError):
    """An arm's process ended before it answered; the message holds the end of its log."""


class Answer(NamedTuple):
    """What an arm said of one task; `seconds` is its own clock's, between the task read and the answer written."""

    seconds: float
    tokens: list[list[int]]
    peak_rss_bytes: int


class ArmProcess:
    """A running arm. Use it as a context manager.

    Args:
        settings: model_dir and num_threads, for all arms alike.
        log: gets what its libraries print.

    Attributes:
        begin: the clock when it was started.
    """

    def __init__(
        self, arm: Arm, settings: dict[str, Any], log: Path, vllm_python: Path | None = None
    ) -> None:
        self.arm = arm
        self._log = log
        num_threads = str(settings["num_threads"])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": num_threads,
            "MKL_NUM_THREADS": num_threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **arm.environment,
        }
        # A folder without modules of ours: `-c` puts the current one before everything else.
        self._folder = tempfile.TemporaryDirectory()
        self.begin = perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command_of(arm, vllm_python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=self._folder.name,
            )
        self._send({**settings, **arm.settings, "dtype": arm.dtype})

    def __enter__(self) -> "ArmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompts: Prompts, num_tokens: int) -> Answer:
        """Raises ArmFailed when no answer comes."""
        self._send({"prompts": prompts, "num_tokens": num_tokens})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return Answer(**json.loads(line))

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _failure(self) -> ArmFailed:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        return ArmFailed(f"{self.arm.name} gave no answer; its log ends with:\n{tail}")
