"""`python -m bench.engine`: Pando's engine beside vLLM and transformers on this machine's CPU.

Each engine runs in a process and an environment of its own, with the same model files, prompts, threads and greedy
sampling. They take turns, task by task; figures are medians over the rounds.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.engine.arm import NOT_BY_DEFAULT, Arm, all_arms
from bench.engine.floors import ModelCost
from bench.engine.measure import Say, Setup, measure_all, num_measurements
from bench.engine.peers import ensure_vllm
from bench.engine.tables import agreement_note, all_tables
from bench.engine.tasks import Sizes
from bench.kv_memory.report import Table, as_text, save
from cluster.config import load_config
from workers.model_store import DEFAULT_MODEL, resolve_model

_QUICK = Sizes(batches=(1, 8), num_decoded=8, prompts=(128, 512))
_QUICK_ROUNDS = 2


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(all_arms())
    parser.add_argument("--out", type=Path, default=Path("out/engine"), help="folder for the files")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a directory or a hub id")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--arms", nargs="+", choices=names, metavar="ARM", help=f"some of {', '.join(names)}"
    )
    parser.add_argument("--quick", action="store_true", help="few and small tasks, two rounds")
    parser.add_argument(
        "--profile", action="store_true", help="only where the time of Pando's steps goes"
    )
    parser.add_argument(
        "--venv-dir",
        type=Path,
        default=_user_cache() / "pando-bench",
        help="for vLLM's environment",
    )
    parser.add_argument("--vllm-python", type=Path, help="an environment that has vLLM already")
    parser.add_argument(
        "--lock", type=Path, help="a file to lock while measuring, shared with others who measure"
    )
    return parser.parse_args(arguments)


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def main(arguments: list[str]) -> int:
    """Tables on stdout and in files, progress on stderr; 1 when an arm failed."""
    options = parse(arguments)
    model_dir = resolve_model(options.model, cache_dir=load_config().model_cache_dir)
    made = {
        "command": " ".join(["python", "-m", "bench.engine", *arguments]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": str(options.threads),
    }
    failures: list[str] = []
    if options.profile:
        from bench.engine.step_profile import profile_tables  # imports the engine: seconds

        tables = profile_tables(_chosen(options), model_dir, options.threads)
    else:
        tables, failures = _compare(options, model_dir)
    for table in tables:
        save(table, options.out, made)
        print(as_text(table), flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"files are in {options.out}", file=sys.stderr)
    return 1 if failures else 0


def _compare(options: argparse.Namespace, model_dir: Path) -> tuple[list[Table], list[str]]:
    arms = _chosen(options)
    sizes = _QUICK if options.quick else Sizes()
    has_vllm = any(arm.engine == "vllm" for arm in arms)
    vllm_python: Path | None = options.vllm_python
    if has_vllm and vllm_python is None:
        vllm_python = ensure_vllm(options.venv_dir, lambda text: print(text, file=sys.stderr))
    options.out.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        settings={"model_dir": str(model_dir), "num_threads": options.threads},
        sizes=sizes,
        num_rounds=_QUICK_ROUNDS if options.quick else options.rounds,
        log_dir=options.out,
        vllm_python=vllm_python,
        lock=options.lock,
    )
    with _progress(num_measurements(arms, setup)) as say:
        results = measure_all(arms, setup, say)
    print(agreement_note(results, arms), file=sys.stderr)
    return all_tables(results, arms, sizes, ModelCost.from_dir(model_dir)), results.failures


def _chosen(options: argparse.Namespace) -> list[Arm]:
    name_to_arm = all_arms()
    names = options.arms or [name for name in name_to_arm if name not in NOT_BY_DEFAULT]
    return [name_to_arm[name] for name in names]


@contextmanager
def _progress(total: int) -> Iterator[Say]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def say(text: str) -> None:
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)
            progress.update(task, description=text, advance=1)

        yield say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
