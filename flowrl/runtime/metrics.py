"""The numbers of a run: one row a step in ``metrics.parquet``, and TensorBoard events where it is installed.

The file is replaced whole (written beside the old one, synced, renamed), so that a kill or a full disk leaves
the last good one.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import RunFolderError
from flowrl.runtime.atomic import clean_utf8, write_atomically
from flowrl.runtime.samples import SampleLog, read_samples, sample_rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MetricsLog", "SampleLog", "read_metrics", "read_samples", "sample_rows"]

METRICS_FILE = "metrics.parquet"
TENSORBOARD_FOLDER = "tensorboard"

Value = float | int | str | None


class MetricsLog:
    """The metrics of a run, a row a step.

    Args:
        folder: the run folder.
        resume_from_step: None for a new run; else the first step that will be logged again: the rows from
            there on are dropped, in TensorBoard too.
        tensorboard: whether to write TensorBoard events as well.
        flush_seconds: ``log`` writes the file at most so often.
        note: receives a sentence for the user where something optional is missing; by default a log warning.

    Columns are the union of all names, float64, null where a step lacks one; a name that ever holds text is a
    string column. ``step`` is int64.

    Raises:
        RunFolderError: a new run finds metrics of another one; the file is damaged; the disk is full.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resume_from_step: int | None = None,
        *,
        tensorboard: bool = True,
        flush_seconds: float = 5.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / METRICS_FILE
        self._rows: dict[int, dict[str, Value]] = {}
        self._flush_seconds = flush_seconds
        self._next_flush = time.monotonic() + flush_seconds
        self._dirty = False
        self._note = note or logging.getLogger("flowrl").warning
        self._resume_from_step = resume_from_step
        self._wants_tensorboard = tensorboard
        self._writer: Any = None
        if resume_from_step is None and self.path.exists():
            raise RunFolderError(
                f"{self.path} exists already",
                expected="a folder without metrics for a new run",
                received="the metrics of another run",
                do="choose another folder, or resume that run",
            )
        if resume_from_step is not None and self.path.exists():
            table = read_metrics(self.folder)
            kept = [row for row in table.to_pylist() if row["step"] < resume_from_step]
            self._dirty = len(kept) < table.num_rows
            for row in kept:
                step = row.pop("step")
                self._rows[step] = {n: v for n, v in row.items() if v is not None}

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Keep the metrics of a step; a second call for a step adds to its row. None means absent."""
        row = self._rows.setdefault(int(step), {})
        for name, value in metrics.items():
            if value is None or name == "step":
                continue
            row[name] = value if isinstance(value, str) else float(value)
        self._dirty = True
        self._log_to_tensorboard(int(step), metrics)
        if time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet. Call it before a checkpoint is taken, and at the end."""
        if self._dirty:
            start = time.monotonic()
            write_atomically(self.path, _parquet_bytes(self._table()))
            self._dirty = False
            # The whole file is written each time: the longer that takes, the rarer, for at most 5 % of a run.
            took = time.monotonic() - start
            self._next_flush = time.monotonic() + max(self._flush_seconds, 20 * took)
        if self._writer is not None:
            with self._tensorboard_trouble():
                self._writer.flush()

    def close(self) -> None:
        """Flush, and close TensorBoard's file."""
        self.flush()
        if self._writer is not None:
            with self._tensorboard_trouble():
                self._writer.close()
            self._writer = None
            self._wants_tensorboard = False

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _table(self) -> pa.Table:
        import pyarrow as pa

        steps = sorted(self._rows)
        rows = [self._rows[s] for s in steps]
        names = list(dict.fromkeys(n for row in rows for n in row))
        columns: dict[str, Any] = {"step": pa.array(steps, pa.int64())}
        for name in names:
            values = [row.get(name) for row in rows]
            if any(isinstance(v, str) for v in values):
                columns[name] = pa.array([None if v is None else clean_utf8(str(v)) for v in values], pa.string())
            else:
                columns[name] = pa.array(values, pa.float64(), from_pandas=False)
        return pa.table({clean_utf8(n): c for n, c in columns.items()})

    def _log_to_tensorboard(self, step: int, metrics: Mapping[str, Value]) -> None:
        if not self._wants_tensorboard:
            return
        if self._writer is None:
            self._writer = self._open_tensorboard()
            if self._writer is None:
                self._wants_tensorboard = False
                return
        with self._tensorboard_trouble():
            for name, value in metrics.items():
                if isinstance(value, numbers.Real):
                    self._writer.add_scalar(clean_utf8(name), float(value), step)

    def _open_tensorboard(self) -> Any:
        """A SummaryWriter, or None after one note."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # a broken install raises more than ImportError
            self._note(
                f"No TensorBoard events will be written ({type(error).__name__}: {error}). "
                f"All metrics are in {self.path}. To have both: pip install tensorboard"
            )
            return None
        folder = str(self.folder / TENSORBOARD_FOLDER)
        with self._tensorboard_trouble():
            return SummaryWriter(folder, purge_step=self._resume_from_step)
        return None

    @contextlib.contextmanager
    def _tensorboard_trouble(self) -> Iterator[None]:
        """TensorBoard is a copy: where it cannot be written, say so once and go on with the record itself."""
        try:
            yield
        except OSError as error:
            self._writer = None
            self._wants_tensorboard = False
            self._note(f"TensorBoard events are no longer written ({error}). All metrics are in {self.path}.")


def _parquet_bytes(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def read_metrics(folder: str | os.PathLike[str]) -> pa.Table:
    """The metrics of a run, sorted by ``step``.

    Raises:
        RunFolderError: there is no such file, or it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(folder) / METRICS_FILE
    try:
        # Through memory: a memory map would change under the table when the file is truncated.
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
    except FileNotFoundError:
        raise RunFolderError(
            f"There is no {METRICS_FILE} in {folder}",
            expected="the folder of a run",
            received="a folder without it" if Path(folder).is_dir() else "no such folder",
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if "step" not in table.column_names or not pa.types.is_integer(table.schema.field("step").type):
        raise _damaged(path, "a file without an integer column 'step'")
    return table


def _damaged(path: Path, received: str) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged",
        expected="a Parquet file written by flowrl",
        received=received,
        do=f"move {path} away: the run itself is in its checkpoints, the curves start anew",
    )
