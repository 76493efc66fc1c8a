"""Types of the fields of a topology: bounded numbers, quantities, and named variants."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import ipaddress
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from packaging import requirements
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from agents import config, user_code
from agents.timing.durations import DISTRIBUTIONS
from testbed.topology import units, yamlfile

P = TypeVar("P", bound="Parameters")


class Model(BaseModel):
    """Base class of the models: strict types, immutable, unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _list_known_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            known = {"known": [field.alias or name for name, field in cls.model_fields.items()]}
            found: list[Any] = error.errors(include_url=False)
            for details in found:
                kind = details["type"]
                if kind == "extra_forbidden":
                    details["type"] = PydanticCustomError("unknown_key", "unknown key", known)
                elif kind in ("unknown_key", "complete", "reported"):  # our own errors, from a field
                    details["type"] = PydanticCustomError(kind, details["msg"], details.get("ctx"))
            raise ValidationError.from_exception_data(error.title, found) from None


def optional(
    description: str | None = None, default: Any = None, *, hidden: bool = False, **more: Any
) -> Any:
    """Return a field. `hidden`: a file is written without the key if it has its default."""
    if hidden:
        more["exclude_if"] = lambda value: value == default
    return Field(default=default, description=description, **more)


def expecting(text: str) -> WrapValidator:
    """Replace pydantic's message on a wrong type or bound.

    A message of the testbed itself, such as the message about a quantity's unit, is kept.
    """

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if any(details["type"] == "value_error" for details in error.errors()):
                raise
            raise ValueError(f"expected {text}") from None

    return WrapValidator(validate)


def _text(pattern: str, *examples: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "examples": list(examples)}


_NUMBER = "^[0-9]+(\\.[0-9]+)? ?"

Rate = Annotated[
    int,
    BeforeValidator(units.rate),
    PlainSerializer(units.format_rate),
    WithJsonSchema(_text(_NUMBER + "[kKmMgG]?([bB]it(/s)?|bps|b/s)$", "5mbit", "200kbit")),
]
SECONDS_SCHEMA = _text(_NUMBER + "(us|µs|\u03bcs|ms|s|min|h)$", "80ms", "30s", "2min")
Seconds = Annotated[
    float,
    BeforeValidator(units.duration),
    PlainSerializer(units.format_duration),
    WithJsonSchema(SECONDS_SCHEMA),
]
Frequency = Annotated[
    float,
    BeforeValidator(units.frequency),
    PlainSerializer(units.format_frequency),
    WithJsonSchema(
        {"type": "string", "pattern": f"^{units.FREQUENCY.pattern}$", "examples": ["2/min", "0.5/s"]}
    ),
]
Size = Annotated[
    int,
    BeforeValidator(units.size),
    PlainSerializer(units.format_size),
    WithJsonSchema(_text(_NUMBER + "([KMG]iB|[kMG]?B)$", "512MiB", "1GiB")),
]
LEAST_MEMORY = 256 * 2**20
"""Bytes: PyTorch alone takes about 240 MB."""
Memory = Annotated[
    Size,
    Field(ge=LEAST_MEMORY),
    expecting("a size of at least 256MiB (PyTorch alone takes about 240MB) such as 512MiB"),
]
DEFAULT_MEMORY = 512 * 2**20
"""Bytes, if neither the topology nor a profile sets a limit."""
Share = Annotated[
    float,
    BeforeValidator(units.share),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _text(_NUMBER + "%$", "90%")]}
    ),
]
RelativeError = Annotated[
    float,
    BeforeValidator(units.relative_error),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _text(_NUMBER + "%$", "10%")]}),
]
Watts = Annotated[
    float,
    BeforeValidator(units.power),
    PlainSerializer(units.format_power),
    WithJsonSchema(_text(_NUMBER + "m?W$", "6.4W", "350mW")),
]
Joules = Annotated[
    float,
    BeforeValidator(units.energy),
    PlainSerializer(units.format_energy),
    WithJsonSchema(_text(_NUMBER + "([mk]?Wh|k?J)$", "18Wh", "36kJ")),
]
JoulesPerMegabyte = Annotated[
    float,
    BeforeValidator(units.energy_per_megabyte),
    PlainSerializer(units.format_energy_per_megabyte),
    WithJsonSchema(_text(_NUMBER + "(m?J/MB|J/GB)$", "5J/MB", "80mJ/MB")),
]
PositiveSeconds = Annotated[Seconds, Field(gt=0), expecting("a duration above zero such as 30s")]
PositiveShare = Annotated[
    Share, Field(gt=0), expecting("a share above 0 and at most 1 such as 0.9, or 90%")
]
Cpu = Annotated[
    float,
    BeforeValidator(units.cpu),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _text(_NUMBER + "%$", "25%")]}),
    Field(gt=0),
    expecting("a positive share of one host core such as 0.25"),
]
Count = Annotated[int, Field(ge=1, le=10**15), expecting("a whole number from 1 to 10^15")]
"""The upper bound ensures that products of a few such numbers fit into a float."""
Positive = Annotated[float, Field(gt=0), expecting("a number above 0")]
NotNegative = Annotated[float, Field(ge=0), expecting("a number of at least 0")]
Name = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$"),
    expecting("a name of at most 40 lower-case letters, digits and -, such as pi-4"),
]


