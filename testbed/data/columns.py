"""Columns of a dataset's files as arrays: images, texts, lists of numbers, numbers.

The type of a column decides how it is read. Binary values are encoded images. Lists, and arrays of two
or more dimensions, are the tokens or numbers of a sample. Columns of plain numbers together form a
table.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agents.shards import Shard
from testbed.errors import BadInputError
from testbed.topology.data_settings import DataSettings

if TYPE_CHECKING:
    from PIL.Image import Image

Array = NDArray[Any]

_CHANNELS = (1, 3, 4)
"""Grey, colour, colour with opacity."""
_ID_DIGITS = 20
"""Digits in a client's name that is made from a number, padded with zeros. Every 64-bit number fits."""
_NAMED_CLASSES = 20
"""If there are more classes, only the first and the last are named with their numbers."""
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NAME_CHARACTERS = 20
"""Characters of a class's name in a sentence."""


class DataError(BadInputError):
    def __init__(self, key: str | None, message: str) -> None:
        super().__init__(message)
        self.key = key
        """Setting of `task.data` to change; None if the files themselves are wrong."""


@dataclass(frozen=True, slots=True)
class RawSplit:
    """Undecoded samples of one split (training, test or validation)."""

    name: str
    """For error messages."""
    rows: int
    columns: Mapping[str, Sequence[str]]
    """File name -> names of the file's columns."""
    batches: Callable[[Sequence[str]], Iterator[Mapping[str, Any]]]
    """Takes names of columns and yields batches of rows. A batch maps each column's name to an Arrow or
    numpy array."""
    fixed: bool = False
    """Whether the arrays keep their shape. Otherwise channels come first, and one-hot labels become
    classes."""
    files: Sequence[Path] = ()
    """One per sample; empty if files hold several samples."""
    remarks: Sequence[str] = ()
    """Sentences about what was left out or converted."""
    mixtures: Mapping[str, str] = field(default_factory=dict)
    """Column -> which of its files have another type than the first one."""

    def mixed(self, names: Sequence[str] | None) -> str:
        """For errors."""
        return "".join(f" ({self.mixtures[name]})" for name in names or () if name in self.mixtures)

    def row(self, number: int) -> str:
        """For errors."""
        return f"{number} ({self.files[number]})" if self.files else str(number)


