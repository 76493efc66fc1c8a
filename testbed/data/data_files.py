"""Where the files of a dataset are: in a folder of the user's, under a data root in the layout of the
Hugging Face hub, or on the hub itself."""

from __future__ import annotations

import contextlib
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.console import Progress, Report, silent
from testbed.data.columns import DataError, RawSplit
from testbed.errors import BadInputError, HostError
from testbed.topology.data_settings import DataSettings

_ROWS = 1_000
"""That are decoded at a time."""
_LOOK_SECONDS = 0.5
"""From one look at what has been fetched to the next."""
_PATTERNS = ("{split}-*.{kind}", "{split}.{kind}", "{split}/*.{kind}", "data/{split}-*.{kind}")
_KINDS = ("parquet", "npz")


@dataclass(frozen=True, slots=True)
class Splits:
    """The files of each split, or none of them where they have to be fetched."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    validation: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.train, *self.test, *self.validation)


def local(data: DataSettings, root: Path | None) -> Splits | None:
    """The files of `data` on this machine; None where it has to be fetched from the hub.

    Raises DataError where a folder of the user's has none, BadInputError for a `root` that is none.
    """
    if data.path is not None:
        found = _in_folder(Path(data.path), data)
        if not found.train:
            raise DataError("path", _nothing_in(Path(data.path), data))
        return found
    if root is None:
        return None
    if not root.is_dir():
        raise BadInputError(f"--data (or TESTBED_DATA) {root}: no such folder")
    folder = root / str(data.hub)
    # The hub's own parquet files lie in a folder per configuration.
    inside = (folder / data.config,) if data.config else (folder, *sorted(folder.glob("*/")))
    whole = [found for one in inside if (found := _in_folder(one, data)).train]
    if len(whole) > 1 and whole[0].train[0].parent != folder:
        names = ", ".join(sorted({found.train[0].relative_to(folder).parts[0] for found in whole}))
        raise DataError("config", f"{folder} has several configurations: add one of {names}")
    return whole[0] if whole else None


def _in_folder(folder: Path, data: DataSettings) -> Splits:
    if folder.is_file():
        return Splits((folder,), (), ())
    train, test, validation = (
        () if split is None else _of_split(folder, split)
        for split in (data.train, data.test, data.validation)
    )
    if data.path is not None and not (train or test):  # no splits: all are to train on
        train = next((every for kind in _KINDS if (every := _matching(folder, f"*.{kind}"))), ())
    return Splits(train, test, validation)


def _of_split(folder: Path, split: str) -> tuple[Path, ...]:
    patterns = (pattern.format(split=split, kind=kind) for kind in _KINDS for pattern in _PATTERNS)
    return next((found for pattern in patterns if (found := _matching(folder, pattern))), ())


def _matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern)))


def _nothing_in(folder: Path, data: DataSettings) -> str:
    if not folder.exists():
        return f"there is no {folder}: the path is relative to the topology's folder"
    return (
        f"no {data.train}*.parquet or {data.train}*.npz in {folder}: put them there, or name the split "
        "with train"
    )


def open_split(paths: Sequence[Path]) -> RawSplit:
    """The samples in files of one kind, in the order of their names. Raises DataError."""
    kinds = {path.suffix for path in paths}
    if kinds == {".parquet"}:
        return _parquet(paths)
    if kinds == {".npz"}:
        return _npz(paths)
    table = kinds <= {".csv", ".tsv", ".txt"}
    fix = "; pandas.read_csv(FILE).to_parquet(OTHER) makes one of a table" if table else ""
    raise DataError("path", f"{paths[0]}: expected a .parquet or .npz file{fix}")


def _parquet(paths: Sequence[Path]) -> RawSplit:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, columns = 0, {}
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                columns[str(path)] = tuple(file.schema_arrow.names)
                rows += file.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise DataError(None, f"{path}: not readable as parquet ({_first_line(error)})") from error

    def batches(wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        for path in paths:
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(_ROWS, columns=list(wanted)):
                        yield {name: batch.column(name) for name in wanted}
            except (OSError, pa.ArrowException) as error:
                raise DataError(None, f"{path}: not readable ({_first_line(error)})") from error

    return RawSplit(_named(paths), rows, columns, batches)


def _npz(paths: Sequence[Path]) -> RawSplit:
    rows, columns = 0, {}
    for path in paths:
        arrays = _arrays(path)
        rows += _rows(str(path), arrays)
        columns[str(path)] = tuple(arrays)

    def batches(wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        for path in paths:
            arrays = _arrays(path)
            yield {name: arrays[name] for name in wanted}

    return RawSplit(_named(paths), rows, columns, batches)


def of_arrays(name: str, arrays: Mapping[str, Any]) -> RawSplit:
    """The samples in numpy's `arrays`; `name` is for errors. Raises DataError."""
    return RawSplit(name, _rows(name, arrays), {name: tuple(arrays)}, lambda _: iter([arrays]))


