"""The house's rules, read off the source by AST. Each rule takes modules and returns its violations.

A violation is one line that starts with the file at fault, so that a failing test says where to look.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from statistics import median

PACKAGES = ("kernels", "kvstore", "workers", "router", "cluster")
MAX_FILE_LINES = 400
MAX_MEDIAN_FILE_LINES = 120
MAX_FUNCTION_LINES = 60
USUAL_FUNCTION_LINES = 26

# What each package may import of the others; a name covers everything under it.
PACKAGE_TO_REACH = {
    "kernels": ("kernels",),
    "kvstore": ("kernels", "kvstore"),
    "workers": ("kernels", "kvstore", "workers"),
    "router": (
        "kvstore.prefix_hash",
        "kvstore.prefix_index",
        "router",
        "workers.errors",
        "workers.protocol",
        "workers.tokenizer",
    ),
    "cluster": PACKAGES,
}
LIBRARY_TO_HOMES = {
    "ray": (
        "cluster",
        "workers.replica",
        "router.ray_router",
        "router.ray_backend",
        "router.gateway",
    ),
    "redis": ("kvstore.prefix_index.redis_store",),
}
TORCH_FREE = (
    "kvstore.prefix_hash",
    "kvstore.prefix_index",
    "router",
    "workers.errors",
    "workers.protocol",
    "workers.tokenizer",
)
ENVIRONMENT_HOME = "cluster.config"
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
BANNED_STEMS = {"common", "helpers", "misc", "util", "utils"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. `name` is its import name; a package's `__init__` has the package's."""

    name: str
    path: PurePosixPath
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


Modules = Mapping[str, Module]
Rule = Callable[[Modules], list[str]]


def module_from_source(path: str, source: str) -> Module:
    parts = PurePosixPath(path).with_suffix("").parts
    return Module(".".join(parts).removesuffix(".__init__"), PurePosixPath(path), source)


def read_modules(root: Path) -> dict[str, Module]:
    """Every hand-written source file of the packages under `root`, by import name."""
    name_to_module = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            if not file.stem.endswith(("_pb2", "_pb2_grpc")):
                path = file.relative_to(root).as_posix()
                module = module_from_source(path, file.read_text(encoding="utf-8"))
                name_to_module[module.name] = module
    return name_to_module


def is_under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def imported_names(module: Module) -> Iterator[str]:
    """Dotted names a module imports, wherever in the file; `from a import b` gives `a.b`."""
    package = module.name if module.is_init else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: Module, modules: Modules) -> set[str]:
    """The modules among `modules` that one imports; an imported attribute stands for its module."""
    found = set()
    for name in imported_names(module):
        owner = name
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        found.add(owner)
    return found - {"", module.name}


def direction(modules: Modules) -> list[str]:
    """kernels ← kvstore ← workers ← cluster; the router sees only hashes, index and messages."""
    return [
        f"{module.path}: imports {name}, out of the reach of {module.name.partition('.')[0]}"
        for module in modules.values()
        for name in sorted(set(imported_names(module)))
        if is_under(name, PACKAGES)
        and not is_under(name, PACKAGE_TO_REACH[module.name.partition(".")[0]])
    ]


def library_homes(modules: Modules) -> list[str]:
    """`ray` and `redis` each only where they live."""
    return [
        f"{module.path}: imports {name}; only {', '.join(homes)} may"
        for module in modules.values()
        for name in sorted(set(imported_names(module)))
        for library, homes in LIBRARY_TO_HOMES.items()
        if is_under(name, (library,)) and not is_under(module.name, homes)
    ]


def torch_free(modules: Modules) -> list[str]:
    """A Gateway never loads torch, not even by way of another module of ours."""
    return [
        f"{module.path}: reaches torch by {' → '.join(way)}"
        for module in modules.values()
        if is_under(module.name, TORCH_FREE)
        for way in [_way_to_torch(module, modules, set())]
        if way
    ]


def _way_to_torch(module: Module, modules: Modules, seen: set[str]) -> list[str]:
    seen.add(module.name)
    if any(is_under(name, ("torch", "triton")) for name in imported_names(module)):
        return [module.name]
    for name in sorted(own_imports(module, modules) - seen):
        way = _way_to_torch(modules[name], modules, seen)
        if way:
            return [module.name, *way]
    return []


