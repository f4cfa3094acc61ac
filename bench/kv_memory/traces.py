"""Public request traces (Mooncake, FAST'25) as paths of block ids.

A line holds `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: one id for each block of 512
tokens, equal where the whole prefix up to there is equal. The files are read where they lie.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time; each is the path of its blocks, root first."""

    name: str
    paths: tuple[tuple[int, ...], ...]

    @property
    def num_references(self) -> int:
        return sum(len(path) for path in self.paths)

    @property
    def num_distinct(self) -> int:
        return len({block for path in self.paths for block in path})


def find_traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl.gz"))


def load_trace(path: Path) -> Trace:
    """Read one gzip file of JSON lines.

    Raises:
        ValueError: a line is too long, or a field is missing or no list of block ids.
    """
    rows: list[tuple[int, tuple[int, ...]]] = []
    with gzip.open(path, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path.name}: line {number} is over {MAX_LINE_BYTES} bytes")
            try:
                row = json.loads(line)
                ids = tuple(int(block) for block in row["hash_ids"])
                rows.append((int(row["timestamp"]), ids))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}: line {number}: {error!r}") from error
    rows.sort(key=lambda row: row[0])
    return Trace(path.name.split("_trace")[0].split(".")[0], tuple(ids for _, ids in rows))
