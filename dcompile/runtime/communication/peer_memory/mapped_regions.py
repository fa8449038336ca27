"""Map memory of other processes of the same machine, where all ranks can reach it, and copy from it by copy engines.

It uses CUDA's driver API for inter-process communication and copies between devices, which torch does not expose.
torch's own copy between two GPUs synchronizes streams of both. A copy from another GPU's memory takes none of this
GPU's multiprocessors. All ranks of a group agree what all of them can reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from dcompile.runtime.coordination.agreement import exchange_texts
from dcompile.toolchain import boot

Copy: TypeAlias = "tuple[int, int, int]"
"""(destination address, source address, bytes)."""
Offer = Sequence[Any]
"""[name of the allocation, offset in it, bytes], or a text that says why there is none."""

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS of the driver API."""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM of the driver API."""
_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE of the driver API."""


class PeerMemoryAccess(Protocol):
    """Access of one process to the memory of others."""

    def place(self) -> str:
        """Name of the machine. Processes can access each other's memory only where it is equal and not empty."""

    def export(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Name of a tensor's allocation, and the tensor's offset in it in bytes.

        Raises RuntimeError if it cannot be shared.
        """

    def open(self, name: str) -> int:
        """Map another process's allocation and return its address here. Raises RuntimeError if it cannot be reached."""

    def close(self, address: int) -> None:
        """Undo one `open`."""

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Start copies, in any order, after the current work of the stream."""


def reach_of(device: torch.device) -> PeerMemoryAccess | None:
    """Access to other processes' memory for a device's type; None if there is none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return CudaPeerMemoryAccess()


def close_all(reach: PeerMemoryAccess, opened: Sequence[int]) -> None:
    """Undo these `open`s, unless a CUDA graph is being recorded."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # unmapping would invalidate the recording; the memory stays mapped until the process ends
    with contextlib.suppress(RuntimeError):
        for address in opened:
            reach.close(address)


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """Structure CUmemcpyAttributes of the driver API."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class CudaPeerMemoryAccess:
    """`PeerMemoryAccess` of the current CUDA device."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        self._range, self._export = cuda.cuMemGetAddressRange_v2, cuda.cuIpcGetMemHandle
        self._open, self._close = cuda.cuIpcOpenMemHandle_v2, cuda.cuIpcCloseMemHandle
        self._copy, self._error = cuda.cuMemcpyDtoDAsync_v2, cuda.cuGetErrorString
        self._batch: Any = getattr(cuda, "cuMemcpyBatchAsync_v2", None)
        """Starts all copies in one call, from CUDA 13 on. It cannot be used while a CUDA graph is recorded."""

    def place(self) -> str:
        return boot()

    def export(self, tensor: torch.Tensor) -> tuple[str, int]:
        base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = tensor.data_ptr()
        self._check(self._range(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)), "finding memory")
        self._check(self._export(ctypes.byref(handle), base), "sharing memory")
        return bytes(handle).hex(), address - base.value

    def open(self, name: str) -> int:
        handle, address = _Handle.from_buffer_copy(bytes.fromhex(name)), ctypes.c_uint64()
        self._check(self._open(ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)), "mapping memory")
        return address.value

    def close(self, address: int) -> None:
        self._close(ctypes.c_uint64(address))  # called at the end of a group: an error has no consequence

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        if self._batch is None or torch.cuda.is_current_stream_capturing():
            for target, source, nbytes in copies:
                arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
                self._check(self._copy(*arguments, ctypes.c_void_p(stream)), "copying")
            return
        count = len(copies)
        targets, sources, sizes = zip(*copies, strict=True)
        addresses, lengths = ctypes.c_uint64 * count, ctypes.c_size_t * count
        attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_OVERLAP)
        status = self._batch(
            addresses(*targets), addresses(*sources), lengths(*sizes), ctypes.c_size_t(count),
            ctypes.byref(attributes), ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        self._check(status, "copying")

    def _check(self, status: int, doing: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._error(status, ctypes.byref(text))
            raise RuntimeError(f"{doing}: {(text.value or b'error ' + str(status).encode()).decode()}")


class MappedRegions:
    """Regions of memory that each rank of a group has under the same names.

    All ranks construct theirs at the same point, and get the same `reasons`. A region is a tensor, or the reason why it
    cannot be shared. `what` names them all in messages. The mapping ends with this object.
    """

    def __init__(
        self, group: Any, reach: PeerMemoryAccess, what: str, regions: Mapping[str, torch.Tensor | str]
    ) -> None:
        self.addresses: dict[str, list[int]] = {}
        """Region -> its address in this process, for each rank."""
        self._rank, self._reach = dist.get_rank(group), reach
        self._opened: list[int] = []
        self.held: dict[str, torch.Tensor] = {}
        """This rank's regions as the others have mapped them: they must live as long as those may use them."""
        offer = json.dumps({"place": reach.place(), "regions": self._offers(regions)})
        offers = [json.loads(text) for text in exchange_texts(group, f"memory of {what}", offer)]
        self.reasons = _unreachable(offers, regions)
        """Region -> why some rank cannot reach it. All ranks can reach the others."""
        if self.reasons.keys() < regions.keys():
            trouble = self._open([one["regions"] for one in offers])
            answers = exchange_texts(group, f"access to {what}", trouble)
            found = [(rank, answer) for rank, answer in enumerate(answers) if answer]
            if found:
                self.reasons = dict.fromkeys(regions, f"rank {found[0][0]} cannot reach them ({found[0][1]})")
        for name in self.reasons:
            self.held.pop(name, None)
            self.addresses.pop(name, None)

    def _offers(self, regions: Mapping[str, torch.Tensor | str]) -> dict[str, Offer]:
        """Return what this rank offers, for a message to the others."""
        offers: dict[str, Offer] = {}
        for name, region in regions.items():
            if isinstance(region, str):
                offers[name] = region
                continue
            try:
                offers[name] = [*self._reach.export(region), region.numel() * region.element_size()]
                self.held[name] = region
            except RuntimeError as error:
                offers[name] = f"{error}"
        return offers

    def _open(self, offers: Sequence[Mapping[str, Offer]]) -> str:
        """Map the other ranks' memory. Return an error text, or an empty string."""
        known: dict[str, int] = {}
        try:
            for name, held in self.held.items():
                if name in self.reasons:
                    continue
                self.addresses[name] = [
                    held.data_ptr() if rank == self._rank else self._mapped(one[name][0], known) + one[name][1]
                    for rank, one in enumerate(offers)
                ]
        except RuntimeError as error:
            return str(error) or type(error).__name__
        finally:
            weakref.finalize(self, close_all, self._reach, self._opened).atexit = False
        return ""

    def _mapped(self, allocation: str, known: dict[str, int]) -> int:
        """Return the address of another rank's allocation, which is mapped once."""
        if allocation not in known:
            known[allocation] = self._reach.open(allocation)
            self._opened.append(known[allocation])
        return known[allocation]


def _unreachable(offers: Sequence[Any], regions: Mapping[str, object]) -> dict[str, str]:
    """Return the regions that some rank does not offer, with the reason."""
    places = [one["place"] for one in offers]
    if not all(places) or len({*places}) > 1:
        return dict.fromkeys(regions, f"ranks are on {len({*places})} machines" if all(places) else "no place")
    found = {}
    for name in regions:
        of_ranks = [one["regions"].get(name, "another rank does not have it") for one in offers]
        refused = [reason for reason in of_ranks if isinstance(reason, str)]
        if refused:
            found[name] = refused[0]
        elif len({nbytes for *_, nbytes in of_ranks}) > 1:
            found[name] = "its size differs between ranks"
    return found
