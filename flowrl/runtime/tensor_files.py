"""Named tensors as files, by ``torch.distributed.checkpoint``: every rank writes its own parts, and reads those it will hold.

A folder that was written by any number of ranks, under any sharding, is read by any other, bit for bit: what is written down
is where in the whole tensor each part lies. What all ranks hold alike is written by one of them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flowrl.runtime.ranks import ONE_RANK, Ranks


class _Writer(FileSystemWriter):
    """Writes nothing but tensors: no path and no random name, so that equal tensors of one rank give equal files."""

    def storage_meta(self) -> None:
        return None


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts as they are now, in host memory: training on does not change them."""
    pins = torch.cuda.is_available()
    stager = DefaultStager(
        StagingOptions(pins, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pins)
    )
    try:
        found: Any = stager.stage(_detached(tensors))
        return found
    finally:
        stager.close()


def write(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write tensors into an existing folder. Every rank calls it with the same names.

    Raises:
        OSError: of the rank that could not write, on every rank.
    """
    with _plain_errors():
        save(
            _detached(tensors),
            storage_writer=_Writer(folder, sync_files=False),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


def described(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """By name the whole shape and the dtype of what a folder holds.

    Raises:
        OSError: there is nothing that can be read.
    """
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {n: (m.size, m.properties.dtype) for n, m in known.items() if isinstance(m, TensorStorageMetadata)}


def contents(folder: Path) -> dict[str, Tensor]:
    """All that a folder holds, in whole tensors on the CPU of this process alone.

    Raises:
        OSError: there is nothing that can be read.
    """
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in described(folder).items()}
    read(found, folder, ONE_RANK)
    return found


def read(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill tensors, in place, from a folder that has all of these names. Every rank calls it with the same names.

    Raises:
        OSError: of the rank that could not read, on every rank.
    """
    with _plain_errors():
        load(
            _detached(tensors),
            storage_reader=FileSystemReader(folder),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong on one rank is raised as itself, on all of them."""
    try:
        yield
    except CheckpointException as error:
        if not error.failures:
            raise
        first, _ = error.failures[min(error.failures)]
        raise first from None


# It is meant so: a run of one rank saves in a single process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
