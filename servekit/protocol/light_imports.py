"""Import torch and transformers without the parts that this process does not use.

transformers imports two large parts of torch only to refer to them, and looks through the files of all its models. Half
of the modules of a worker come from that (docs/performance.md, "Start"). `light_imports` changes three things:

- The compiler (`torch._dynamo`, with sympy) is imported when something of it is used. transformers only marks functions
  that it must not look into; until it is imported, these marks do nothing, because nothing is compiled.
- What several processes share a model with (DTensor, FSDP, distributed checkpoints) is left out in a process that
  shares its model with no other one. transformers works without them if torch was built without torch.distributed, so
  in such a process `is_torch_distributed_available` says that it was.
- transformers looks for the names of all its models in their files. It does so twice, because the cache of what it
  found in a folder has 128 places, and there are more than 500 folders; and it divides each file into lines. Here, it
  does so once, and divides what follows the last `__all__`.

Whatever a later version of torch or transformers does in another way is imported as usual.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
# The only part that transformers calls, to index attention masks with tensors.
INDEX_PART = "torch._dynamo._trace_wrapped_higher_order_op"
# The functions with which other modules mark code that the compiler must not compile.
MARKS = ("disable", "allow_in_graph", "assume_constant_result")
IMPORT_UTILS = "transformers.utils.import_utils"


@contextmanager
def light_imports(shares_model: bool = False) -> Iterator[None]:
    """Import torch and transformers, and exclude their objects from garbage collection.

    The modules make a million objects that stay. The collector, which runs after some hundred new objects, would look
    at these again and again, and take a sixth of the time of all imports.

    `shares_model` says that other processes have parts of the same model: then torch.distributed is used. What has been
    imported before stays as it is; the rules also hold for what is imported later.
    """
    sys.meta_path.insert(0, _Finder(shares_model))
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def bare_packages(*names: str) -> Iterator[None]:
    """Import a module, in the block, without running the packages that it is in: only their folders are used.

    Later imports are not affected, and import the packages as usual. Does nothing if they are imported already. If the
    module needs more of its packages, this raises ImportError or AttributeError.
    """
    if names[0] in sys.modules:
        yield
        return
    finder = _BareFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{names[0]}.")]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules that are changed, and leaves all others to the next finder."""

    def __init__(self, shares_model: bool) -> None:
        self._shares_model = shares_model

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == IMPORT_UTILS:
            return _with_loader(name, path, _ImportUtilsLoader, self._shares_model)
        if name == COMPILER:
            return _with_loader(name, path, _CompilerLoader)
        if name.startswith(f"{COMPILER}.") and name != INDEX_PART:
            # Its parts need it, and may be imported by it.
            compiler = sys.modules[COMPILER]
            if isinstance(compiler, _PostponedCompiler):
                compiler.import_now()
                if name in sys.modules:
                    # If the module were there now, Python would run it once more.
                    return importlib.util.spec_from_loader(name, _RunAlready(sys.modules.pop(name)))
        return None


def _with_loader(
    name: str, path: Sequence[str] | None, wrap: Any, *arguments: Any
) -> importlib.machinery.ModuleSpec | None:
    """Return the usual specification of a module, with `wrap(loader, *arguments)` as its loader."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        spec.loader = wrap(spec.loader, *arguments)
    return spec


class _ImportUtilsLoader(importlib.abc.Loader):
    """Loads the module in which transformers keeps what it may import, and changes some of its functions."""

    def __init__(self, loader: Any, shares_model: bool) -> None:
        self._loader, self._shares_model = loader, shares_model

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        if not self._shares_model:
            module.is_torch_distributed_available = lambda: False
        look: Any = getattr(module, "create_import_structure_from_path", None)
        if hasattr(look, "__wrapped__"):
            module.create_import_structure_from_path = lru_cache(maxsize=None)(look.__wrapped__)
        if hasattr(module, "fetch__all__"):
            module.fetch__all__ = _from_last_line(module.fetch__all__)


def _from_last_line(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return `fetch`, which reads the last `__all__` in the text of a module, without what stands before that line."""

    @wraps(fetch)
    def fetch_all(text: str) -> list[str]:
        return fetch(text[text.rfind("\n__all__") + 1 :])

    return fetch_all


class _PostponedCompiler(ModuleType):
    """Stands in for the compiler before it is imported: it has only the marking functions, which do nothing."""

    postponed_loader: Any

    def __getattr__(self, name: str) -> Any:
        """Import the compiler, because another part of it is used; not if Python reads an attribute of any module."""
        if name.startswith("__") or name == "postponed_loader":
            raise AttributeError(name)
        self.import_now()
        return getattr(self, name)

    def import_now(self) -> None:
        """Become the compiler. It stays the same object, to which others may refer."""
        loader = self.postponed_loader
        for name in ("postponed_loader", *MARKS):
            delattr(self, name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on, names are missing in the usual way
        loader.exec_module(self)


class _CompilerLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PostponedCompiler(spec.name)

    def exec_module(self, module: Any) -> None:
        module.postponed_loader = self._loader
        for name in MARKS:
            setattr(module, name, _mark)


class _BareFinder(importlib.abc.MetaPathFinder):
    """Finds packages whose own code is not run."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names or (spec := importlib.machinery.PathFinder.find_spec(name, path)) is None:
            return None
        spec.loader = _NothingToRun()
        return spec


class _NothingToRun(importlib.abc.Loader):
    """Loads a module whose code is not run."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _RunAlready(importlib.abc.Loader):
    """Loads a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _mark(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function as it is. Called with options only, return the decorator that does."""
    return _mark if function is None else function
