"""What every arm does: read a task as a line of JSON, do it, answer with a line of JSON.

Runs in the peers' environments too, so it needs the standard library alone, and stdout belongs to the answers:
whatever a library prints goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
# (prompts, tokens to generate for each) → the tokens of each.
Generate = Callable[[Prompts, int], list[list[int]]]


def serve(make: Callable[[dict[str, Any]], Generate]) -> None:
    """Answer tasks until stdin ends. The first line holds the arm's settings, the others are tasks.

    A task {"prompts": …, "num_tokens": …} is answered with {"seconds", "tokens", "peak_rss_bytes"}. Generation
    is greedy and goes on past an end-of-sequence token.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # also for what compiled code prints
    settings = json.loads(sys.stdin.readline())
    generate = make(settings)
    for line in sys.stdin:
        task = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(task["prompts"], task["num_tokens"])
        seconds = time.perf_counter() - begin
        counts = {len(each) for each in tokens}
        assert counts == {task["num_tokens"]}, f"{counts} tokens instead of {task['num_tokens']}"
        answer = {"seconds": seconds, "tokens": tokens, "peak_rss_bytes": peak_rss_bytes()}
        answers.write(json.dumps(answer) + "\n")


def peak_rss_bytes(proc: Path = Path("/proc")) -> int:
    """The most memory this process and its living children held, each at its own worst moment.

    Pages that processes share count once for each; libraries are most of those.
    """
    if not (proc / "self").exists():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return sum(_high_water_bytes(proc / str(pid)) for pid in _family(os.getpid(), proc))


def _family(pid: int, proc: Path) -> list[int]:
    members = [pid]
    for task in (proc / str(pid) / "task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread is gone
            continue
        for child in children:
            members += _family(int(child), proc)
    return members


def _high_water_bytes(process: Path) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
