"""Names of a package whose modules are imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package's globals and the module of each name.

    No module directly below the package may have one of the names: it would hide the name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        package[name] = value
        return value

    def names() -> list[str]:
        return sorted({*package, *modules})

    return get, names
