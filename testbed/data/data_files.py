"""Files of a dataset: in a folder of the user, under a data root in the layout of the Hugging Face hub,
or on the hub itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agents import extras
from testbed.console import ProgressReporter, Report, silent
from testbed.data.columns import DataError, RawSplit
from testbed.errors import BadInputError, HostError
from testbed.topology.data_settings import DataSettings

_ROWS = 1_000
_LOOK_SECONDS = 0.5
"""Seconds between two checks of a download's progress."""
_PATTERNS = ("{split}-*.{kind}", "{split}.{kind}", "{split}/*.{kind}", "data/{split}-*.{kind}")
_TABLES = ("parquet", "npz", "csv", "tsv")
"""Each file holds a split, or a part of a split."""
_IMAGES = ("bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp")
"""Each file holds one sample, in a folder that is named like the sample's class. The names may have
capital letters."""
_CSV_BLOCK = 2**26
"""The types of a CSV file's columns are inferred from this many bytes at its start."""


@dataclass(frozen=True, slots=True)
class Splits:
    """No files if the dataset does not have the split."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    validation: tuple[Path, ...]
    in_one_file: bool = False
    """Whether all splits are in one .npz file. Then the name of each array contains the name of a split:
    `train_images` or `x_train`."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self.train, *self.test, *self.validation)))

    def named(self, split: str | None) -> str | None:
        """Argument `name` of `open_split`."""
        return split if self.in_one_file else None


def local_splits(data: DataSettings, root: Path | None) -> Splits | None:
    """None if the data has to be downloaded from the hub.

    `root`: data root. Raises DataError if the user's folder has no files, BadInputError if `root` is not
    a folder.
    """
    if data.path is not None:
        found = _in_folder(Path(data.path), data)
        if not found.train:
            raise DataError("path", _no_files_message(Path(data.path), data))
        return found
    if root is None:
        return None
    if not root.is_dir():
        raise BadInputError(f"--data (or TESTBED_DATA) {root}: no such folder")
    folder = root / str(data.hub)
    # The parquet files that the hub makes are in one folder per configuration.
    inside = (folder / data.config,) if data.config else (folder, *sorted(folder.glob("*/")))
    whole = [found for one in inside if (found := _in_folder(one, data)).train]
    if len(whole) > 1 and whole[0].train[0].parent != folder:
        names = ", ".join(sorted({found.train[0].relative_to(folder).parts[0] for found in whole}))
        raise DataError("config", f"{folder} has several configurations: add one of {names}")
    return whole[0] if whole else None


def _in_folder(folder: Path, data: DataSettings) -> Splits:
    if folder.is_file():
        return _in_file(folder, data)
    train, test, validation = (
        () if split is None else _split_files(folder, split)
        for split in (data.train, data.test, data.validation)
    )
    if data.path is not None and not (train or test):  # no splits: all samples are for training
        tables = (_glob(folder, f"*.{kind}") for kind in _TABLES)
        train = next(filter(None, tables), ()) or _class_folders(folder)
        if len(train) == 1:
            return _in_file(train[0], data)
    return Splits(train, test, validation)


def _in_file(path: Path, data: DataSettings) -> Splits:
    """Raises DataError."""
    whole = Splits((path,), (), ())
    if path.suffix != ".npz":
        return whole
    names, inputs = set(_array_names(path)), data.input or ()

    def files(split: str | None) -> tuple[Path, ...]:
        columns = () if split is None else _columns_of_split(names, split)
        return (path,) if all(name in columns for name in inputs) else ()

    if names.intersection(inputs) or not files(data.train):
        return whole
    return Splits(files(data.train), files(data.test), files(data.validation), in_one_file=True)


def _columns_of_split(names: Iterable[str], split: str) -> dict[str, str]:
    """Return column -> name of the array. In the split `train`, the array `train_images` is the column
    `images`, and `x_train` is the column `x`."""
    return {
        name.removeprefix(f"{split}_").removesuffix(f"_{split}"): name
        for name in names
        if name.startswith(f"{split}_") or name.endswith(f"_{split}")
    }