@dataclass(slots=True)
class Names:
    """Numbers from 0 in alphabetical order. Whole numbers are in their own order."""

    known: dict[str, int] = field(default_factory=dict)
    """The numbers are provisional until `order` is called."""

    def add(self, texts: Array) -> NDArray[np.int64]:
        """Return provisional numbers. `order` converts them to final ones."""
        found, places = np.unique(texts, return_inverse=True)
        numbers = [self.known.setdefault(str(text), len(self.known)) for text in found]
        return np.array(numbers, np.int64)[places.reshape(-1)]

    def order(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        whole = all(_WHOLE.fullmatch(text) for text in self.known)
        ordered = sorted(self.known, key=(lambda text: (int(text), text)) if whole else None)
        final = np.empty(len(ordered), np.int64)
        for number, text in enumerate(ordered):
            final[self.known[text]] = number
        self.known = {text: number for number, text in enumerate(ordered)}
        return final[numbers]


@dataclass(frozen=True, slots=True)
class DecodedSplit:
    shard: Shard
    classes: tuple[str, ...]
    """In the order of the class numbers; empty if the labels are not texts."""
    clients: NDArray[np.int64] | None
    """Index in `client_names` for each sample, shape (n,); None if no column names the client."""
    client_names: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    """Sentences about shapes that were changed."""
    one_hot: int = 0
    """Length of the one-hot labels that became classes; 0 if the labels were no such vectors."""


def read(
    split: RawSplit,
    data: DataSettings,
    train: DecodedSplit | None = None,
    count: Callable[[int], object] = lambda _: None,
) -> DecodedSplit:
    """`train`: the decoded training samples; None if `split` has the training samples. `count` is called
    from time to time with the number of samples read so far. The function holds the returned arrays and
    one batch in memory. Raises DataError."""
    inputs = data.input or ()
    wanted = {"input": inputs, "label": (data.label,), "client": (data.client,)}
    for key, given in wanted.items():
        for file, there in split.columns.items():
            if missing := [name for name in given if name is not None and name not in there]:
                has = ", ".join(there) or "none"
                raise DataError(key, f"found {missing[0]!r}, expected a column of {file}: it has {has}")
            if twice := [name for name in given if name is not None and there.count(name) > 1]:
                raise DataError(key, f"{file} has several columns {twice[0]!r}: give each its own name")
    if not split.rows:
        raise DataError(None, f"{split.name} has no samples")
    x: Array | None = None
    labels: list[Array] = []
    owners: list[Array] = []
    names, clients, done = Names(), Names(), 0
    changes = dict.fromkeys(split.remarks)
    columns = list(dict.fromkeys(name for group in wanted.values() for name in group if name))
    for batch in split.batches(columns):
        arrays = [_input(batch[name], data, split, name, done) for name in inputs]
        some = _inputs(arrays, data, split, done)
        if not split.fixed and _has_channels_last(some):
            ordered = _channels_first(some)
            before, after = _shape(some.shape[1:]), _shape(ordered.shape[1:])
            changes[f"Images of shape {before} have their channels last: models get {after}."] = None
            some = ordered
        # One batch of a dataset may have only grey images, and another colour.
        like = train.shard.x if x is None and train is not None else x
        if like is not None and _differ_in_colour(like, some):
            some = _in_colour(some)
        if x is None:
            x = np.empty((split.rows, *some.shape[1:]), some.dtype)
        elif _differ_in_colour(some, x):
            x = _in_colour(x)
        if some.shape[1:] != x.shape[1:]:
            key = "length" if _holds_tokens(x) else "input"
            raise DataError(key, _unequal(split.name, done, x.shape[1:], some.shape[1:]))
        if some.dtype != x.dtype:  # `_compact` chooses the type by the largest token of a batch
            x = x.astype(np.promote_types(x.dtype, some.dtype))
        x[done : done + len(some)] = some
        if data.label is not None:
            place = f"{split.name}, column {data.label}"
            column = _array(batch[data.label], data, place, done, split)
            if train is not None and train.classes and column.dtype.kind != "U":
                raise DataError(
                    "label", f"{place} holds {column.dtype}, but the training samples have texts"
                )
            if not split.fixed and column.shape[1:] == (1,) and column.dtype.kind in "iubU":
                column = column[:, 0]
            labels.append(_labels(column, data, names, place, done, named=bool(train and train.classes)))
        if data.client is not None:
            column = _array(batch[data.client], data, f"{split.name}, column {data.client}", done, split)
            owners.append(clients.add(_as_names(column)))
        done += len(some)
        count(done)
    assert x is not None  # noqa: S101  (there are rows)
    shard = Shard(x, np.empty(0), _scale(x))
    if labels:
        y = np.concatenate(labels)
        if names.known:
            y = _as_classes(y, names, train, split.name)
            if train is None:
                changes[_numbering(tuple(names.known))] = None
        one_hot = 0
        if not split.fixed and (train is None or train.shard.y.ndim == 1) and _is_one_hot(y):
            one_hot = y.shape[1]
            if train is not None and train.one_hot != one_hot:
                before = f"vectors of {train.one_hot}" if train.one_hot else "classes"
                raise DataError(
                    "label",
                    f"{split.name} has one-hot labels of {one_hot} numbers, but the training samples "
                    f"have {before}: use the same columns in both",
                )
            changes[f"Labels are one-hot: they become classes 0 to {one_hot - 1}."] = None
            y = y.argmax(axis=1)
    else:
        one_hot = 0
        y = x.astype(np.int64) if _holds_tokens(x) else x.astype(np.float32) * np.float32(shard.scale)
    found = tuple(names.known) if names.known else ()
    codes = clients.order(np.concatenate(owners)) if owners else None
    remarks, owners_found = tuple(changes), tuple(clients.known)
    return DecodedSplit(Shard(x, y, shard.scale), found, codes, owners_found, remarks, one_hot)


def _numbering(classes: Sequence[str]) -> str:
    """Return a sentence on the numbers of `classes`, which are texts: only of the first and the last if
    there are many."""
    numbered = [
        f"{number} {text if len(text) <= _NAME_CHARACTERS else text[: _NAME_CHARACTERS - 1] + '…'}"
        for number, text in enumerate(classes)
    ]
    if len(numbered) > _NAMED_CLASSES:
        numbered[_NAMED_CLASSES - 2 : -1] = ["…"]
    return f"Labels are texts, numbered as {len(classes):,} classes: {', '.join(numbered)}."


def _has_channels_last(x: Array) -> bool:
    """Whether `x` has images of shape (height, width, channels)."""
    if x.ndim != 4 or x.dtype.kind not in "uf":
        return False
    _, *sides, channels = x.shape
    return channels in _CHANNELS and min(sides) > max(_CHANNELS)


def _channels_first(x: Array) -> Array:
    """Convert images of shape (n, height, width, channels) to (n, height, width) in grey, otherwise to
    (n, channels, height, width)."""
    return x[..., 0] if x.shape[-1] == 1 else x.transpose(0, 3, 1, 2)


def _is_one_hot(y: Array) -> bool:
    if y.ndim != 2 or y.shape[1] < 2:
        return False
    ones = y == 1
    return bool((ones | (y == 0)).all() and (ones.sum(axis=1) == 1).all())


def _as_classes(
    numbers: Array, names: Names, train: DecodedSplit | None, split: str
) -> NDArray[np.int64]:
    if train is None:
        return names.order(numbers)
    place = {name: number for number, name in enumerate(train.classes)}
    if unknown := [name for name in names.known if name not in place]:
        raise DataError(
            "label",
            f"{split} has samples of class {unknown[0]!r}, but no training sample has this class",
        )
    return np.array([place[name] for name in names.known], np.int64)[numbers]


def _differ_in_colour(colour: Array, grey: Array) -> bool:
    """Images must have the same size."""
    in_bytes = colour.dtype == np.uint8 and grey.dtype == np.uint8
    return in_bytes and grey.ndim == 3 and colour.shape[1:] == (3, *grey.shape[1:])


def _in_colour(grey: Array) -> Array:
    """From shape (n, height, width) to (n, 3, height, width)."""
    return np.repeat(grey[:, None], 3, axis=1)


def _input(column: Any, data: DataSettings, split: RawSplit, name: str, first: int) -> Array:
    """Flat lists of bytes could be tokens or pixels. They are read as tokens if `length` is set;
    otherwise DataError is raised."""
    place = f"{split.name}, column {name}"
    array = _array(column, data, place, first, split)
    if array.dtype != np.uint8 or array.ndim != 2 or isinstance(column, np.ndarray):
        return array
    if data.length is None:
        raise DataError(
            "input",
            f"{place} holds lists of uint8, which could be tokens or pixels: if they are tokens, add "
            f"length: {array.shape[1]}; write pixels as lists of rows (height, width), or as an array "
            "in a .npz file",
        )
    return array.astype(np.int16)


def _inputs(arrays: Sequence[Array], data: DataSettings, source: RawSplit, first: int) -> Array:
    """Return inputs before scaling. Several columns form a table."""
    split = source.name
    if len(arrays) > 1 or (arrays[0].ndim == 1 and arrays[0].dtype.kind != "U"):
        for name, array in zip(data.input or (), arrays, strict=True):
            if array.ndim > 1 or array.dtype.kind not in "biuf":
                raise DataError(
                    "input",
                    f"column {name} of {split} does not hold plain numbers{_first_text(array, first)}, "
                    "so it cannot be combined with other columns: name only this one, or leave it out",
                )
        table = _float32(np.stack(arrays, axis=1), f"{split}, input", first, "input")
        for name, array in zip(data.input or (), arrays, strict=True):
            if _collapses(array):
                raise _collapse_error(f"column {name} of {split}")
        return table
    (array,) = arrays
    if array.dtype.kind == "U":
        if data.alphabet is None:
            raise DataError(
                "input",
                f"{split} has texts here{source.mixed(data.input)}: add alphabet, "
                "the characters that the model knows, such as "
                'alphabet: "abcdefghijklmnopqrstuvwxyz .,"; or convert them to lists of token numbers',
            )
        return _characters(array, data, split, first)
    if array.dtype.kind == "f":
        found = _float32(array, f"{split}, input", first, "input")
        if _collapses(array):
            raise _collapse_error(split)
        return found
    if array.dtype.kind == "b":
        return array.astype(np.float32)
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind in "iu":
        if array.size and int(array.min()) < 0:
            raise DataError("input", f"{split} has tokens below 0, expected 0 or more")
        return _compact(array)
    raise DataError("input", f"{split} holds {array.dtype}, expected images, texts or numbers")


def _collapses(values: Array) -> bool:
    """Whether whole numbers, or times in microseconds, that differ become equal in float32."""
    if not values.size or not np.isfinite(values).all() or np.abs(values).max() <= _EXACT:
        return False
    if values.dtype.kind == "f" and not (np.round(values, _MICROSECONDS) == values).all():
        return False  # measurements, which are rounded anyway
    return len(np.unique(values)) > len(np.unique(values.astype(np.float32)))


def _collapse_error(place: str) -> DataError:
    return DataError(
        "input",
        f"{place} has values above 16,777,216 that differ by less than float32 can hold, so models "
        "would see them as equal (times are seconds since 1970): subtract the first value, or divide",
    )


_EXACT, _MICROSECONDS = 2**24, 6
"""Maximum whole number below which float32 holds all, and decimal digits of times."""


def _compact(tokens: Array) -> Array:
    """Take the smallest signed integer type that holds all tokens. The type distinguishes tokens from
    pixels, which are uint8."""
    most = int(tokens.max(initial=0))
    kinds = (np.int8, np.int16, np.int32, np.int64)
    return tokens.astype(next(kind for kind in kinds if most <= np.iinfo(kind).max))


def _labels(
    array: Array, data: DataSettings, names: Names, place: str, first: int, *, named: bool
) -> Array:
    """Return numbers, classes, or provisional numbers of texts.

    `named`: whether all texts are names of classes. If `named` is False and there is an alphabet, texts
    of one character are looked up in the alphabet.
    """
    kind = array.dtype.kind
    if kind == "U":
        named = named or bool(names.known) or data.alphabet is None
        # NumPy stores 4 bytes per character. Texts of earlier batches were looked up in the alphabet.
        if not named and array.dtype.itemsize > 4 and first > 0:
            raise DataError(
                "label",
                f"{place}, row {first}: texts of several characters after texts of one",
            )
        if not named and array.dtype.itemsize == 4 and (array != "").all():
            codes = _lookup(data.alphabet or "", array.view(np.uint32))
            if (codes < 0).any():
                row = int(np.argmax(codes < 0))
                raise DataError(
                    "alphabet",
                    f"{place}, row {first + row}: {str(array[row])!r} is not in the alphabet: add it",
                )
            return codes
        return names.add(array)
    if kind == "f":
        return _float32(array, place, first, "label")
    if kind not in "iub":
        raise DataError("label", f"{place} holds {array.dtype}, expected classes, numbers or texts")
    if array.ndim == 1 and kind == "i" and set(np.unique(array).tolist()) == {-1, 1}:
        raise DataError("label", f"{place}: labels are -1 and 1; write them as classes 0 and 1")
    if array.ndim == 1 and kind == "i" and len(array) and int(array.min()) < 0:
        row = int(np.argmin(array))
        raise DataError(
            "label",
            f"{place}, row {first + row}: found class {int(array[row])}, expected 0 or more. A split "
            "without labels cannot be used: name another one (task.data.train, task.data.test)",
        )
    return array.astype(np.int64)


def _characters(texts: Array, data: DataSettings, split: str, first: int) -> Array:
    """Positions in the alphabet, shape (n, length)."""
    width = texts.dtype.itemsize // 4
    lengths = np.char.str_len(texts)
    if data.length is None and len(texts) and int(lengths.min()) != width:
        row = int(np.argmin(lengths))
        raise DataError(
            "length",
            f"{split}, row {first + row}: a text of {lengths[row]} characters where another has {width}"
            f": add length, such as length: {width}; longer texts are cut, shorter ones padded",
        )
    wide = texts.astype(f"<U{data.length or width}")
    codes = _lookup(data.alphabet or "", wide.view(np.uint32).reshape(len(texts), -1))
    return _compact(np.maximum(codes, 0))


def _lookup(alphabet: str, codes: Array) -> NDArray[np.int64]:
    """−1 for a code point that `alphabet` does not have."""
    letters = np.array(list(alphabet)).view(np.uint32)
    order = np.argsort(letters)
    places = np.searchsorted(letters, codes, sorter=order).clip(max=len(letters) - 1)
    found = order[places]
    return np.where(letters[found] == codes, found, -1)


def _array(column: Any, data: DataSettings, place: str, first: int, split: RawSplit) -> Array:
    """Texts get numpy's type for texts, as wide as the longest text."""
    if isinstance(column, np.ndarray):
        if column.dtype.kind in "OS":
            raise DataError("input", f"{place} holds {column.dtype}, expected numbers or texts")
        return column
    return _array_of_values(column, data, place, lambda index: split.row(first + index))


def _array_of_values(column: Any, data: DataSettings, place: str, row: Callable[[int], str]) -> Array:
    """`row`: converts the index of a value to what to call the value's row, for errors."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):  # the hub's arrays of several dimensions
        column = column.storage
    if column.null_count:
        index = column.is_null().to_pylist().index(True)
        mend = "fill it in, or remove the row (the first row is row 0)"
        raise DataError(None, f"{place}, row {row(index)}: value is missing; {mend}")
    column = _common_type(column)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _array_of_values(column.dictionary_decode(), data, place, row)
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _images(column.field("bytes").to_pylist(), place, row)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _images(column.to_pylist(), place, row)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = column.to_pylist()
        return np.array(texts, f"<U{max(1, max(map(len, texts), default=1))}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(column, data, place, row)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    raise DataError("input", f"{place} holds {kind}, expected images, texts, numbers, or lists of these")


def _common_type(column: Any) -> Any:
    """Cast a column of a rare type to the usual type with the same values.

    Decimals become float64. Times become seconds (float64): dates and timestamps since 1970-01-01 UTC,
    times of day since midnight."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    if types.is_string_view(kind):
        return column.cast(pa.large_string())
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return column.cast(pa.large_list(kind.value_type))
    if types.is_decimal(kind):
        return column.cast(pa.float64())
    if types.is_timestamp(kind) or types.is_date(kind):
        column = column.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
    elif types.is_time(kind):
        column = column.cast(pa.time64("us"), safe=False)
    elif types.is_duration(kind):
        column = column.cast(pa.duration("us"), safe=False)
    else:
        return column
    return pa.array(column.cast(pa.int64()).to_numpy() / 1e6)


def _lists(column: Any, data: DataSettings, place: str, row: Callable[[int], str]) -> Array:
    from pyarrow import compute

    values = column.flatten()
    lengths = np.asarray(compute.list_value_length(column).to_numpy(zero_copy_only=False), np.int64)
    ends = np.cumsum(lengths)

    def row_of_value(index: int) -> str:
        return row(int(np.searchsorted(ends, index, side="right")))

    inner = _array_of_values(values, data, place, row_of_value)
    wanted = data.length
    if len(set(lengths.tolist())) == 1 and wanted in (None, int(lengths[0])):
        return inner.reshape(len(lengths), int(lengths[0]), *inner.shape[1:])
    if wanted is None:
        index = int(np.argmax(lengths != lengths[0]))
        raise DataError(
            "length",
            f"{place}, row {row(index)}: {lengths[index]} values where another has {lengths[0]}: add "
            f"length, such as length: {lengths.max()}; longer lists are cut, shorter ones padded",
        )
    filled = np.zeros((len(lengths), wanted, *inner.shape[1:]), inner.dtype)
    for index, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        begin, kept = end - length, min(length, wanted)
        filled[index, :kept] = inner[begin : begin + kept]
    return filled


def _images(encoded: Iterable[bytes | None], place: str, row: Callable[[int], str]) -> Array:
    """Decode images of one size: shape (n, height, width) in grey, (n, 3, height, width) if one of them
    is in colour.

    `row`: as in `_array_of_values`."""
    import PIL.Image

    decoded: list[Array] = []
    for index, content in enumerate(encoded):
        if content is None:
            raise DataError(None, f"{place}, row {row(index)}: holds only the path of an image")
        try:
            image = PIL.Image.open(io.BytesIO(content))
            one = np.asarray(_in_bytes(image))
        except Exception as error:  # a damaged image may raise anything
            raise DataError(None, f"{place}, row {row(index)}: {error}") from error
        if decoded and one.shape[:2] != decoded[0].shape[:2]:
            raise DataError("input", _unequal(place, row(index), decoded[0].shape, one.shape))
        decoded.append(one)
    if len({one.ndim for one in decoded}) > 1:
        decoded = [one if one.ndim == 3 else np.repeat(one[..., None], 3, axis=2) for one in decoded]
    stacked = np.stack(decoded)
    if stacked.ndim == 4:  # channels first, as torch's convolutions expect
        stacked = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
    return stacked


def _in_bytes(image: Image) -> Image:
    """One byte per pixel and colour. Raises ValueError if that would lose precision."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"its pixels have more than 8 bits (mode {image.mode}): convert the images to 8 bits, or "
            "write them as arrays of float32"
        )
    if image.mode in ("1", "LA"):
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _unequal(place: str, row: int | str, first: tuple[int, ...], other: tuple[int, ...]) -> str:
    return (
        f"{place}, row {row}: a sample of shape {_shape(other)}, but others have {_shape(first)}: give "
        "all the same shape (for texts and lists, add length)"
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"


def _first_text(array: Array, first: int) -> str:
    """Say where the first text is that is not a number, for errors."""
    if array.dtype.kind != "U":
        return ""
    for row, text in enumerate(array.tolist(), first):
        try:
            float(text)
        except ValueError:
            return f" (row {row}: {text!r})"
    return ""


def _float32(values: Array, place: str, first: int, key: str) -> Array:
    """Convert numbers to float32. Raises DataError if one of them is not finite there."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    good = np.isfinite(found).reshape(len(found), -1).all(axis=1)
    if not good.all():
        row = first + int(np.argmin(good))
        told = "value is not a number, or too large for float32; fill it in, or remove the row"
        raise DataError(key, f"{place}, row {row}: {told}")
    return found


def _as_names(column: Array) -> Array:
    if column.ndim > 1:
        raise DataError("client", "found lists, expected names or numbers")
    if column.dtype.kind in "iu":  # padded, so that names sort like the numbers (unless negative)
        # All batches need the same width; otherwise an id would have two names.
        return np.array([f"{value:0{_ID_DIGITS}d}" for value in column.tolist()], dtype=np.str_)
    return column.astype(np.str_)


def _holds_tokens(x: Array) -> bool:
    return x.dtype.kind == "i"


def _scale(x: Array) -> float:
    """Map pixels to the range from 0 to 1. All other inputs keep their values."""
    return 1 / 255 if x.dtype == np.uint8 else 1.0
