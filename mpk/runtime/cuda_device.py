"""A CUDA device through the driver API: memory, modules, launches and timing, with checked results and plain errors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpk.errors import InternalError, TargetError


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TargetError("the CUDA driver bindings are not installed", remedy="pip install 'mpk[cuda]'") from error
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """Raise `InternalError` naming `what` unless the driver call succeeded; returns its value(s)."""
    driver = _driver()
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise InternalError(f"{what}: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """Number of CUDA devices; 0 where there is no driver."""
    try:
        driver = _driver()
        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return 0
        return int(check(driver.cuDeviceGetCount(), "count devices"))
    except (TargetError, InternalError, RuntimeError):
        return 0


@dataclass(frozen=True)
class Properties:
    """What a launch is checked against. Memory in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int


class Memory:
    """One allocation on a device; freed by `free` or with the object."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.address = int(check(device.driver.cuMemAlloc(max(size, 1)), f"allocate {size} bytes on device {device.index}"))

    def upload(self, data: np.ndarray, offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        if offset + data.nbytes > self.size:
            raise InternalError(f"copy of {data.nbytes} bytes at {offset} into {self.size}")
        if data.nbytes:
            check(self.device.driver.cuMemcpyHtoD(self.address + offset, data.ctypes.data, data.nbytes), "copy to the device")

    def repeat(self, first: int) -> None:
        """Fill the memory with its own first `first` bytes, over and over."""
        while first < self.size:
            size = min(first, self.size - first)
            check(self.device.driver.cuMemcpyDtoD(self.address + first, self.address, size), "copy within the device")
            first += size

    def upload_async(self, source: int, size: int, offset: int = 0) -> None:
        """Copy `size` bytes from pinned host memory at address `source`, in the order of launches; returns before that is done."""
        if offset + size > self.size:
            raise InternalError(f"copy of {size} bytes at {offset} into {self.size}")
        check(self.device.driver.cuMemcpyHtoDAsync(self.address + offset, source, size, 0), "copy to the device")

    def download(self, dtype: Any, count: int, offset: int = 0) -> np.ndarray:
        out = np.empty(count, dtype)
        check(self.device.driver.cuMemcpyDtoH(out.ctypes.data, self.address + offset, out.nbytes), "copy from the device")
        return out

    def fill(self, byte: int = 0, offset: int = 0, size: int | None = None) -> None:
        """Set `size` bytes (default: all) from `offset` on."""
        check(self.device.driver.cuMemsetD8(self.address + offset, byte, self.size if size is None else size), "fill device memory")

    def free(self) -> None:
        if self.address:
            self.device.driver.cuMemFree(self.address)
            self.address = 0

    def __del__(self) -> None:
        self.free()


class PinnedArray:
    """A zeroed numpy array in host memory that a kernel can write while it runs; `address` is valid on both sides."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.device = device
        self.address = int(check(device.driver.cuMemHostAlloc(max(size, 1), device.driver.CU_MEMHOSTALLOC_DEVICEMAP), f"allocate {size} bytes of pinned memory"))
        area = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.array = np.frombuffer(area, np.dtype(dtype), int(np.prod(shape, dtype=np.int64))).reshape(shape)
        self.array[...] = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.device.driver.cuMemFreeHost(self.address)
            self.address = 0


