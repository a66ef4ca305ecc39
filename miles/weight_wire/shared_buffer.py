"""Anonymous shared memory between two processes of one host, with nothing to clean up after a kill.

`SharedBuffer` owns a memfd: it has no name in any file system, so when its last holder dies (kill -9 included) the
kernel frees it and nothing is left in /dev/shm. The peer opens it through /proc/<pid>/fd, checks that it is
the object announced, and maps it. Linux only; both processes must share a PID namespace and a user.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from miles.weight_wire.bucket import WeightWireError, host_identity

KIND = "memfd"


class SharedBuffer:
    """A fixed-size uint8 buffer that other processes can attach to by its handle."""

    def __init__(self, nbytes: int):
        if nbytes <= 0:
            raise ValueError(f"a shared buffer needs a positive size, got {nbytes}")
        self.nbytes = nbytes
        self._fd = os.memfd_create("miles-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle: dict[str, Any] = {
            "kind": KIND,
            "pid": os.getpid(),
            "fd": self._fd,
            "inode": os.fstat(self._fd).st_ino,
            "nbytes": nbytes,
            "host": host_identity(),
        }

    def close(self) -> None:
        """Release this process's hold; the tensor must not be used afterwards. Idempotent."""
        if self._fd >= 0:
            del self.tensor
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class AttachedBuffers:
    """The peer's buffers this process has mapped, by inode; `close` unmaps all of them."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], tuple[mmap.mmap, torch.Tensor]] = {}

    @property
    def count(self) -> int:
        return len(self._maps)

    def open(self, handle: Any) -> torch.Tensor:
        """The buffer behind a handle as uint8 [nbytes]; mapped once, `WeightWireError` if it is not what was announced."""
        if not isinstance(handle, dict) or handle.get("kind") != KIND:
            raise WeightWireError(f"shared memory handle of kind {KIND!r} expected, got {handle!r:.80}")
        numbers = [handle.get(key) for key in ("pid", "fd", "inode", "nbytes")]
        if not all(type(value) is int and value >= 0 for value in numbers):
            raise WeightWireError("shared memory handle: pid, fd, inode and nbytes must be integers >= 0")
        pid, fd, inode, nbytes = (int(value) for value in numbers if value is not None)
        if handle.get("host") != host_identity():
            raise WeightWireError(
                "the tensor transport needs trainer and engine on one host and in one PID namespace; "
                "use sync.transport: broadcast or disk"
            )
        key = (pid, inode)
        if key not in self._maps:
            mapping = _map(pid, fd, inode, nbytes)
            self._maps[key] = (mapping, torch.frombuffer(mapping, dtype=torch.uint8))
        tensor = self._maps[key][1]
        if tensor.numel() != nbytes:
            raise WeightWireError(f"shared memory of {tensor.numel()} bytes was announced again with {nbytes}")
        return tensor

    def close(self) -> None:
        """Unmap everything. Tensors returned by `open` must not be used afterwards."""
        while self._maps:
            _, (mapping, tensor) = self._maps.popitem()
            del tensor
            mapping.close()


def _map(pid: int, fd: int, inode: int, nbytes: int) -> mmap.mmap:
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightWireError(f"cannot open the shared memory of process {pid}: {error.strerror}") from error
    try:
        found = os.fstat(own)
        if found.st_ino != inode or found.st_size != nbytes:
            raise WeightWireError(f"process {pid} no longer holds the announced shared memory")
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)
