"""What `torch.distributed.checkpoint` (DCP) stores and reads: pieces of tensors in Hugging Face's names and shapes.

A rank describes what it has of a parameter as chunks of Hugging Face's tensor, without padding. So what is on disk does
not depend on the mesh, and DCP's own resharding reads it on any other one; copies on several ranks are written once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .checkpoint_files import CheckpointError, ChecksumFile, FileEntry
from .fsdp import fsdp_rows
from .grads import local
from .mesh import Mesh
from .styles import ParamSpec


@dataclass(frozen=True)
class Piece:
    """The elements that a rank holds of a stored tensor of shape ``whole``: tensors by their offsets in it.

    The methods are the protocol DCP asks of a tensor. Those without elements are neither written nor read.
    """

    chunks: dict[torch.Size, Tensor]
    whole: torch.Size

    def size(self) -> torch.Size:
        """Shape of the stored tensor."""
        return self.whole

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.chunks[chunk.offsets]), self.whole
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, own.shape) for at, own in self.chunks.items() if own.numel()]

    def staged(self, memory: Piece | None = None) -> Piece:
        """A copy in host memory, which later steps do not change; in the tensors of ``memory`` that fit.

        On CUDA the copy is complete when the device is synchronised.
        """
        held = {} if memory is None else memory.chunks
        return Piece({at: _host_copy(own, held.get(at)) for at, own in self.chunks.items()}, self.whole)


def _host_copy(tensor: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return memory.copy_(tensor, non_blocking=True)


def parameter_piece(tensor: Tensor, spec: ParamSpec, mesh: Mesh) -> Piece:
    """This rank's piece of a parameter, or of anything laid out like it; shares memory with ``tensor``."""
    own, dim, chunks = local(tensor.detach()), spec.layout.dim or 0, {}
    rows = fsdp_rows(mesh, spec.local_shape[0])
    for s in spec.layout.stored(mesh.rank("tp"), rows):
        offsets = [rows[0], *[0] * (own.ndim - 1)]
        offsets[dim] = s.origin
        chunks[torch.Size(offsets)] = own.narrow(dim, s.start, s.real - s.start)
    return Piece(chunks, torch.Size(spec.shape))


def whole_piece(tensor: Tensor) -> Piece:
    """A tensor that this rank holds all of."""
    return Piece({torch.Size([0] * tensor.ndim): tensor.detach()}, tensor.shape)


def write_pieces(
    directory: Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None = None
) -> dict[str, FileEntry]:
    """Write every rank's pieces to ``directory`` and flush them to the disk; collective over ``group``.

    Returns what the manifest says of the files that any rank wrote. Raises OSError on every rank when one of them could
    not write, or when the pieces leave a gap in a tensor.
    """
    writer = _Writer(directory)
    try:
        dcp.save(dict(pieces), storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:
        raise OSError(f"could not write {directory}: {_first_failure(error)}") from None
    entries: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(entries, writer.fs.entries, group=group)
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}


def read_pieces(directory: Path, pieces: Mapping[str, Piece]) -> None:
    """Fill each piece's tensors from ``directory``; collective, each rank with pieces of its own.

    Raises OSError on every rank when one of them could not read.
    """
    try:
        dcp.load(dict(pieces), storage_reader=_Reader(directory), planner=_LoadPlanner())
    except CheckpointException as error:
        raise OSError(f"could not read {directory}: {_first_failure(error)}") from None


class StoredTensors:
    """The tensors in a directory that `write_pieces` wrote, read whole by one process without a process group."""

    def __init__(self, directory: Path) -> None:
        self._reader = _Reader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name -> shape and dtype of everything stored."""
        stored = self._metadata.state_dict_metadata
        return {n: (m.size, m.properties.dtype) for n, m in stored.items() if isinstance(m, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        shape, dtype = self.entries()[name]
        tensor = torch.empty(shape, dtype=dtype)
        planner = _LoadPlanner()
        planner.set_up_planner({name: whole_piece(tensor)}, self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return tensor


class _Writer(FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _ChecksummedFiles()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # torch has the path in it too, which is renamed


class _ChecksummedFiles(FileSystem):
    """DCP's access to files; ``entries`` has the size and checksum of each that this process wrote, by name."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        file = ChecksumFile(Path(path))
        try:
            with file:
                yield file
        except Exception:
            if file.failure is not None:  # torch.save makes a RuntimeError of it that does not say what happened
                raise file.failure from None
            raise
        self.entries[Path(path).name] = file.entry()

    def rename(self, path, new_path) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _Reader(FileSystemReader):
    """DCP pickles its index: this one is read without running what is in it, and leads to no file elsewhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
            strays = [s.relative_path for s in metadata.storage_data.values() if not _is_file_name(s.relative_path)]
        except Exception as error:  # what damage makes of a pickle can raise anything
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if strays:
            raise CheckpointError(f"{path} names {strays[0]!r}, which is outside its directory")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of DCP's index")


_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_CLASSES = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(
        (_METADATA, name)
        for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def _is_file_name(text: object) -> bool:
    return isinstance(text, str) and PurePath(text).name == text


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].chunks[index.offset]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata=None, is_coordinator: bool = False) -> None:
        # The default looks for meta tensors first, and puts None in the place of values it does not know.
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].chunks[index.offset]


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"{type(cause).__name__} on rank {rank}: {cause}"
