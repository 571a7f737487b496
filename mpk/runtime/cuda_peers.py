"""Memory of one GPU that kernels of other GPUs write: within a process by peer access, between processes by handles.

Whatever the way, a rank knows the others' memory by addresses that its own kernels may use; nothing else of the program depends on it,
so ranks on another machine would need no more than another class here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mpk.errors import TargetError
from mpk.runtime.cuda_device import Device, Memory, check


class PeerMemory:
    """A rank's own peer memory, zeroed: no flag of a message is 0."""

    def __init__(self, device: Device, size: int) -> None:
        device.use()
        self.device, self.size = device, size
        self.memory: Memory = device.allocate(size)
        self.memory.fill(0)

    @property
    def address(self) -> int:
        """Where kernels find it: on this device, and on every device of the process that `connect` let reach it."""
        return self.memory.address

    def clear(self) -> None:
        self.device.use()
        self.memory.fill(0)

    def handle(self) -> bytes:
        """What another process on the same machine opens it with."""
        self.device.use()
        handle = check(self.device.driver.cuIpcGetMemHandle(self.address), "share peer memory with other processes")
        return bytes(handle.reserved)


class ForeignPeerMemory:
    """Peer memory of a rank in another process, opened for kernels of `device`; closed with the object."""

    def __init__(self, device: Device, handle: bytes) -> None:
        device.use()
        self.device = device
        opened = device.driver.CUipcMemHandle()
        opened.reserved = handle
        lazy = device.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.address = int(check(device.driver.cuIpcOpenMemHandle(opened, lazy), "open the peer memory of another process"))

    def close(self) -> None:
        if self.address:
            self.device.use()
            self.device.driver.cuIpcCloseMemHandle(self.address)
            self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


def require_peer_access(devices: Sequence[Device]) -> None:
    """Raise `TargetError` naming the first pair of devices that cannot access each other's memory."""
    for one in devices:
        for other in devices:
            if not one.can_reach(other):
                raise TargetError(f"devices {one.index} and {other.index}", expected="access to each other's memory",
                                  actual=f"device {one.index} cannot reach device {other.index}",
                                  remedy="choose device_ids that are linked (nvidia-smi topo -p2p rw shows which)")


def connect(devices: Sequence[Device]) -> None:
    """Let every device reach the memory of all others; raises as `require_peer_access`."""
    require_peer_access(devices)
    for one in devices:
        for other in devices:
            one.reach(other)


def addresses(memories: Sequence[PeerMemory | ForeignPeerMemory]) -> list[int]:
    """Of every rank, in order, as the kernels of one rank use them."""
    return [ctypes.c_uint64(m.address).value for m in memories]
