"""What a check of `pando doctor` found."""

from dataclasses import dataclass
from enum import StrEnum

GIB = 2**30


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing; nothing has to be done
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