def _rows(name: str, arrays: Mapping[str, Any]) -> int:
    lengths = {key: array.shape[:1] for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        told = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        raise DataError(None, f"{name}: expected arrays with a row for each sample, found {told}")
    rows: int = next(iter(lengths.values()))[0]
    return rows


def _arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(
            None, f"{path}: not readable as .npz without pickled objects ({_first_line(error)})"
        ) from error


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0].parent}/{paths[0].stem.split('-')[0]}*"


@contextlib.contextmanager
def fetched(data: DataSettings, report: Report = silent) -> Iterator[Mapping[str, RawSplit]]:
    """The splits of a dataset of the hub, by name; `report` is told how much of it has come. Raises
    HostError."""
    # Read when these libraries are imported: no usage statistics from a user's experiment.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        known: Any = ()
        # The library alone would try again and again for half a minute where there is no network.
        with contextlib.suppress(OfflineModeIsEnabled):
            info = huggingface_hub.HfApi().dataset_info(str(data.hub), timeout=10, files_metadata=True)
            known = info.siblings or ()
        with _without_progress_bars():
            builder = datasets.load_dataset_builder(data.hub, data.config)
            stages = _stages(builder, known, data)
            if (size := stages[0].total - stages[0].done()) > 0:
                report(f"{data.hub}: {size / 1e6:,.1f} MB to fetch from the Hugging Face hub")
            with _watched(stages, report):
                builder.download_and_prepare()
            splits = builder.as_dataset()
    except Exception as error:  # httpx's, requests', OSError or its own: they share no class
        raise HostError(_get_it(data, _first_line(error))) from error
    yield {name: _of_table(f"{data.name}, {name}", table) for name, table in splits.items()}


@dataclass(frozen=True, slots=True)
class _Stage:
    """Files that the hub's library writes."""

    what: str
    total: int
    """Bytes, once they are all there."""
    files: Callable[[], Iterable[Path]]
    """Those that are there, whole or not."""

    def done(self) -> int:
        """Bytes of them that are on the disk."""
        size = 0
        for path in self.files():
            with contextlib.suppress(OSError):  # it has just been renamed
                stat = path.stat()
                size += min(stat.st_size, 512 * stat.st_blocks)
        return min(size, self.total)


def _stages(builder: Any, known: Iterable[Any], data: DataSettings) -> list[_Stage]:
    """What `builder` fetches and then unpacks, as far as its size is known. `known`: what the hub tells
    of the dataset's files."""
    from huggingface_hub import constants

    wanted = {str(url) for urls in (builder.config.data_files or {}).values() for url in urls}
    sizes = {
        file.blob_id if file.lfs is None else file.lfs.sha256: file.size
        for file in known
        if file.size is not None and any(url.endswith(f"/{file.rfilename}") for url in wanted)
    }
    blobs = Path(constants.HF_HUB_CACHE, f"datasets--{str(data.hub).replace('/', '--')}", "blobs")
    unpacked = Path(f"{builder.cache_dir}.incomplete")
    return [
        _Stage(
            f"Fetching {data.hub}",
            sum(sizes.values()),
            lambda: (path for name in sizes for path in blobs.glob(f"{name}*")),
        ),
        _Stage(f"Unpacking {data.hub}", builder.info.dataset_size or 0, lambda: unpacked.glob("*")),
    ]


@contextlib.contextmanager
def _watched(stages: Sequence[_Stage], report: Report) -> Iterator[None]:
    """Inside, tell how much of each of `stages`, which come one after the other, is done."""
    over = threading.Event()

    def watch() -> None:
        for stage in stages:
            progress = Progress(report, stage.what, of_bytes=True)
            before = done = stage.done()
            while done < stage.total:
                progress(done, stage.total, before)
                if over.wait(_LOOK_SECONDS):
                    return
                done = stage.done()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _get_it(data: DataSettings, reason: str) -> str:
    folder = f"{data.hub}/{data.config}" if data.config else data.hub
    return (
        f"{data.hub} cannot be fetched from the Hugging Face hub ({reason}). Get a network, or the "
        f"dataset's parquet files: --data FOLDER (or TESTBED_DATA) with {folder}/{data.train}-*.parquet "
        f"and {folder}/{data.test}-*.parquet in it. Where there is a network: hf download {data.hub} "
        f"--repo-type dataset --revision refs/convert/parquet --local-dir FOLDER/{data.hub}"
    )


def _of_table(name: str, table: Any) -> RawSplit:
    def batches(wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        chosen = table.select_columns(list(wanted)).with_format("arrow")
        for batch in chosen.iter(_ROWS):
            yield {column: batch.column(column) for column in wanted}

    return RawSplit(name, len(table), {name: table.column_names}, batches)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
