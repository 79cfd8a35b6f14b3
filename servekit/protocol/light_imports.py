"""Import torch and transformers without the parts that this process does not use.

transformers imports two large parts of torch only to refer to them, and looks through the files of all its models. Half
of the modules of a worker come from that (docs/performance.md, "Start"). `light_imports` changes four things:

- The compiler (`torch._dynamo`) is imported when something of it is used. transformers only marks functions that it
  must not look into; until it is imported, these marks do nothing, because nothing is compiled. And ranks that connect
  clear what its rules for tracing have cached; until then, they have cached nothing.
- So is sympy, with torch's part for symbolic sizes. Each model is built on the device meta first. There, torch asks
  these modules whether a number or a condition is symbolic, and only what is compiled can be.
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
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce, wraps
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
# The parts that are used without the others: by transformers, to index attention masks with tensors; and by DTensor,
# which computes the shapes of what a rank holds, and reads there how.
SMALL_PARTS = ("torch._dynamo._trace_wrapped_higher_order_op", "torch._dynamo.config")
# The functions with which other modules mark code that the compiler must not compile.
MARKS = ("disable", "allow_in_graph", "assume_constant_result")
SYMBOLS = "sympy"
SYMBOLIC_SIZES = "torch.fx.experimental.symbolic_shapes"
# What its functions answer for numbers, conditions and shapes that are not symbolic.
ANSWERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "statically_known_true", "guarding_hint_or_throw"), lambda value, *_: value),
    **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious"), lambda condition: condition),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_eq": lambda one, other: one == other,
    "sym_and": lambda *conditions: reduce(operator.and_, conditions),
    "sym_or": lambda *conditions: reduce(operator.or_, conditions),
}
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
    """Finds the modules that are changed or postponed, and leaves all others to the next finder."""

    def __init__(self, shares_model: bool) -> None:
        self._shares_model = shares_model

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == IMPORT_UTILS:
            return _with_loader(name, path, _ImportUtilsLoader, self._shares_model)
        compiler = sys.modules.get(COMPILER)
        if name in POSTPONED and (compiler is None or isinstance(compiler, _PostponedModule)):
            return _with_loader(name, path, _PostponingLoader, POSTPONED[name])
        package = next((each for each in POSTPONED if name.startswith(f"{each}.")), None)
        if package is not None and name not in SMALL_PARTS:
            # Its parts need it, and may be imported by it.
            module = sys.modules[package]
            if isinstance(module, _PostponedModule):
                module.import_now()
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


class _PostponedModule(ModuleType):
    """Stands in for a module before it is imported: it has only replacements for the names that are used until then."""

    postponed_loader: Any
    postponed_names: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Import the module, because another part of it is used; not if Python reads an attribute of any module."""
        if name.startswith("postponed_") or (name.startswith("__") and name != "__version__"):
            raise AttributeError(name)
        self.import_now()
        return getattr(self, name)

    def import_now(self) -> None:
        """Become the module. It stays the same object, to which others may refer."""
        if self.__name__ == COMPILER:  # what it compiles is symbolic, so it finds no stand-ins
            for name in (SYMBOLS, SYMBOLIC_SIZES):
                module = sys.modules.get(name)
                if isinstance(module, _PostponedModule):
                    module.import_now()
            if not isinstance(self, _PostponedModule):
                return  # one of them has imported it
        loader = self.postponed_loader
        for name in ("postponed_loader", *self.postponed_names, "postponed_names"):
            delattr(self, name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on, names are missing in the usual way
        loader.exec_module(self)


class _PostponingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, names: Mapping[str, Any]) -> None:
        self._loader, self._names = loader, names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PostponedModule(spec.name)

    def exec_module(self, module: Any) -> None:
        module.postponed_loader, module.postponed_names = self._loader, self._names
        for name, value in self._names.items():
            setattr(module, name, value)


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


def _unless_symbolic(name: str) -> Callable[..., Any]:
    """Return the function `name` of SYMBOLIC_SIZES, which imports that module if it needs it for its answer."""

    def answer(*values: Any, **options: Any) -> Any:
        if not options and all(map(_is_plain, values)):
            return ANSWERS[name](*values)
        module: Any = sys.modules[SYMBOLIC_SIZES]
        if isinstance(module, _PostponedModule):
            module.import_now()
        return getattr(module, name)(*values, **options)

    return answer


def _is_plain(value: Any) -> bool:
    """Return whether it is a number, a condition, or a shape, and nothing of it is symbolic."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else type(value) in (bool, int)


class _Expression:
    """Stands for sympy's class of expressions, of which there are none before sympy is imported."""


class _TraceRules:
    """Stands for the compiler's rules for tracing. They are imported when anything else of them is used."""

    def clear_lru_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        module: Any = sys.modules[COMPILER]
        if isinstance(module, _PostponedModule):
            module.import_now()
        return getattr(module.trace_rules, name)


# The modules that are imported when something of them is used, each with what stands in until then.
POSTPONED: Mapping[str, Mapping[str, Any]] = {
    COMPILER: {**dict.fromkeys(MARKS, _mark), "trace_rules": _TraceRules()},
    SYMBOLS: {"Basic": _Expression},
    SYMBOLIC_SIZES: {name: _unless_symbolic(name) for name in ANSWERS},
}
