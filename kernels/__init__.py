"""Device code: each operation as a plain torch twin, and a faster form for the devices that have one.

Raises:
    ImportError: the Hugging Face distribution that is also called `kernels` is installed.
        Both would answer to the same import name, and whichever came first on the path
        would silently replace the other.
"""

from importlib import metadata as _metadata


def _refuse_namesake() -> None:
    try:
        version = _metadata.version("kernels")
    except _metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the PyPI distribution 'kernels' {version} is installed and shares its import name with "
        "Pando's device code; remove it with: pip uninstall kernels"
    )


_refuse_namesake()
