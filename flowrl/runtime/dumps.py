"""Dumps: everything that travelled on the edges of one step, for looking at it afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.batches import Batch
from flowrl.nodes.loss import LossTerm
from flowrl.runtime.checkpoint import write_folder
from flowrl.runtime.ranks import Ranks


def dump_edges(folder: Path, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write one Arrow file a call. What is in the folder already is replaced.

    Returns:
        (label, reason) of the outputs that Arrow cannot hold.

    Raises:
        RunFolderError: the disk is full or cannot be written.
    """
    import pyarrow as pa

    failed: list[tuple[str, str]] = []

    def write(target: Path, _: Ranks) -> None:
        for label, value in values.items():
            if not isinstance(value, Batch) or isinstance(value, LossTerm):  # a term is its inputs, which are there
                continue
            try:
                table = value.to_arrow()
            except Exception as error:  # a user's own batch may hold anything
                failed.append((label, f"{type(error).__name__}: {error}"))
                continue
            path = target / f"{label.replace('/', '_')}.arrow"
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)

    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, write)
    return failed
