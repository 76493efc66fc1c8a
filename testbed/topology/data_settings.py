"""What devices learn from: the settings of a dataset, and what of it a group's devices get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from testbed.topology.fields import Count, FilePath, Model, Share, expecting

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
    """A number as the range that has only this one."""
    return (value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _must(holds: Callable[[Any], bool], text: str) -> AfterValidator:
    """Refuses a value for which `holds` is false: `text` was expected."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"expected {text}")
        return value

    return AfterValidator(check)


_RANGE = "a number such as 30, or the least and the most such as [-30, 30]"
_RANGE_FROM_0 = "a number from 0 on such as 0.5, or the least and the most such as [0.5, 1.5]"
_COLUMNS = "a column such as image, or columns such as [age, income]"
_ALPHABET = "the characters that the model knows such as abc"
_CLASSES = "a list of classes such as [0, 1]"

_Range = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    _must(lambda ends: ends[0] <= ends[1], _RANGE),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting(_RANGE),
]
"""A number, or two between which one is drawn for each device."""
_RangeFrom0 = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    _must(lambda ends: 0 <= ends[0] <= ends[1], _RANGE_FROM_0),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting(_RANGE_FROM_0),
]
_Below1 = Annotated[Share, Field(lt=1), expecting("a share from 0 to below 1 such as 0.1, or 10%")]
_WholeNumber = Annotated[int, Field(ge=0), expecting("a whole number from 0 on")]


class Split(Model):
    """What is set aside of the training samples where the dataset has no samples for it."""

    test: _Below1 = Field(default=0.2, description="Share of the samples, where there is no test split")
    validation: _Below1 = Field(
        default=0.0, description="Share of the samples, where no validation split is named"
    )
    order: Literal["random", "file"] = Field(
        default="random",
        description="random: drawn at random. file: the last ones, of each client where these are "
        "named: for samples that follow each other",
    )
    gap: _WholeNumber = Field(
        default=0,
        description="With order: file, so many samples before each part that is set aside are left out, "
        "as they overlap with it",
    )
    seed: _WholeNumber = Field(default=0, description="Of the draw; the topology's has no influence")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.test + self.validation >= 1:
            raise ValueError("all of the samples are set aside: lower test or validation")
        if self.gap and self.order != "file":
            raise ValueError("gap needs order: file beside it, for samples that follow each other")
        return self


class Data(Model):
    """The dataset that devices learn from, in place of the task's own."""

    hub: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$"),
        expecting("the id of a dataset of the Hugging Face hub such as ylecun/mnist"),
    ] = Field(
        default=None, description="Id of a dataset of the Hugging Face hub; looked for in --data first"
    )
    config: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][\w.-]*$"),
        expecting("the name of a configuration such as sst2"),
    ] = Field(default=None, description="Which configuration (subset) of the hub's dataset")
    path: FilePath | None = Field(
        default=None,
        description="Folder with .parquet or .npz files, or one such file, relative to the topology",
    )
    input: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_as_list),
        _must(lambda names: names != (), _COLUMNS),
        WithJsonSchema(_TEXT_OR_TEXTS),
        expecting(_COLUMNS),
    ] = Field(
        default=None,
        description="Column (array of .npz) of the inputs: images, texts, lists of numbers; or several "
        "columns of numbers. What has a row in the table of known datasets needs none",
    )
    label: str | None = Field(
        default=None,
        description="Column of the labels: classes, numbers, texts; without it a sample's label is its "
        "input",
    )
    client: str | None = Field(
        default=None, description="Column that says whose a sample is, for the natural partition"
    )
    alphabet: Annotated[str | None, Field(min_length=1), expecting(_ALPHABET)] = Field(
        default=None,
        description="Of texts: a character becomes its place in here. One of an input that is not in "
        "here counts as the first",
    )
    length: Count | None = Field(
        default=None,
        description="Of texts and lists: longer ones are cut, shorter ones filled up with 0; needed "
        "where they differ",
    )
    train: str = Field(default="train", description="Split to train on")
    test: str = Field(default="test", description="Split to evaluate on")
    validation: str | None = Field(
        default=None, description="Split to evaluate on with evaluate.on: validation"
    )
    split: Split = Split()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.hub is None) == (self.path is None):
            raise ValueError(
                f"found {'neither hub nor' if self.hub is None else 'both hub and'} path, expected one "
                "of them such as {hub: ylecun/mnist} or {path: mydata, input: x, label: y}"
            )
        if self.path is not None and self.input is None:
            raise ValueError(
                "input is missing; name the column (array of .npz) of the inputs, such as input: x"
            )
        if self.path is not None and self.config is not None:
            raise ValueError("config needs hub beside it: remove it")
        if self.alphabet is not None and len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError("alphabet has a character twice: remove one of them")
        return self

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.path or self.hub}" + (f" ({self.config})" if self.config else "")


class Transform(Model):
    """How the inputs of each device of a group differ from those of the dataset: a shift of features.
    Of two numbers, one between them is drawn for each device, from the seed."""

    rotate: _Range = Field(default=(0.0, 0.0), description="Degrees, counter-clockwise; for images")
    scale: _RangeFrom0 = Field(default=(1.0, 1.0), description="What inputs are multiplied with")
    noise: _RangeFrom0 = Field(
        default=(0.0, 0.0),
        description="Standard deviation of the normal noise that is added to inputs, which for images "
        "are 0 to 1",
    )


class DeviceData(Model):
    """What each device of the group has of the training samples, by hand."""

    samples: Count | None = Field(
        default=None,
        description="So many, drawn at random, which no other device gets; the others have a part of "
        "the rest by task.partition",
    )
    labels: (
        Annotated[
            tuple[_WholeNumber, ...],
            _must(len, _CLASSES),
            expecting(_CLASSES),
        ]
        | None
    ) = Field(default=None, description="Of these classes only")
    transform: Transform | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.labels is not None and self.samples is None:
            raise ValueError("labels needs samples beside it: say how many, such as samples: 500")
        return self
