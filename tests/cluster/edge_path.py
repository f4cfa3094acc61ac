"""Lets tests of the commands use the fakes of the Gateway's tests, whichever tests are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "router"))