def cycles(modules: Modules) -> list[str]:
    """No module imports itself, by whatever way round."""
    name_to_imports = {name: own_imports(module, modules) for name, module in modules.items()}
    num_left = -1
    while num_left != len(name_to_imports):
        num_left = len(name_to_imports)
        imported = set().union(*name_to_imports.values())
        name_to_imports = {
            name: imports & name_to_imports.keys()
            for name, imports in name_to_imports.items()
            if name in imported and imports & name_to_imports.keys()
        }
    return [
        f"{modules[name].path}: in an import cycle, by {', '.join(sorted(imports))}"
        for name, imports in sorted(name_to_imports.items())
    ]


def environment(modules: Modules) -> list[str]:
    """The process environment is read once, in the configuration."""
    return [
        f"{module.path}: touches os.{name}; only {ENVIRONMENT_HOME} may"
        for module in modules.values()
        if module.name != ENVIRONMENT_HOME
        for name in sorted(_environment_uses(module))
    ]


def _environment_uses(module: Module) -> set[str]:
    uses = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    } | {name.removeprefix("os.") for name in imported_names(module) if name.startswith("os.")}
    return uses & ENVIRONMENT_NAMES


def names(modules: Modules) -> list[str]:
    """No drawer for odds and ends."""
    return [
        f"{module.path}: is called '{part}'; name it for what it is about"
        for module in modules.values()
        for part in module.name.split(".")
        if part in BANNED_STEMS
    ]


def bare_inits(modules: Modules) -> list[str]:
    """`__init__` holds a docstring at most; only kernels guards its name there."""
    return [
        f"{module.path}: holds more than a docstring"
        for module in modules.values()
        if module.is_init and module.name != "kernels"
        if module.tree.body[1:] or (module.tree.body and ast.get_docstring(module.tree) is None)
    ]


def file_sizes(modules: Modules) -> list[str]:
    files = [module for module in modules.values() if not module.is_init]
    found = [
        f"{module.path}: {module.num_lines} lines, over {MAX_FILE_LINES}"
        for module in files
        if module.num_lines > MAX_FILE_LINES
    ]
    middle = median([module.num_lines for module in files]) if files else 0
    if middle > MAX_MEDIAN_FILE_LINES:
        found.append(f"(all files): median {middle} lines, over {MAX_MEDIAN_FILE_LINES}")
    return found


def function_lines(function: Function) -> int:
    """Length without the docstring: a contract is no reason to split a function."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def _is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def function_sizes(modules: Modules) -> list[str]:
    """At most 60 lines, nine in ten at most 26; Triton kernel bodies apart."""
    place_to_lines = {
        f"{module.path}:{function.lineno} {function.name}": function_lines(function)
        for module in modules.values()
        for function in module.functions()
        if not _is_kernel(function)
    }
    found = [
        f"{place}: {lines} lines, over {MAX_FUNCTION_LINES}"
        for place, lines in place_to_lines.items()
        if lines > MAX_FUNCTION_LINES
    ]
    long = [place for place, lines in place_to_lines.items() if lines > USUAL_FUNCTION_LINES]
    if len(long) * 10 > len(place_to_lines):
        found.append(
            f"(all functions): {len(long)} of {len(place_to_lines)} have over "
            f"{USUAL_FUNCTION_LINES} lines: {', '.join(long)}"
        )
    return found


def annotations(modules: Modules) -> list[str]:
    """Every argument and every result says its type; `self` and `cls` are known."""
    return [
        f"{module.path}:{function.lineno} {function.name}: no type for {missing}"
        for module in modules.values()
        for function in module.functions()
        if not _is_kernel(function)
        for missing in _untyped(function)
    ]


def _untyped(function: Function) -> list[str]:
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    if positional and positional[0].arg in {"self", "cls"}:
        positional = positional[1:]
    arguments = [*positional, *spec.kwonlyargs, *filter(None, [spec.vararg, spec.kwarg])]
    missing = [argument.arg for argument in arguments if argument.annotation is None]
    return missing if function.returns is not None else [*missing, "its result"]


RULES: tuple[Rule, ...] = (
    direction,
    library_homes,
    torch_free,
    cycles,
    environment,
    names,
    bare_inits,
    file_sizes,
    function_sizes,
    annotations,
)
