"""What devices learn from: the settings of a dataset, and what of it a group's devices get."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from testbed.topology.fields import Count, Model, Share, expecting

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


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError
    return value


def _as_range(value: Any) -> Any:
    """A number as the range that has only this one."""
    return (value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _rising(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError
    return value


def _not_negative(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] < 0:
        raise ValueError
    return _rising(value)


_Range = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    AfterValidator(_rising),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting("a number such as 30, or the least and the most such as [-30, 30]"),
]
"""A number, or two between which one is drawn for each device."""
_RangeFrom0 = Annotated[
    tuple[float, float],
    BeforeValidator(_as_range),
    AfterValidator(_not_negative),
    WithJsonSchema(_NUMBER_OR_TWO),
    expecting("a number from 0 on such as 0.5, or the least and the most such as [0.5, 1.5]"),
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
            raise ValueError("test and validation together are all of the samples: lower one of them")
        if self.gap and self.order != "file":
            raise ValueError("gap is for samples that follow each other: add order: file, or remove it")
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
    path: str | None = Field(
        default=None,
        description="Folder with .parquet or .npz files, or one such file, relative to the topology",
    )
    input: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_as_list),
        AfterValidator(lambda value: value and _not_empty(value)),
        WithJsonSchema(_TEXT_OR_TEXTS),
        expecting("a column such as image, or columns such as [age, income]"),
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
    alphabet: str | None = Field(
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
            raise ValueError("config is for datasets of the hub: remove it")
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
            AfterValidator(_not_empty),
            expecting("a list of classes such as [0, 1]"),
        ]
        | None
    ) = Field(default=None, description="Of these classes only")
    transform: Transform | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.labels is not None and self.samples is None:
            raise ValueError("labels without samples; say how many of these, such as samples: 500")
        return self
