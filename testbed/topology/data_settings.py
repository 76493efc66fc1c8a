"""Settings of the data: the dataset, and how many and which samples the devices of a group get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from testbed.topology.fields import Count, FilePath, Model, Share, expecting, optional

_NUMBER_OR_TWO = {
    "anyOf": [
        {"type": "number"},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    ]
}
_TEXT_OR_TEXTS = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_range(value: Any) -> Any:
    return (value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _require(is_valid: Callable[[Any], bool], text: str) -> AfterValidator:
    """The message says that `text` was expected."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(f"expected {text}")
        return value

    return AfterValidator(check)


_RANGE = "a number such as 30, or a minimum and a maximum such as [-30, 30]"
_RANGE_FROM_0 = "a number of at least 0 such as 0.5, or a minimum and a maximum such as [0.5, 1.5]"
_COLUMNS = "a column such as image, or columns such as [age, income]"
_ALPHABET = "the characters that the model knows such as abc"
_CLASSES = "a list of classes such as [0, 1]"

_Range = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    _require(lambda ends: ends[0] <= ends[1], _RANGE),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting(_RANGE),
]
"""From a range [minimum, maximum], a number is drawn for each device."""
_RangeFrom0 = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    _require(lambda ends: 0 <= ends[0] <= ends[1], _RANGE_FROM_0),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting(_RANGE_FROM_0),
]
_Below1 = Annotated[
    Share, Field(lt=1), expecting("a share of at least 0 and below 1 such as 0.1, or 10%")
]
_WholeNumber = Annotated[int, Field(ge=0), expecting("a whole number of at least 0")]


class Split(Model):
    """Training samples to set aside for evaluation if the dataset has no split for it."""

    test: _Below1 = optional("Share of the samples, used if the dataset has no test split", 0.2)
    validation: _Below1 = optional("Share of the samples, used if data.validation names no split", 0.0)
    order: Literal["random", "file"] = optional(
        "Which samples to set aside. random: drawn at random; file: the last samples in the file, or "
        "of each client if data.client is set, for time series and other sequences",
        "random",
    )
    gap: _WholeNumber = optional(
        "Number of samples to leave out before each part that is set aside, because these samples "
        "overlap with that part. Needs order: file",
        0,
    )
    seed: _WholeNumber = optional("Seed of the draw. The topology's seed does not change the split", 0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.test + self.validation >= 1:
            raise ValueError("no sample is left to train on: lower test or validation")
        if self.gap and self.order != "file":
            raise ValueError("gap needs order: file: add it, or remove gap")
        return self


class DataSettings(Model):
    """Dataset to train on, in place of the task's own dataset. Needs hub or path."""

    hub: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$"),
        expecting("the id of a dataset on the Hugging Face hub such as ylecun/mnist"),
    ] = optional("Id of a dataset on the Hugging Face hub; the folder --data is searched first")
    config: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][\w.-]*$"),
        expecting("the name of a configuration such as sst2"),
    ] = optional("Configuration (subset) of the hub's dataset")
    path: FilePath | None = optional(
        "A .parquet, .npz, .csv or .tsv file, or a folder of such files or of images in one folder per "
        "class, relative to the topology file"
    )
    input: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_as_list),
        _require(lambda names: names != (), _COLUMNS),
        WithJsonSchema(_TEXT_OR_TEXTS),
        expecting(_COLUMNS),
    ] = optional(
        "Column (array of a .npz file) of the inputs: images, texts or lists of numbers. Or a list of "
        "columns of numbers. Not needed for the hub datasets of the built-in tasks"
    )
    label: str | None = optional(
        "Column of the labels: classes, numbers or texts. Default: a sample's label is its input"
    )
    client: str | None = optional(
        "Column with the client that a sample belongs to, for partition scheme natural"
    )
    alphabet: Annotated[str | None, Field(min_length=1), expecting(_ALPHABET)] = optional(
        "For texts: characters that the model knows. A character becomes its position among them. An "
        "unknown character of an input becomes the first one"
    )
    length: Count | None = optional(
        "Length of texts and lists: longer ones are cut, shorter ones are padded with 0. Needed if "
        "their lengths differ"
    )
    train: str = optional("Name of the split to train on", "train")
    test: str = optional("Name of the split to evaluate on", "test")
    validation: str | None = optional("Name of the split to evaluate on with evaluate.on: validation")
    split: Split = Split()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.hub is None) == (self.path is None):
            raise ValueError(
                f"found {'neither hub nor' if self.hub is None else 'both hub and'} path, expected one "
                "of them such as {hub: ylecun/mnist} or {path: mydata, input: x, label: y}"
            )
        if self.path is not None and self.input is None:
            raise ValueError(
                "input is missing; name the column (array of a .npz file) of the inputs, such as "
                "input: x; of a folder of images it is image, and the label is label"
            )
        if self.path is not None and self.config is not None:
            raise ValueError("config needs hub, not path: remove it")
        if self.alphabet is not None and len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError("alphabet has a character twice: remove one of the two")
        return self

    @model_serializer(mode="wrap")
    def _without_unset_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that the user wrote: a split that is named must exist, and a key that is
        set replaces that of a dataset known by its name."""
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    @property
    def name(self) -> str:
        """For messages, such as `nyu-mll/glue (sst2)`."""
        return f"{self.path or self.hub}" + (f" ({self.config})" if self.config else "")


class Transform(Model):
    """Changes of the inputs of each device of the group (feature shift). If a range [min, max] is given,
    each device draws one value from it by the seed."""

    rotate: _Range = optional("Degrees to rotate images, counter-clockwise", (0.0, 0.0))
    scale: _RangeFrom0 = optional("Factor to multiply inputs with", (1.0, 1.0))
    noise: _RangeFrom0 = optional(
        "Standard deviation of normal noise to add to inputs. The values of images are 0 to 1",
        (0.0, 0.0),
    )


class DeviceDataSettings(Model):
    """Training samples of each device of the group: their number, their classes, and changes of their
    inputs. Without `samples` and `classes`, task.partition chooses the samples."""

    samples: _WholeNumber | None = optional(
        "Number of samples of each device, drawn at random; no other device gets them. task.partition "
        "divides the rest among the other devices. 0: the device does not train, and no rule sends it a "
        "model"
    )
    labels: (
        Annotated[
            tuple[_WholeNumber, ...],
            _require(len, _CLASSES),
            expecting(_CLASSES),
        ]
        | None
    ) = optional("Classes to draw the samples from. Default: all")
    transform: Transform | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.labels is not None and self.samples is None:
            raise ValueError("labels needs samples: add their number, such as samples: 500")
        return self