def _ip_address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"found {text}, expected an IP address such as 192.168.1.10") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(
            f"found {text}, expected the address of one network of this host, such as 192.168.1.10: "
            "`ip address` lists them"
        )
    return str(address)


IpAddress = Annotated[str, AfterValidator(_ip_address)]


def _requirement(text: str) -> str:
    try:
        requirements.Requirement(text)
    except requirements.InvalidRequirement as error:
        raise ValueError("expected a requirement of pip such as einops or scipy>=1.11") from error
    return text


Requirement = Annotated[str, AfterValidator(_requirement)]


def from_file(path: str, info: ValidationInfo) -> str:
    """The copy of the topology in the run directory then names the same file."""
    context = info.context or {}
    folder, limits = context.get(FOLDER), context.get(yamlfile.BOUNDARY_KEY)
    found = path if folder is None else str(Path(folder) / path)
    if limits is not None:
        limits.inside(Path(found))
    return found


def needs_trust(what: str) -> AfterValidator:
    """Return a validator that refuses any value in a topology of somebody else that is not trusted.
    `what`: what the value would run or reach."""

    def check(value: Any, info: ValidationInfo) -> Any:
        limits = (info.context or {}).get(yamlfile.BOUNDARY_KEY)
        if value and limits is not None:
            limits.program(what)
        return value

    return AfterValidator(check)


FOLDER = "folder"
"""Key of the validation context: absolute path of the topology file's folder."""
FilePath = Annotated[str, AfterValidator(from_file)]


class Thermal(Model):
    """Slow-down by heat: at a fixed time of the run, a device loses part of its CPU share. Its load has
    no influence."""

    after: PositiveSeconds = Field(
        description="Device time from the start of the run clock to the slow-down"
    )
    to: PositiveShare = Field(
        description="Factor on the CPU share that the device has at that time, such as 60%"
    )