def _split_files(folder: Path, split: str) -> tuple[Path, ...]:
    patterns = (pattern.format(split=split, kind=kind) for kind in _TABLES for pattern in _PATTERNS)
    tables = (_glob(folder, pattern) for pattern in patterns)
    return next(filter(None, tables), ()) or _class_folders(folder / split)


def _class_folders(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in _in_classes(folder) if _kind(path) in _IMAGES))


def _in_classes(folder: Path) -> Iterator[Path]:
    """Files with a dot in front are hidden: they belong to editors and file systems
    (`.ipynb_checkpoints`, `._image.png`)."""
    for path in folder.glob("*/*"):
        if path.is_file() and not path.name.startswith(".") and not path.parent.name.startswith("."):
            yield path


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _glob(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern)))


def _no_files_message(folder: Path, data: DataSettings) -> str:
    if not folder.exists():
        return f"{folder} does not exist: the path is relative to the topology's folder"
    return (
        f"{folder} has no {data.train}*.parquet, .npz or .csv, and no {data.train}/CLASS/*.png: put "
        "the files there, or set train to the name of the split"
    )


def open_split(paths: Sequence[Path], name: str | None = None) -> RawSplit:
    """The order is that of `paths`. All files must have the same type.

    `name`: name of the split if one .npz file has all splits. Raises DataError.
    """
    if name is not None:
        return _npz_of_splits(paths[0], name)
    openers = {_OPENERS.get(_kind(path)) for path in paths}
    if len(openers) == 1 and (opener := openers.pop()) is not None:
        return opener(paths)
    raise DataError("path", f"{paths[0]}: expected files of one type, of {', '.join(_OPENERS)}")


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

    return RawSplit(_split_name(paths), rows, columns, batches)


def _npz_of_splits(path: Path, split: str) -> RawSplit:
    arrays = _arrays(path, list(_columns_of_split(_array_names(path), split).values()))
    return split_of_arrays(
        f"{path}, split {split}",
        {name: arrays[key] for name, key in _columns_of_split(arrays, split).items()},
    )


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

    return RawSplit(_split_name(paths), rows, columns, batches)


_SAVE = "save the file in UTF-8"


