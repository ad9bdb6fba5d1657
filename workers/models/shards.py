"""The sharded files of a checkpoint (`torch.distributed.checkpoint`): written with clear errors, and read without running code.

    actor.weights/<parameter>  actor.optimizer/<state>  critic....      whole tensors by name, cut into one file for each rank
    .metadata                                                           which piece lies where: a pickle

A pickle can run any program when it is read, and a checkpoint may come from somebody else. So `.metadata` is read by an unpickler
that knows only the classes of which such a file consists, and every entry must be a tensor (`torch.load` reads those with
`weights_only=True`; other entries it would unpickle).
"""

from __future__ import annotations

import os
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = ".metadata"
PROBE = 4 << 20
"""Bytes written to ask the system why a write failed."""

_CLASSES = {
    f"{cls.__module__}.{cls.__qualname__}": cls
    for cls in (
        *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
        *(TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo),
    )
} | {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
}


class ShardsError(RuntimeError):
    """Sharded state can't be written or read; says which file or which model."""


def save_shards(state: Mapping[str, Mapping[str, Tensor]], path: str | Path) -> None:
    """Write `{role: {name: tensor}}`, each rank its shards. Collective.

    Raises:
        ShardsError: a rank could not write; with the system's reason.
    """
    try:
        dcp.save(dict(state), checkpoint_id=path)
    except dcp.api.CheckpointException as error:  # it derives from BaseException, which nobody else expects
        raise ShardsError(_why_not_written(Path(path), error)) from None
    except (OSError, RuntimeError) as error:
        raise ShardsError(_refusal(Path(path)) or f"{type(error).__name__}: {error}") from error


def load_shards(state: Mapping[str, Mapping[str, Tensor]], path: str | Path) -> None:
    """Fill the tensors of `{role: {name: tensor}}` in place, whatever the number of ranks that wrote them. Collective.

    Raises:
        ShardsError: the checkpoint lacks a role or a tensor, or its files can't be read.
    """
    stored = tensors_in(path)
    check_roles(path, stored, state)
    missing = sorted(
        f"{role}.{name}" for role, named in state.items() for name in named if f"{role}.{name}" not in stored
    )
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ShardsError(f"{path} has no {', '.join(missing[:3])}{more}: it was written with other models or settings")
    try:
        dcp.load(dict(state), storage_reader=_Reader(path))
    except dcp.api.CheckpointException as error:
        raise ShardsError(f"{path} can't be read: {_causes(error)}") from None


def tensors_in(path: str | Path) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint holds, by name (`actor.weights/...`); only its `.metadata` is read.

    Raises:
        ShardsError: that file is missing, damaged, or is not what `save_shards` writes.
    """
    return _Reader(path).read_metadata().state_dict_metadata  # type: ignore[return-value]


def check_roles(path: str | Path, stored: Mapping[str, Any], wanted: Mapping[str, Any] | list[str]) -> None:
    """Refuse a checkpoint that lacks a trained model.

    Raises:
        ShardsError: names what is missing and what there is.
    """
    found = sorted({name.partition(".")[0] for name in stored})
    missing = [role for role in wanted if role not in found]
    if missing:
        raise ShardsError(
            f"{path} holds no {' and no '.join(missing)} (it holds: {', '.join(found) or 'nothing'}), so this training can't be "
            "continued from it; resume with the algorithm that wrote it, or start a new run from exported weights"
        )


def read_tensors(path: str | Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, in this process alone, by the rest of the name.

    Raises:
        ShardsError: the files can't be read.
    """
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensors_in(path).items()
        if name.startswith(prefix)
    }
    try:
        dcp.load(state, storage_reader=_Reader(path), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise ShardsError(f"{path} can't be read: {_causes(error)}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


class _Reader(dcp.FileSystemReader):
    """DCP's reader with a `.metadata` that can't run anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            _check(metadata, path)
        except FileNotFoundError:
            raise ShardsError(f"{path} is missing") from None
        except ShardsError:
            raise
        except Exception as error:  # damaged pickles raise nearly everything
            raise ShardsError(f"{path} can't be read ({type(error).__name__}: {error})") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a `.metadata` file and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        known = _CLASSES.get(f"{module}.{name}")
        if known is None:
            raise ShardsError(
                f"{METADATA} asks for {module}.{name}, which no checkpoint of this program contains; reading it could run code "
                "that somebody put there, so it is refused"
            )
        return known


def _check(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ShardsError(f"{path} does not describe a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise ShardsError(f"{path}: {name!r} is not a tensor; reading it could run code, so it is refused")
    for place in (metadata.storage_data or {}).values():
        if not isinstance(place, _StorageInfo) or os.path.basename(place.relative_path) != place.relative_path:
            raise ShardsError(f"{path} names files outside of the checkpoint")


def _why_not_written(path: Path, error: Any) -> str:
    reason = _refusal(path)
    return f"{reason} ({_causes(error)})" if reason else _causes(error)


def _causes(error: Any) -> str:
    """What went wrong on each rank, in a line."""
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())


def _refusal(path: Path) -> str | None:
    """The system's own words when it refuses to write here; the zip writer below torch tells a full disk as `unexpected pos`."""
    probe = path / ".probe"
    try:
        with open(probe, "wb", buffering=0) as file:
            left = PROBE
            while left > 0:
                left -= file.write(b"\0" * left)
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror} (while writing to {path})"
    finally:
        probe.unlink(missing_ok=True)
    return None
