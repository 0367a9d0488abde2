"""How does a rank, where ``__main__`` is imported afresh, find the function to run?

By its module and qualified name, in a registry that decoration fills: further decorators above
or below then do not matter. What has no such name travels by ``cloudpickle``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddp_utils.ground.errors import StartError
from ddp_utils.start.transport import dumps, loads

__all__ = [
    "Function",
    "Main",
    "file_mentions_ddp",
    "import_main",
    "mentions_ddp",
    "refer_to",
    "register",
    "this_main",
]

MAIN = ("__main__", "__mp_main__")

_registry: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class Function:
    """A function by name, or as the bytes of a ``cloudpickle``."""

    module: str
    qualname: str
    pickled: bytes | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    @property
    def in_main(self) -> bool:
        """Whether the function is defined in the script that was started."""
        return self.pickled is None and self.module in MAIN

    def find(self) -> Callable[..., Any]:
        """Return the function itself, in a rank that has imported its ``__main__``."""
        if self.pickled is not None:
            return loads(self.pickled)  # type: ignore[no-any-return]
        found: Any = sys.modules["__main__"] if self.in_main else _import(self.module)
        if (self._key) in _registry:
            return _registry[self._key]
        for name in self.qualname.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise StartError(
                f"{self} is not there when its module is imported: it is defined under "
                '`if __name__ == "__main__":` or inside something. Move its definition to the top '
                "level of the module; only its call belongs under the guard."
            )
        return found  # type: ignore[no-any-return]

    @property
    def _key(self) -> tuple[str, str]:
        return _key(self.module, self.qualname)


def register(fn: Callable[..., Any]) -> None:
    """Remember ``fn`` under its module and qualified name."""
    _registry[_key(fn.__module__, fn.__qualname__)] = fn


def _key(module: str, qualname: str) -> tuple[str, str]:
    return ("__main__" if module in MAIN else module), qualname


def refer_to(fn: Callable[..., Any]) -> Function:
    """Return how a rank can find ``fn``.

    Raises:
        StartError: ``fn`` has no name that a rank could look up, and cloudpickle is missing.
    """
    module = getattr(fn, "__module__", None) or "__main__"
    qualname = getattr(fn, "__qualname__", type(fn).__qualname__)
    if _can_be_found(module, qualname, fn):
        return Function(module, qualname)
    by_name = this_main() is not None and not isinstance(fn, types.FunctionType)
    if by_name:  # a bound method, a partial, an object to call
        try:
            return Function(module, qualname, dumps(fn))
        except Exception:
            pass  # cloudpickle may do better
    try:
        import cloudpickle
    except ImportError:
        raise StartError(
            f"{qualname} cannot be found again by a rank: it is a lambda, nested in another "
            "function, or typed into a notebook or shell. Define it at the top level of a file, "
            "or install cloudpickle (pip install 'torch-ddp-utils[notebook]')."
        ) from None
    try:
        return Function(module, qualname, cloudpickle.dumps(fn))
    except Exception as error:
        raise StartError(f"{qualname} cannot be sent to the ranks: {error}") from error


def _can_be_found(module: str, qualname: str, fn: Callable[..., Any]) -> bool:
    """Whether its name leads to ``fn`` itself, and not to what it wraps or is a method of."""
    if module in MAIN and this_main() is None:
        return False
    if _registry.get(_key(module, qualname)) is fn:
        return True
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found is fn


def _import(name: str) -> types.ModuleType:
    global importing_main
    importing_main = True  # whoever starts ranks in there has no guard either
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StartError(
            f"module {name!r}, which holds the function to run, cannot be imported in a rank "
            f"({error}); sys.path there is the parent's at the call"
        ) from error
    finally:
        importing_main = False


@dataclass(frozen=True)
class Main:
    """How the started script is imported again: by module name (``python -m``), or by path."""

    module: str | None
    path: str | None

    @property
    def only_runs_others(self) -> bool:
        """Whether it looks like the entry point of a tool, such as pytest, and not a script."""
        if self.module is not None:
            return self.module.endswith(".__main__")
        return self.path is not None and not self.path.endswith(".py")


def this_main() -> Main | None:
    """Return how this process's ``__main__`` is imported, None for a shell, ``-c`` or stdin."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in MAIN:
        return Main(spec.name, None)
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    return Main(None, os.path.abspath(path))


DDP_WORDS = (b"wrap_ddp", b"DistributedDataParallel")


def mentions_ddp(function: Function) -> bool:
    """Whether the script, or the module of the function, looks as if it wrapped a model.

    So does a process that has loaded what wraps one, such as a test's, whose function is the
    plugin's. Only a guess: what follows from it is speed.
    """
    if "ddp_utils.models.wrap" in sys.modules:
        return True
    modules = [sys.modules[name] for name in {"__main__", function.module} & set(sys.modules)]
    paths = [getattr(module, "__file__", None) or "" for module in modules]
    pickled = function.pickled or b""
    return any(word in pickled for word in DDP_WORDS) or any(map(file_mentions_ddp, paths))


def file_mentions_ddp(path: str) -> bool:
    """Whether a Python file looks as if it wrapped a model."""
    if not (path.endswith(".py") and os.path.isfile(path)):
        return False
    with open(path, "rb") as file:
        text = file.read()
    return any(word in text for word in DDP_WORDS)


importing_main = False
"""True while a rank imports ``__main__``: starting ranks then means that the guard is missing."""

_parents_main: types.ModuleType | None = None


def import_main(main: Main) -> None:
    """Run the started script as ``__mp_main__``, and make it this process's ``__main__``.

    Its code runs in the module's own namespace, so that its functions see later changes of it.
    """
    global importing_main, _parents_main
    _parents_main = sys.modules.get("__main__")  # kept: its objects' finalizers are not ours to run
    module = types.ModuleType("__mp_main__")
    if main.module is not None:
        spec = importlib.util.find_spec(main.module)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise StartError(f"the module {main.module!r} that was started cannot be found again")
        code = spec.loader.get_code(main.module)
        module.__spec__, module.__file__ = spec, spec.origin
        module.__package__ = main.module.rpartition(".")[0]
    else:
        assert main.path is not None
        with open(main.path, "rb") as file:
            code = compile(file.read(), main.path, "exec")
        module.__file__ = main.path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    importing_main = True
    try:
        exec(code, module.__dict__)
    finally:
        importing_main = False
