"""A GPU that is not there: tensors that say they are on it, computed on the CPU, and complain when they are waited for.

For tests of what a launch does on machines without a GPU. What waits on a real one raises `Waits` here: to ask for a
value (item, tolist, bool, nonzero, a boolean index), a copy that is not asynchronous or not out of or into pinned
memory, an operand or an index that stands on the host. Copies to the host arrive when an event behind them is waited
for, and not before; whoever reads them earlier reads nonsense.

What it cannot see: whatever is no operation of torch. Kernels in Triton, what libraries do on their own (a workspace
that is allocated, a first call), the driver's waiting when memory is taken or given back, and the allocator's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
NONSENSE = 77
# What looks at values, and gives a number of things that depends on them.
ASKING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select"),
    *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc", "allclose"),
}
COPYING = {"to", "_to_copy", "copy_", "copy"}


class Waits(Exception):
    """Something waits for the device, within a launch."""


class OnGpu(torch.Tensor):
    """A tensor there; `inner` has its numbers. To torch's own code it is one of the CPU: only ours asks by name."""

    inner: Tensor
    gpu: SimulatedGpu
    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: SimulatedGpu) -> OnGpu:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: OnGpu = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout)  # type: ignore[attr-defined]
        made.inner, made.gpu = inner, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        (gpu, *_) = (each.gpu for each in tree_leaves((args, kwargs)) if isinstance(each, OnGpu))
        return gpu.compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        self.gpu.wait_in_secret("tolist")
        return self.inner.tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        self.gpu.wait_in_secret("cpu")
        return self.inner.clone()

    numpy = __array__ = tolist  # type: ignore[assignment]


class SimulatedGpu(TorchDispatchMode):
    """While it is entered, tensors may be made on it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_launching = False
        self._is_decomposing = False
        self.num_launched = 0  # copies to the host, and events
        self.waits: list[int] = []  # which of them was waited for within a launch
        self._pinned: dict[int, Tensor] = {}  # by address, all there ever were: none may be taken for another
        self._on_their_way: deque[tuple[int, Tensor, Tensor]] = deque()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within it nobody may wait."""
        self.is_launching = True
        try:
            with self:
                yield
        finally:
            self.is_launching = False

    def wait_in_secret(self, what: str) -> None:
        if self.is_launching:
            raise Waits(what)
        self.arrive(self.num_launched)

    def arrive(self, place: int) -> None:
        """All copies to the host that were launched before that."""
        while self._on_their_way and self._on_their_way[0][0] < place:
            _, target, numbers = self._on_their_way.popleft()
            with torch.inference_mode():
                target.copy_(numbers)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_here = not any(isinstance(each, OnGpu) for each in tensors)
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if name in COPYING and (copied := self._copied(func, named)) is not None:
            return copied
        goes_there = str(named.get("device") or "").startswith("cuda")
        if is_here and not goes_there:
            return self._on_host(func, args, kwargs)
        if not is_here:
            self._check(name, tensors, named)
        is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        if is_composite and not goes_there and "scaled_dot_product" not in name:
            with self._decomposing(), self:
                return func.decompose(*args, **kwargs)
        there = {id(each.inner): each for each in tensors if isinstance(each, OnGpu)}
        output = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

        def bring(each: Any) -> Any:
            """What is done in place gives the tensor that it was given."""
            if not isinstance(each, Tensor):
                return each
            return there[id(each)] if id(each) in there else OnGpu(each, self)

        return tree_map(bring, output)

    @contextmanager
    def _decomposing(self) -> Iterator[None]:
        """Within it torch's own code names the device of a tensor that it has, and takes it for the CPU."""
        before, self._is_decomposing = self._is_decomposing, True
        try:
            yield
        finally:
            self._is_decomposing = before

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self._pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check(self, name: str, tensors: list[Tensor], named: dict[str, Any]) -> None:
        if name in ASKING or (name == "repeat_interleave" and named.get("output_size") is None):
            self.wait_in_secret(name)
        indices = [each for each in tree_leaves(named.get("indices")) if isinstance(each, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.wait_in_secret(f"{name} with a mask")
        # A single number of the host's is an argument like any other.
        if any(not isinstance(each, OnGpu) and each.dim() for each in tensors):
            self.wait_in_secret(f"{name} with an operand on the host")

    def _copied(self, func: Any, named: dict[str, Any]) -> Any:
        """From one side to the other. None if it stays where it is."""
        is_there = isinstance(source := named.get("src", named["self"]), OnGpu)
        if "src" in named:
            target = named["self"]
            if isinstance(target, OnGpu) == is_there or not (is_there or source.dim()):
                return None
        else:
            wanted = CUDA if isinstance(named.get("other"), OnGpu) else named.get("device")
            if wanted is None or self._is_decomposing or (torch.device(wanted).type == "cuda") == is_there:
                return None
            target = torch.empty(source.shape, dtype=named.get("dtype") or source.dtype)
            if is_there and named.get("non_blocking"):
                self._pin(target)  # as torch does
            target = target if is_there else OnGpu(target, self)
        if not named.get("non_blocking") or not self._is_pinned(target if is_there else source):
            self.wait_in_secret(f"{func} that is not asynchronous, or not of pinned memory")
        if is_there:
            self._send(source.inner.clone(), target)
        else:
            target.inner.copy_(source)
        return target

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _send(self, numbers: Tensor, target: Tensor) -> None:
        target.fill_(NONSENSE)
        self._on_their_way.append((self.num_launched, target, numbers))
        self.num_launched += 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For what asks torch.cuda."""
        gpu = self

        class Event:
            def record(self) -> None:
                self.place = gpu.num_launched = gpu.num_launched + 1

            def query(self) -> bool:
                return not any(place < self.place for place, _, _ in gpu._on_their_way)

            def synchronize(self) -> None:
                if gpu.is_launching:
                    gpu.waits.append(self.place)
                gpu.arrive(self.place)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)

    def bring(self, model: nn.Module) -> None:
        """All parameters and buffers, in place."""
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                for name, each in owned.items():
                    if each is not None:
                        owned[name] = OnGpu(each.detach(), self)  # type: ignore[assignment]
            for name, each in vars(module).items():
                if isinstance(each, Tensor):
                    setattr(module, name, OnGpu(each.detach(), self))


def _inner(each: Any) -> Any:
    """What it is for the CPU."""
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return each.inner if isinstance(each, OnGpu) else each


def likeness_of(compute: Callable[..., Any], gpu: SimulatedGpu) -> Callable[..., Any]:
    """What computes on the CPU, as a kernel there: it takes and gives tensors there, and waits for nothing."""

    def launch(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return OnGpu(compute(*tree_map(_inner, args)), gpu)

    return launch
