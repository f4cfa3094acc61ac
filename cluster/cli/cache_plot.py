"""Hit ratio over pool size, as text for a terminal and as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from cluster.cache_status import CacheStatus
from cluster.client import ClientError

_HEIGHT = 10
_STRIDE = 2
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARGIN = 6


def plotted(now: CacheStatus) -> list[str]:
    """Bars, one a scale; the pool as it is stands between the marks of its axis."""
    top = max(0.05, *now.overall.hit_ratios)
    lines = []
    for row in range(_HEIGHT - 1, -1, -1):
        bars = (_cell(ratio / top * _HEIGHT - row) * _STRIDE for ratio in now.overall.hit_ratios)
        is_labelled = row in (0, _HEIGHT // 2, _HEIGHT - 1)
        label = f"{(row + 1) / _HEIGHT * top * 100:.0f}%" if is_labelled else ""
        lines.append(f"{label:>{_MARGIN - 1}} {''.join(bars)}".rstrip())
    return [*lines, _axis(now.scales)]


def _cell(height: float) -> str:
    return _EIGHTHS[round(min(1.0, max(0.0, height)) * 8)]


def _axis(scales: Sequence[float]) -> str:
    """A label under every scale that is a power of two, as far as they do not run into each other."""
    axis = " " * _MARGIN
    for i, scale in enumerate(scales):
        column = _MARGIN + i * _STRIDE
        if scale_name(scale) is not None and len(axis) <= column:
            axis = axis.ljust(column) + f"{scale_name(scale)} "
    return axis.rstrip()


def scale_name(scale: float) -> str | None:
    """`2x`, `1/4x`; None for what is no power of two."""
    if scale >= 1 and scale == int(scale):
        return f"{int(scale)}x"
    if scale < 1 and 1 / scale == int(1 / scale):
        return f"1/{int(1 / scale)}x"
    return None


def save_png(now: CacheStatus, path: Path) -> None:
    """Everybody's curve and each tenant's, with what was measured at the pool as it is.

    Raises:
        ClientError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClientError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    curves = [("all", now.overall), *((tenant.name, tenant) for tenant in now.tenants)]
    for i, (name, curve) in enumerate(curves):
        percents = [100 * ratio for ratio in curve.hit_ratios]
        (line,) = axes.plot(now.scales, percents, label=name, linewidth=2 if i == 0 else 1)
        axes.plot([1], [100 * curve.measured], "o", color=line.get_color())
    axes.set_xscale("log", base=2)
    marks = [scale for scale in now.scales if scale_name(scale)]
    axes.set_xticks(marks, [scale_name(scale) or "" for scale in marks])
    axes.set_xlabel("pool, as a multiple of the present one")
    axes.set_ylabel("block lookups answered, %")
    axes.set_title("Predicted by LRU (lines), measured (dots)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from None