def _csv(paths: Sequence[Path]) -> RawSplit:
    import pyarrow as pa
    from pyarrow import csv

    types: dict[str, Any] = {}
    """Column -> type for all files, for columns whose files differ in the type that they look like."""

    def table(path: Path, wanted: Sequence[str] = ()) -> pa.Table:
        try:
            return csv.read_csv(
                path,
                *_layout(path),
                csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(wanted),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except (OSError, pa.ArrowException) as error:
            separator = "tabs" if _kind(path) == "tsv" else "commas"
            told = f"not readable as CSV with {separator} between the columns ({_first_line(error)})"
            raise DataError(None, f"{path}: {told}") from error

    def batches(wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        for path in paths:
            for batch in table(path, wanted).to_batches(_ROWS):
                for name in wanted:
                    if pa.types.is_binary(batch.schema.field(name).type):
                        raise DataError(None, f"{path}, column {name} is not UTF-8: {_SAVE}")
                yield {name: batch.column(name) for name in wanted}

    rows, columns = 0, {}
    found: dict[str, list[Any]] = {}
    for path in paths:  # one table in memory at a time
        whole = table(path)
        rows += whole.num_rows
        try:
            columns[str(path)] = tuple(whole.column_names)
        except UnicodeDecodeError as error:
            raise DataError(None, f"{path}: the names of its columns are not UTF-8: {_SAVE}") from error
        for name, kind in {field.name: field.type for field in whole.schema}.items():
            found.setdefault(name, []).append(kind)
    types.update({name: _one_type(kinds) for name, kinds in found.items() if len(set(kinds)) > 1})
    mixtures = {
        name: f"{kinds[0]} in {paths[0].name}, {other} in {paths[kinds.index(other)].name}"
        for name, kinds in found.items()
        if (other := next((kind for kind in kinds if kind != kinds[0]), None)) is not None
    }
    return RawSplit(
        *(_split_name(paths), rows, columns, batches),
        remarks=_padded_numbers(paths[0], found, types),
        mixtures=mixtures,
    )


def _layout(path: Path) -> tuple[Any, Any]:
    """pyarrow's options for reading and parsing a CSV file."""
    from pyarrow import csv

    delimiter = "\t" if _kind(path) == "tsv" else ","
    return csv.ReadOptions(block_size=_CSV_BLOCK), csv.ParseOptions(delimiter=delimiter)


def _one_type(kinds: Sequence[Any]) -> Any:
    """Text if the types are not all numbers."""
    import pyarrow as pa

    known = {kind for kind in kinds if not pa.types.is_null(kind)}
    if len(known) == 1:
        return known.pop()
    numbers = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in known)
    return pa.float64() if numbers else pa.string()


def _padded_numbers(
    path: Path, found: Mapping[str, Sequence[Any]], types: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a sentence for each column of whole numbers whose first values are written with zeros in
    front, such as 007."""
    import pyarrow as pa
    from pyarrow import compute, csv

    whole = [name for name, kinds in found.items() if pa.types.is_integer(types.get(name, kinds[0]))]
    if not whole:
        return ()
    as_texts = csv.ConvertOptions(include_columns=whole, column_types=dict.fromkeys(whole, pa.string()))
    with csv.open_csv(path, *_layout(path), as_texts) as reader:
        first = next(iter(reader), None)
    remarks: list[str] = []
    for name, texts in zip(whole, first.slice(0, _ROWS).columns if first else (), strict=bool(first)):
        padded = texts.filter(compute.match_substring_regex(texts, _PADDED))
        if len(padded):
            text = padded[0].as_py()
            remarks.append(f"{path}, column {name}: {text} is read as the number {int(text)}.")
    return tuple(remarks)


_PADDED = r"^-?0\d+$"


def _image_folder(paths: Sequence[Path]) -> RawSplit:
    """Columns `image` and `label`: the folders are named like the classes."""
    import pyarrow as pa

    def batches(wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        for first in range(0, len(paths), _ROWS):
            part = paths[first : first + _ROWS]
            columns = {"label": pa.array([path.parent.name for path in part])}
            if "image" in wanted:
                columns["image"] = pa.array([path.read_bytes() for path in part], pa.binary())
            yield columns

    folder = paths[0].parent.parent
    columns = {str(folder): ("image", "label")}
    return RawSplit(str(folder), len(paths), columns, batches, files=paths, remarks=left_out(paths))


def left_out(paths: Sequence[Path]) -> tuple[str, ...]:
    """Look for files in class folders that are not images. `paths`: the images; if it has other files,
    there are no class folders, and nothing is left out."""
    if not paths or _kind(paths[0]) not in _IMAGES:
        return ()
    folder = paths[0].parent.parent
    others = set(_in_classes(folder)) - set(paths)
    if not others:
        return ()
    counts = sorted(Counter(path.suffix or path.name for path in others).items())
    empty = sorted({path.parent.name for path in others} - {path.parent.name for path in paths})
    classes = f". No class: {', '.join(empty)}, which has no images" if empty else ""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts)
    return (f"{folder}: {len(others):,} files are no images and left out: {kinds}{classes}.",)


_OPENERS: Mapping[str, Callable[[Sequence[Path]], RawSplit]] = {
    "parquet": _parquet,
    "npz": _npz,
    "csv": _csv,
    "tsv": _csv,
    **dict.fromkeys(_IMAGES, _image_folder),
}


def split_of_arrays(name: str, arrays: Mapping[str, Any], *, fixed: bool = False) -> RawSplit:
    """`arrays`: column -> numpy array. `name`: name of the data in errors. `fixed`: as in `RawSplit`.
    Raises DataError."""
    return RawSplit(name, _rows(name, arrays), {name: tuple(arrays)}, lambda _: iter([arrays]), fixed)


def _rows(name: str, arrays: Mapping[str, Any]) -> int:
    lengths = {key: array.shape[:1] for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        told = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        hint = "; to read x_train and x_test as splits, set input: x" * any(
            "train" in key for key in arrays
        )
        raise DataError(None, f"{name}: expected arrays with a row for each sample, found {told}{hint}")
    rows: int = next(iter(lengths.values()))[0]
    return rows


def _array_names(path: Path) -> list[str]:
    with _npz_errors(path), np.load(path, allow_pickle=False) as file:
        return list(file.files)


def _arrays(path: Path, wanted: Sequence[str] | None = None) -> dict[str, Any]:
    with _npz_errors(path), np.load(path, allow_pickle=False) as file:
        # What is no array in the archive comes as bytes.
        return {name: np.asarray(file[name]) for name in (file.files if wanted is None else wanted)}


@contextlib.contextmanager
def _npz_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        raise DataError(
            None, f"{path}: not readable as .npz without pickled objects ({_first_line(error)})"
        ) from error


def _split_name(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0].parent}/{paths[0].stem.split('-')[0]}*"


@contextlib.contextmanager
def fetch_splits(data: DataSettings, report: Report = silent) -> Iterator[Mapping[str, RawSplit]]:
    """Yield the splits by name. `report` is called with progress lines. Raises HostError, and
    BadInputError if the hub's libraries are not installed."""
    for package in ("datasets", "huggingface_hub"):
        if message := extras.missing(package):
            raise BadInputError(_not_fetched_message(data, message))
    # The libraries read this variable when they are imported. They then send no usage statistics.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        known: Any = ()
        # This request has a timeout. Without a network, the library below retries for half a minute.
        with contextlib.suppress(OfflineModeIsEnabled):
            info = huggingface_hub.HfApi().dataset_info(str(data.hub), timeout=10, files_metadata=True)
            known = info.siblings or ()
        with _without_progress_bars():
            builder = datasets.load_dataset_builder(data.hub, data.config)
            stages = _stages(builder, known, data)
            if (size := stages[0].total - stages[0].done()) > 0:
                report(f"{data.hub}: {size / 1e6:,.1f} MB to download from the Hugging Face hub")
            with _reporting_progress(stages, report):
                builder.download_and_prepare()
            splits = builder.as_dataset()
    except Exception as error:  # errors of these libraries share no base class
        reason = f"{_first_line(error)}. Connect to a network"
        raise HostError(_not_fetched_message(data, reason)) from error
    yield {name: _split_of_table(f"{data.name}, {name}", table) for name, table in splits.items()}


@dataclass(frozen=True, slots=True)
class _Stage:
    """The size of the files that the hub's library writes shows the progress."""

    what: str
    total: int
    """Bytes of all files when the stage is finished."""
    files: Callable[[], Iterable[Path]]
    """Files that exist now, complete or not."""

    def done(self) -> int:
        """Return the bytes on the disk."""
        size = 0
        for path in self.files():
            with contextlib.suppress(OSError):  # the file may have been renamed
                stat = path.stat()
                size += min(stat.st_size, 512 * stat.st_blocks)
        return min(size, self.total)


def _stages(builder: Any, known: Iterable[Any], data: DataSettings) -> list[_Stage]:
    """Downloading, unpacking. The size of a stage is 0 if it is unknown. `known`: the dataset's files
    according to the hub."""
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
            f"Downloading {data.hub}",
            sum(sizes.values()),
            lambda: (path for name in sizes for path in blobs.glob(f"{name}*")),
        ),
        _Stage(f"Unpacking {data.hub}", builder.info.dataset_size or 0, lambda: unpacked.glob("*")),
    ]


@contextlib.contextmanager
def _reporting_progress(stages: Sequence[_Stage], report: Report) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        for stage in stages:
            progress = ProgressReporter(report, stage.what, of_bytes=True)
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


def _not_fetched_message(data: DataSettings, reason: str) -> str:
    """`reason`: what is wrong, and one way to repair it."""
    folder = f"{data.hub}/{data.config}" if data.config else data.hub
    return (
        f"{data.hub} cannot be downloaded from the Hugging Face hub: {reason}, or use --data FOLDER (or "
        f"TESTBED_DATA) with {folder}/{data.train}-*.parquet and {folder}/{data.test}-*.parquet in it. "
        f"To get these files on a machine with a network: hf download {data.hub} --repo-type dataset "
        f"--revision refs/convert/parquet --local-dir FOLDER/{data.hub}"
    )


def _split_of_table(name: str, table: Any) -> RawSplit:
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
