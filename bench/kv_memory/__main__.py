"""`python -m bench.kv_memory`: every table of what KV memory costs and saves, on this machine's CPU."""

import argparse
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from bench.kv_memory import hit_rates, overhead, sharing, trace_replay, tree_cost, waste
from bench.kv_memory.report import Table, as_text, save
from bench.kv_memory.traces import find_traces, load_trace

Part = Callable[[], Iterable[Table]]
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

NAME_TO_PART: dict[str, Part] = {
    "waste": lambda: [waste.table()],
    "sharing": sharing.tables,
    "workloads": lambda: [hit_rates.agent_table(), hit_rates.workload_table()],
    "overhead": lambda: [overhead.table()],
    "tree": lambda: [tree_cost.cost_table(tree_cost.NODE_COUNTS)],
}


def real_parts(model: str) -> dict[str, Part]:
    """The parts that compute with a model, which is fetched when it is not here yet."""
    import torch

    from bench.kv_memory import partial_copy, real_beams
    from cluster.config import load_config
    from workers.model_store import resolve_model

    model_dir = resolve_model(model, cache_dir=load_config().model_cache_dir)
    print(f"torch uses {torch.get_num_threads()} threads", file=sys.stderr)
    return {
        "partial-copy": lambda: [partial_copy.table(model_dir)],
        "real-beams": lambda: [real_beams.table(model_dir)],
    }


def trace_part(folder: Path) -> dict[str, Part]:
    """Eviction policies on the request traces in `folder`."""
    return {
        "traces": lambda: (
            trace_replay.replay_all(load_trace(path), trace_replay.SHARES)
            for path in find_traces(folder)
        )
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_memory", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out/kv_memory"), help="folder for the files"
    )
    parser.add_argument(
        "--real", action="store_true", help="also compute with a real model (minutes)"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="which one, with --real")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="also replay the *.jsonl.gz in it (minutes)"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts of all")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the parts one after the other; tables on stdout, progress on stderr."""
    options = parse(arguments)
    name_to_part = dict(NAME_TO_PART)
    if options.real:
        name_to_part |= real_parts(options.model)
    if options.traces is not None:
        name_to_part |= trace_part(options.traces)
    names = options.only or list(name_to_part)
    unknown = [name for name in names if name not in name_to_part]
    if unknown:
        print(f"unknown part {unknown[0]!r}; there are {', '.join(name_to_part)}", file=sys.stderr)
        return 2
    made = {
        "command": " ".join(["python", "-m", "bench.kv_memory", *arguments]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} …", file=sys.stderr, flush=True)
        begun_s = perf_counter()
        for table in name_to_part[name]():
            save(table, options.out, made)
            print(as_text(table), flush=True)
        print(f"[{number}/{len(names)}] {name} {perf_counter() - begun_s:.0f} s", file=sys.stderr)
    print(f"files are in {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
