"""A simulated GPU: its tensors report a CUDA device, are computed on the CPU, and raise if the host would wait.

Tests on machines without a GPU use it to check what a launch does. `HostWaitError` is raised for every operation that
makes the host wait for a real GPU: to read a value (item, tolist, bool, nonzero, a boolean index), a copy that is not
asynchronous or not from or to pinned memory, an operand or an index on the host. Copies to the host arrive only when an
event behind them is waited for; before that the memory holds `UNWRITTEN`.

It sees operations of torch, and nothing else: not Triton kernels, not what libraries do on their own (a workspace that
is allocated, a first call), not the driver's waits when memory is allocated or freed.
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
UNWRITTEN = 77  # what memory of the host holds until a copy arrives
TOTAL_MEMORY = 80 * 2**30
# Operations whose result on the host, or whose shape, depends on values on the device.
READING_OPERATIONS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "argwhere",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique",
    "unique_consecutive",
    "unique_dim",
}
COPY_OPERATIONS = {"to", "_to_copy", "copy_", "copy"}


class HostWaitError(Exception):
    """The host would wait for the device within a launch."""


class OnGpu(torch.Tensor):
    """A tensor on the simulated GPU; `inner` holds its numbers. To torch's dispatcher it is a tensor of the CPU."""

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
        self.gpu.wait_implicitly("tolist")
        return self.inner.tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        self.gpu.wait_implicitly("cpu")
        return self.inner.clone()

    numpy = __array__ = tolist  # type: ignore[assignment]


class SimulatedGpu(TorchDispatchMode):
    """The device. Within `with gpu:`, operations may create tensors on it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_launching = False
        self._is_decomposing = False
        self.num_launched = 0  # copies to the host, and events
        self.waits: list[int] = []  # the numbers of the events that were waited for within a launch
        self._pinned: dict[int, Tensor] = {}  # by address; never removed, so that no address is used twice
        self._in_flight: deque[tuple[int, Tensor, Tensor]] = deque()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Raise HostWaitError for implicit waits within this context."""
        self.is_launching = True
        try:
            with self:
                yield
        finally:
            self.is_launching = False

    def wait_implicitly(self, what: str) -> None:
        if self.is_launching:
            raise HostWaitError(what)
        self.complete(self.num_launched)

    def complete(self, number: int) -> None:
        """Complete the copies to the host that were launched before that number."""
        while self._in_flight and self._in_flight[0][0] < number:
            _, target, numbers = self._in_flight.popleft()
            with torch.inference_mode():
                target.copy_(numbers)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_on_host = not any(isinstance(each, OnGpu) for each in tensors)
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if name in COPY_OPERATIONS and (copied := self._copied(func, named)) is not None:
            return copied
        creates_on_gpu = str(named.get("device") or "").startswith("cuda")
        if is_on_host and not creates_on_gpu:
            return self._on_host(func, args, kwargs)
        if not is_on_host:
            self._check(name, tensors, named)
        is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        if is_composite and not creates_on_gpu and "scaled_dot_product" not in name:
            with self._decomposing(), self:
                return func.decompose(*args, **kwargs)
        inputs = {id(each.inner): each for each in tensors if isinstance(each, OnGpu)}
        output = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

        def to_gpu(each: Any) -> Any:
            """Wrap a result. An operation in place returns the tensor that it was given."""
            if not isinstance(each, Tensor):
                return each
            return inputs[id(each)] if id(each) in inputs else OnGpu(each, self)

        return tree_map(to_gpu, output)

    @contextmanager
    def _decomposing(self) -> Iterator[None]:
        """Note that torch's own code runs, which takes the device of these tensors for the CPU."""
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
        if name in READING_OPERATIONS or (name == "repeat_interleave" and named.get("output_size") is None):
            self.wait_implicitly(name)
        indices = [each for each in tree_leaves(named.get("indices")) if isinstance(each, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.wait_implicitly(f"{name} with a mask")
        # A scalar on the host is passed as an argument of the kernel.
        if any(not isinstance(each, OnGpu) and each.dim() for each in tensors):
            self.wait_implicitly(f"{name} with an operand on the host")

    def _copied(self, func: Any, named: dict[str, Any]) -> Any:
        """Copy between host and device. Returns None if the tensor stays where it is."""
        source = named.get("src", named["self"])
        is_on_gpu = isinstance(source, OnGpu)
        if "src" in named:
            target = named["self"]
            if isinstance(target, OnGpu) == is_on_gpu or not (is_on_gpu or source.dim()):
                return None
        else:
            wanted = CUDA if isinstance(named.get("other"), OnGpu) else named.get("device")
            if wanted is None or self._is_decomposing or (torch.device(wanted).type == "cuda") == is_on_gpu:
                return None
            target = torch.empty(source.shape, dtype=named.get("dtype") or source.dtype)
            if is_on_gpu and named.get("non_blocking"):
                self._pin(target)  # as torch does
            target = target if is_on_gpu else OnGpu(target, self)
        if not named.get("non_blocking") or not self._is_pinned(target if is_on_gpu else source):
            self.wait_implicitly(f"{func} that is not asynchronous, or not of pinned memory")
        if is_on_gpu:
            self._send(source.inner.clone(), target)
        else:
            self._arrive(source)
            target.inner.copy_(source)
        return target

    def _arrive(self, tensor: Tensor) -> None:
        """Let the host's memory hold what was copied to it before: the device copies in order."""
        address = tensor.untyped_storage().data_ptr()
        numbers = [number for number, target, _ in self._in_flight if target.untyped_storage().data_ptr() == address]
        self.complete(max(numbers, default=-1) + 1)

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _send(self, numbers: Tensor, target: Tensor) -> None:
        target.fill_(UNWRITTEN)
        self._in_flight.append((self.num_launched, target, numbers))
        self.num_launched += 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what is used of torch.cuda."""
        gpu = self

        class Event:
            def record(self) -> None:
                self.number = gpu.num_launched = gpu.num_launched + 1

            def query(self) -> bool:
                return not any(number < self.number for number, _, _ in gpu._in_flight)

            def synchronize(self) -> None:
                if gpu.is_launching:
                    gpu.waits.append(self.number)
                gpu.complete(self.number)

        class CudaRuntime:
            def cudaHostRegister(self, address: int, *_: int) -> int:  # noqa: N802 - CUDA's name
                gpu._pinned[address] = torch.empty(0)
                return 0

        monkeypatch.setattr(torch.cuda, "cudart", CudaRuntime)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL_MEMORY, TOTAL_MEMORY))

    def move_to_gpu(self, model: nn.Module) -> None:
        """Move all parameters and buffers to the simulated GPU, in place."""
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                for name, each in owned.items():
                    if each is not None:
                        owned[name] = OnGpu(each.detach(), self)  # type: ignore[assignment]
            for name, each in vars(module).items():
                if isinstance(each, Tensor):
                    setattr(module, name, OnGpu(each.detach(), self))


def _inner(each: Any) -> Any:
    """Return the CPU's tensor or device for one of the simulated GPU."""
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return each.inner if isinstance(each, OnGpu) else each


def as_gpu_kernel(compute: Callable[..., Any], gpu: SimulatedGpu) -> Callable[..., Any]:
    """Wrap a function of CPU tensors as a kernel of the simulated GPU, which waits for nothing."""

    def launch(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return OnGpu(compute(*tree_map(_inner, args)), gpu)

    return launch