class Device:
    """Primary context of device `index`; raises `TargetError` if there is no such device."""

    def __init__(self, index: int = 0) -> None:
        self.driver = _driver()
        count = device_count()
        if not 0 <= index < count:
            raise TargetError(f"CUDA device {index}", actual=f"{count} devices on this machine",
                              remedy=f"use 0 to {count - 1}" if count else "use the target cpp")
        self.index = index
        self.handle = check(self.driver.cuDeviceGet(index), "open the device")
        self.context = check(self.driver.cuDevicePrimaryCtxRetain(self.handle), "open the device's context")
        self.use()

    def use(self) -> None:
        """Make the device current in this thread."""
        check(self.driver.cuCtxSetCurrent(self.context), "select the device")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(self.driver.cuDeviceGetAttribute(attribute, self.handle), f"ask for {name}"))

    def properties(self) -> Properties:
        name = check(self.driver.cuDeviceGetName(128, self.handle), "ask for the name").split(b"\0")[0].decode()
        return Properties(name, (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")),
                          self._attribute("MULTIPROCESSOR_COUNT"), self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
                          self._attribute("L2_CACHE_SIZE"))

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes now."""
        free, total = check(self.driver.cuMemGetInfo(), "ask for free memory")
        return int(free), int(total)

    def allocate(self, size: int) -> Memory:
        return Memory(self, size)

    def copy(self, data: np.ndarray) -> Memory:
        """A new allocation with the contents of `data`."""
        memory = Memory(self, data.nbytes)
        memory.upload(data)
        return memory

    def stream(self) -> Any:
        """A stream that does not wait for the one that kernels run in."""
        return check(self.driver.cuStreamCreate(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "create a stream")

    def download_beside(self, stream: Any, memory: Memory, dtype: Any, count: int) -> np.ndarray:
        """Copy from the device while a kernel runs."""
        out = np.empty(count, dtype)
        check(self.driver.cuMemcpyDtoHAsync(out.ctypes.data, memory.address, out.nbytes, stream), "copy from the device")
        check(self.driver.cuStreamSynchronize(stream), "copy from the device")
        return out

    def finished(self, event: Any) -> bool:
        """Whether all work before the event is done."""
        (status,) = self.driver.cuEventQuery(event)
        if status == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((status,), "run the kernel")
        return True

    def upload_beside(self, stream: Any, memory: Memory, data: np.ndarray) -> None:
        """Copy to the device while a kernel runs."""
        check(self.driver.cuMemcpyHtoDAsync(memory.address, data.ctypes.data, data.nbytes, stream), "copy to the device")
        check(self.driver.cuStreamSynchronize(stream), "copy to the device")

    def load(self, image: bytes) -> Any:
        return check(self.driver.cuModuleLoadData(image), "load the compiled program")

    def function(self, module: Any, name: str, shared_bytes: int) -> Any:
        """Kernel `name` of a module, allowed to use `shared_bytes` of dynamic shared memory."""
        function = check(self.driver.cuModuleGetFunction(module, name.encode()), f"find kernel {name}")
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(self.driver.cuFuncSetAttribute(function, attribute, shared_bytes), f"give kernel {name} {shared_bytes} bytes of shared memory")
        return function

    def launch(self, function: Any, blocks: int, threads: int, shared_bytes: int, argument: np.ndarray, cooperative: bool = True, stream: Any = 0) -> None:
        """Start a kernel whose only parameter is the struct in `argument`; `stream`: as `stream` returns it, 0: the device's own.

        A cooperative launch is refused by the driver unless all blocks are resident at once, which a persistent kernel with
        waits between blocks depends on.
        """
        pointers = (ctypes.c_void_p * 1)(argument.ctypes.data)
        launch = self.driver.cuLaunchCooperativeKernel if cooperative else None
        if launch is not None:
            result = launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers))
        else:
            result = self.driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0)
        check(result, "launch")

    def synchronize(self) -> None:
        check(self.driver.cuCtxSynchronize(), "run the kernel")

    def event(self) -> Any:
        return check(self.driver.cuEventCreate(0), "create an event")

    def record(self, event: Any, stream: Any = 0) -> None:
        check(self.driver.cuEventRecord(event, stream), "record an event")

    # ---- other devices
    def can_reach(self, other: Device) -> bool:
        """Whether kernels of this device can access memory of the other."""
        return self.index == other.index or bool(check(self.driver.cuDeviceCanAccessPeer(self.handle, other.handle), "ask for peer access"))

    def reach(self, other: Device) -> None:
        """Let kernels of this device access memory of the other."""
        if self.index == other.index:
            return
        self.use()
        (status,) = self.driver.cuCtxEnablePeerAccess(other.context, 0)
        if status != self.driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            check((status,), f"give device {self.index} access to device {other.index}")

    def wait_event(self, event: Any) -> None:
        """Block until all work before the event is done."""
        check(self.driver.cuEventSynchronize(event), "wait for the device")

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        check(self.driver.cuEventSynchronize(end), "wait for the kernel")
        return float(check(self.driver.cuEventElapsedTime(begin, end), "read the time"))