class Parameters(Model):
    """Base class of models that have the fields of a dataclass."""

    parameters: ClassVar[type]
    seconds: ClassVar[Any] = Seconds
    """Type of the model's fields that hold seconds."""

    @property
    def params(self) -> dict[str, Any]:
        values = {field: getattr(self, field) for field in dataclass_fields(self.parameters)}
        return {
            name: value.build() if isinstance(value, Parameters) else value
            for name, value in values.items()
        }

    def build(self) -> Any:
        """The constructor raises ValueError if parameters conflict."""
        return self.parameters(**self.params)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.build()
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Docstrings of the dataclass's fields become descriptions of the properties."""
        found = handler(schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        for name, text in docstrings(cls.parameters).items():
            properties[name].setdefault("description", text)
        return found


class Variant(Parameters):
    """Base class of models with a name, and the parameters of the dataclass of that name."""

    tag: ClassVar[str] = "name"

    @property
    def named(self) -> config.Named:
        return config.Named(getattr(self, self.tag), self.params)


class OneOf:
    """Type annotation for a field that holds a Variant: one of `types`, selected by name.

    `Annotated[Rule, OneOf(RULES)]` reads `{name: fedbuff, buffer_size: 3}` into a subclass of Rule that
    has the fields of `RULES["fedbuff"]`.
    """

    def __init__(self, types: Mapping[str, type], *, own: str | None = None) -> None:
        """`own`: also accept a user's class, written `module:Class`. The validation context then needs a
        dictionary under the key `own`, which maps the names of these classes to dataclasses."""
        self._types = types
        self._own = own

    def __get_pydantic_core_schema__(
        self, base: type[Variant], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        models = tuple(_variant(base, name, cls) for name, cls in self._types.items())
        union: Any = Union[models]  # noqa: UP007  (known at run time only)
        schema = handler.generate_schema(Annotated[union, Field(discriminator=base.tag)])
        if self._own is None:
            return schema

        def validate(value: Any, built_in: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            name = value.get(base.tag) if isinstance(value, Mapping) else None
            if not isinstance(name, str) or not user_code.is_user_code(name):
                return built_in(value)
            classes = (info.context or {}).get(self._own, {})
            if name not in classes:  # reading the user's code has reported why
                raise PydanticCustomError("reported", "an error that is reported elsewhere")
            return _own_variant(base, name, classes[name]).model_validate(value, context=info.context)

        def dump(value: Variant, info: SerializationInfo) -> dict[str, Any]:
            return value.model_dump(mode=info.mode, by_alias=info.by_alias)  # `schema` lacks own classes

        return core_schema.with_info_wrap_validator_function(
            validate,
            schema,
            serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        if self._own is not None:
            name = {
                "type": "string",
                "pattern": r"^[\w.]+:\w+$",
                "description": "module:Class in `code`",
            }
            if self._own == "task":
                name["pattern"] = rf"^([\w.]+:\w+|{'|'.join(user_code.HOSTS)})$"
                name["description"] += "; or flower for a Flower ClientApp in `code`"
            own = {"type": "object", "properties": {"name": name}, "required": ["name"]}
            found["oneOf"].append(own)
        return found


class NameChoice:
    """Type annotation for a str field that accepts only `names`. Unlike Literal, it can be used if the
    names are known only at run time."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self._names))


class OrConstant:
    """Type annotation for a field that holds a distribution. It accepts `200ms` as a short form of
    `{distribution: constant, value: 200ms}`."""

    def __init__(self, types: tuple[type, ...], schema: dict[str, Any], expected: str) -> None:
        """`types`, `schema`: of the short form. `expected`: description of valid values, for the error
        message."""
        self._types = types
        self._schema = schema
        self._expected = expected

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._spell_out, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [self._schema, handler(schema)]}

    def _spell_out(self, value: Any) -> Any:
        if isinstance(value, self._types) and not isinstance(value, bool):
            return {"distribution": "constant", "value": value}
        if not isinstance(value, dict | Model):
            raise ValueError(f"expected {self._expected}")
        return value


def _own_variant(base: type[Variant], name: str, cls: type) -> type[Variant]:
    taken = [field.name for field in dataclasses.fields(cls) if hasattr(base, field.name)]
    taken += [field.name for field in dataclasses.fields(cls) if field.name in base.model_fields]
    if taken:
        message = f"the topology has a key named like its parameter {taken[0]}: rename the parameter"
        raise PydanticCustomError("complete", "{message}", {"message": f"{name}: {message}"})
    return _variant(base, name, cls)


@functools.lru_cache(maxsize=256)  # many fields are durations, which share these distributions
def _variant(base: type[Variant], name: str, cls: type) -> type[Variant]:
    tag: Any = Literal  # its values are known at run time only
    return _create(base, cls, cls, **{base.tag: tag[name]})


def with_fields_of(cls: type) -> Callable[[type[P]], type[P]]:
    return lambda model: _create(model, cls, model)


def _create(base: type[P], cls: type, like: type, **tag: Any) -> type[P]:
    """Name and docstring are those of `like`."""
    fields = tag | dataclass_fields(cls, base.seconds)
    names: dict[str, Any] = {"__module__": like.__module__, "__doc__": like.__doc__}
    model = create_model(like.__name__, __base__=base, **names, **fields)
    model.parameters = cls
    return model


@functools.cache
def dataclass_fields(cls: type, seconds: Any = Seconds) -> dict[str, tuple[Any, Any]]:
    """Return type and default by name. The default is `...` if the field has no default. The types read
    values with units. `seconds` is the type of fields in seconds."""
    readers = _READERS | {"s": seconds}
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: (
            _with_units(hints[field.name], readers),
            ... if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(cls)
    }


def docstrings(cls: type) -> dict[str, str]:
    """Return field -> docstring as one line. They are parsed from the source, because Python does not
    keep them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _trim(value: Any) -> Any:
    try:
        if value == "median" or units.share(value) < 0.5:
            return value if value == "median" else units.share(value)
    except ValueError:
        pass
    raise ValueError("expected a share of at least 0 and below 0.5 such as 0.2, or median")


@functools.cache
def parameters_of(cls: type) -> type[Parameters]:
    return _create(Parameters, cls, cls)


_READERS: dict[str, Any] = {
    "s above 0": PositiveSeconds,
    "share above 0": PositiveShare,
    "share": Share,
    "bit/s": Rate,
    "count": Count,
    "count from 0": Annotated[int, Field(ge=0), expecting("a whole number of at least 0")],
    "positive": Positive,
    "not negative": NotNegative,
    "below 1": Annotated[float, Field(ge=0, lt=1), expecting("a number of at least 0 and below 1")],
    "name": Name,
    "share to trim": Annotated[
        float | Literal["median"],
        BeforeValidator(_trim),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "minimum": 0, "exclusiveMaximum": 0.5},
                    _text(_NUMBER + "%$|^median$", "20%", "median"),
                ]
            }
        ),
    ],
}
"""Types that read a field and check its bounds, by the mark in its `Annotated` hint."""


def _with_units(hint: Any, readers: Mapping[str, Any]) -> Any:
    """Replace each marked type in `hint`, such as `Annotated[float, "s"]`, and each dataclass by a model
    of it."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return parameters_of(hint)
    if get_origin(hint) is Annotated:
        return next((readers[mark] for mark in get_args(hint)[1:] if mark in readers), hint)
    if args := get_args(hint):
        if get_origin(hint) is Literal:
            return hint
        inner = tuple(_with_units(arg, readers) for arg in args)
        origin = get_origin(hint)
        return Union[inner] if origin in (Union, UnionType) else origin[inner]  # noqa: UP007
    return hint


class _RandomDuration(Variant):
    """Random duration. A value is drawn from the distribution each time."""

    tag: ClassVar[str] = "distribution"
    distribution: str

    def plain(self) -> config.DrawnDuration:
        return config.DrawnDuration(self.distribution, self.params)


Duration = Annotated[
    _RandomDuration,
    OneOf(DISTRIBUTIONS),
    OrConstant(
        (str,),
        SECONDS_SCHEMA,
        "a duration such as 200ms, or a distribution such as {distribution: exponential, mean: 200ms}",
    ),
]
