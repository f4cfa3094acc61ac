"""The house keeps its own rules, and each rule has teeth."""

import re
import subprocess
import sys
from pathlib import Path

import layout_rules as rules
import pytest
from layout_rules import Rule, module_from_source, read_modules

ROOT = Path(__file__).resolve().parent.parent
LONG_BODY = "\n".join(["    x = 1"] * 61)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    modules = read_modules(ROOT)
    assert {name.partition(".")[0] for name in modules} == set(rules.PACKAGES)
    violations = rule(modules)
    assert not violations, "\n".join(violations)


BAD_HOUSES: list[tuple[Rule, dict[str, str]]] = [
    (rules.direction, {"kernels/a.py": "import kvstore.b"}),
    (rules.direction, {"kvstore/a.py": "def f():\n    from workers.b import c"}),
    (rules.direction, {"workers/a.py": "from cluster import b"}),
    (rules.direction, {"router/a.py": "from workers.engine import Engine"}),
    (rules.direction, {"router/a.py": "import kvstore.block_pool"}),
    (rules.direction, {"router/a.py": "from kvstore import prefix_hash, kv_pool"}),
    (rules.library_homes, {"workers/engine.py": "import ray"}),
    (rules.library_homes, {"router/scoring.py": "from ray import serve"}),
    (rules.library_homes, {"cluster/doctor.py": "import redis.asyncio"}),
    (rules.torch_free, {"router/a.py": "import torch.nn"}),
    (rules.torch_free, {"workers/protocol.py": "from torch import Tensor"}),
    (
        rules.torch_free,
        {
            "router/a.py": "from kvstore.prefix_index.b import c",
            "kvstore/prefix_index/b.py": "from kvstore import pool",
            "kvstore/pool.py": "import torch",
        },
    ),
    (rules.cycles, {"router/a.py": "import router.b", "router/b.py": "from router import a"}),
    (
        rules.cycles,
        {
            "router/a.py": "from router.b import x",
            "router/b.py": "def f():\n    from .c import x",
            "router/c.py": "from . import a",
        },
    ),
    (rules.environment, {"workers/a.py": "import os\nx = os.environ['A']"}),
    (rules.environment, {"cluster/app.py": "from os import getenv"}),
    (rules.environment, {"cluster/app.py": "import os\nos.putenv('A', 'b')"}),
    (rules.names, {"router/utils.py": ""}),
    (rules.names, {"router/common/a.py": ""}),
    (rules.bare_inits, {"router/__init__.py": '"""Doc."""\nx = 1'}),
    (rules.bare_inits, {"router/__init__.py": "x = 1"}),
    (rules.file_sizes, {"router/a.py": "x = 1\n" * 401, "router/b.py": "", "router/c.py": ""}),
    (rules.file_sizes, {"router/a.py": "x = 1\n" * 121}),
    (rules.function_sizes, {"router/a.py": f"def f() -> None:\n{LONG_BODY}"}),
    (rules.function_sizes, {"router/a.py": "def f() -> None:\n" + "    x = 1\n" * 27}),
    (rules.annotations, {"router/a.py": "def f(x) -> None: ..."}),
    (rules.annotations, {"router/a.py": "class A:\n    def f(self, *, x: int): ..."}),
    (rules.annotations, {"router/a.py": "async def f(*args, **kwargs) -> None: ..."}),
]


@pytest.mark.parametrize(
    ("rule", "path_to_source"), BAD_HOUSES, ids=[rule.__name__ for rule, _ in BAD_HOUSES]
)
def test_a_rule_catches(rule: Rule, path_to_source: dict[str, str]) -> None:
    modules = [module_from_source(path, source) for path, source in path_to_source.items()]
    violations = rule({module.name: module for module in modules})
    assert violations
    assert all(line.startswith((*path_to_source, "(all ")) for line in violations)


GOOD_HOUSE = {
    "kernels/__init__.py": '"""Doc."""\nfrom importlib import metadata\nmetadata.version("x")',
    "kernels/attention.py": "import torch\n@triton.jit\ndef kernel(x, y):\n" + LONG_BODY,
    "kvstore/__init__.py": "",
    "kvstore/prefix_hash.py": '"""Doc."""\nimport hashlib',
    "kvstore/prefix_index/redis_store.py": "import redis\nfrom kvstore.prefix_hash import chain",
    "workers/replica.py": "import ray\nfrom kernels import attention",
    "workers/protocol.py": "import os.path\nfrom dataclasses import dataclass",
    "router/ray_router.py": "from ray.serve import x\nfrom kvstore import prefix_hash",
    "router/gateway.py": "import workers.protocol\nfrom router.ray_router import A",
    "cluster/config.py": "import os\nx = os.environ.get('A')\nfrom router import gateway",
    "cluster/app.py": "class A:\n    def f(self, x: int, *y: int) -> None:\n        '''Doc.'''",
}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_lets_a_good_house_stand(rule: Rule) -> None:
    modules = [module_from_source(path, source) for path, source in GOOD_HOUSE.items()]
    assert rule({module.name: module for module in modules}) == []


def test_every_package_is_marked_as_typed() -> None:
    assert [name for name in rules.PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def _run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    setup = "".join(f"import sys; sys.path.insert(0, {str(p)!r})\n" for p in (ROOT, *path))
    return subprocess.run(
        [sys.executable, "-c", setup + code], capture_output=True, text=True, check=False
    )


def test_kernels_refuses_to_share_its_name(tmp_path: Path) -> None:
    metadata = tmp_path / "kernels-0.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    assert _run_python("import kernels").returncode == 0
    beside_namesake = _run_python("import kernels", tmp_path)
    assert beside_namesake.returncode != 0
    assert "ImportError: the PyPI distribution 'kernels' 0.9.0" in beside_namesake.stderr
    assert "pip uninstall kernels" in beside_namesake.stderr


def test_the_engine_runs_where_there_is_only_torch() -> None:
    # None in sys.modules is how Python spells "not installed": the import fails, find_spec says no.
    absent = "import sys\nfor name in ('ray', 'redis', 'pydantic', 'fastapi', 'grpc'):\n"
    result = _run_python(absent + "    sys.modules[name] = None\nimport workers.engine")
    assert result.returncode == 0, result.stderr


def test_the_architecture_page_names_every_file() -> None:
    page = ROOT / "docs" / "architecture.md"
    named = set(re.findall(rf"\b(?:{'|'.join(rules.PACKAGES)})/[\w/]+\.py\b", page.read_text()))
    written = {str(m.path) for m in read_modules(ROOT).values() if not m.is_init}
    assert sorted(written - named) == []
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_no_file_names_a_place_on_this_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    assert files
    here = re.compile(rb"%s(?![\w.-])" % re.escape(str(ROOT)).encode())
    assert [str(f) for f in files if f.is_file() and here.search(f.read_bytes())] == []
