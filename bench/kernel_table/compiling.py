"""Compiles forms in processes of their own. Not in `__main__`, which spawned processes do not import."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from rich.progress import track

from bench.kernel_table.builds import empty_cache
from bench.kernel_table.forms import forms
from bench.kernel_table.table import Row, build_row


def compiled_rows(indices: list[int], num_processes: int) -> list[Row]:
    """The rows of these forms, compiled by so many processes."""
    # Fresh processes: a forked one would inherit half a Triton.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        rows = pool.map(_row, indices)
        return list(track(rows, "compiling", len(indices), disable=not sys.stderr.isatty()))


def _row(index: int) -> Row:
    """By number, because a form's calls do not travel between processes."""
    with empty_cache():
        return build_row(next(islice(forms(), index, None)))
