"""Pydantic's errors in the project's form: place, key, the value found, and what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from testbed.topology.yamlfile import Document, Problem, Where

M = TypeVar("M", bound=BaseModel)

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "keys and values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "string_type": "a text (in quotes, if it looks like something else)",
    "tuple_type": "a list",
}
"""Texts by pydantic's error type, for fields without a message of their own."""

_EXAMPLES = {
    "alpha": "alpha: 0.3",
    "at": "at: 10s",
    "availability": "availability: {on: 30s, off: 5s}",
    "churn": "churn: {rate: 2/min, downtime: 10s}",
    "devices": "devices: [{name: nano, count: 4, cpu: 0.25}]",
    "distribution": "distribution: exponential",
    "downtime": "downtime: 10s",
    "evaluate": "evaluate: {every: 2s}",
    "link": "link: {up: 5mbit, down: 20mbit}",
    "local": "local: {steps: 20, batch_size: 32, lr: 0.1}",
    "name": "name: quickstart",
    "partition": "partition: {scheme: dirichlet, alpha: 0.3}",
    "rate": "rate: 2/min",
    "rule": "rule: {name: fedbuff, buffer_size: 3}",
    "runtime": "runtime: {name: docker}",
    "scheme": "scheme: dirichlet",
    "selection": "selection: {name: oort}",
    "server": "server: {link: {up: 100mbit, down: 100mbit}}",
    "start": "start: {timeout: 5min, quorum: 90%}",
    "stop": "stop: {after: 60s}",
    "task": "task: {name: digits-logreg, local: {steps: 20}}",
    "topology": "topology: topologies/quickstart.yaml",
}
"""Messages show the example if the key is missing, or if the key has a value where it needs keys of its
own."""

_SHORT_CHOICE = "choice"
"""Distribution whose short form has no tag (`testbed.fleets.settings`)."""
_TAGS = ("name", "distribution", "scheme", "kind")
"""Keys whose value selects a variant, such as `name` in `rule: {name: fedbuff}`."""


def validate(
    model: type[M],
    document: Document,
    problems: Iterable[Problem] = (),
    context: Mapping[str, Any] | None = None,
) -> M:
    """Raises FaultyFileError that lists pydantic's errors, the problems of the document, and
    `problems`."""
    try:
        return model.model_validate(document.data, context=context)
    except ValidationError as error:
        errors = (one for one in error.errors(include_url=False) if one["type"] != "reported")
        found = (_problem(details, document) for details in errors)
        raise document.source.error([*document.problems, *problems, *found]) from None


def conflict(document: Document, where: Where, error: ValueError) -> Problem:
    """`error` is about several values at `where`. If its message begins with the key of one of these
    values, the problem points to that value."""
    message = str(error)
    first, _, rest = message.partition(" ")
    first = first.rstrip(":")
    values = document.value(where)
    if isinstance(values, Mapping) and first in values:
        where = (*where, first)
        message = f"found {rest[3:]}" if rest.startswith("is ") else rest
    return document.source.problem(where, message)


def _problem(details: ErrorDetails, document: Document) -> Problem:
    source, context = document.source, details.get("ctx", {})
    is_key = details["loc"][-1:] == ("[key]",)
    where = _path_in_file(details["loc"][:-1] if is_key else details["loc"], document.data)
    match details["type"]:
        case "unknown_key":
            known = context["known"]
            hint = did_you_mean(str(where[-1]), known) or f"expected one of {', '.join(known)}"
            return source.problem(where, f"unknown key; {hint}", at_key=True)
        case "complete":  # the message needs neither what was found nor what was expected
            return source.problem(where, details["msg"])
        case "missing":
            return source.problem(where[:-1], _missing(str(where[-1])))
        case "union_tag_not_found":
            return source.problem(where, _missing(_quoted_words(context["discriminator"])[0]))
        case "union_tag_invalid":
            (tag,) = _quoted_words(context["discriminator"])
            expected = _one_of(details["input"][tag], _quoted_words(context["expected_tags"]))
            where, found = (*where, tag), details["input"][tag]
        case "literal_error":
            found = details["input"]
            choices = _quoted_words(context["expected"]) or re.split(", | or ", context["expected"])
            expected = _one_of(found, choices)
        case "value_error" if not str(context["error"]).startswith("expected"):
            return conflict(document, where, context["error"])
        case "value_error":
            found, expected = details["input"], str(context["error"])
        case "model_type" | "model_attributes_type":
            found, expected = details["input"], _keys_expected(where)
        case kind:
            found = details["input"]
            expected = f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else details["msg"]
    return source.problem(where, f"found {_format(found)}, {expected}", at_key=is_key)


def _path_in_file(loc: Where, data: Any) -> Where:
    """Pydantic adds the names of variants to `loc`, but they are not keys of the file."""
    where: Where = ()
    for key in loc:
        if isinstance(data, Mapping):
            if key not in data and key in (data.get(tag) for tag in _TAGS):
                continue
            if key == _SHORT_CHOICE and not data.keys() & {key, "distribution"}:
                break  # values with weights, such as {512MiB: 3, 1GiB: 1}
            where, data = (*where, key), data.get(str(key))
        elif isinstance(data, tuple) and isinstance(key, int):
            where, data = (*where, key), data[key]
        else:
            break  # a short form, such as 200ms for a distribution
    return where


def _missing(key: str) -> str:
    example = _EXAMPLES.get(key)
    return f"{key} is missing; add it" + (f", such as {example}" if example else "")


def _keys_expected(where: Where) -> str:
    example = _EXAMPLES.get(str(where[-1])) if where else None
    return "expected keys and values" + (f" such as {example}" if example else "")


def _one_of(found: Any, choices: list[str]) -> str:
    *others, last = choices
    guess = did_you_mean(str(found), choices)
    expected = f"expected {', '.join(others)} or {last}" if others else f"expected {last}"
    return expected + (f"; {guess}" if guess else "")


_SYNONYMS = {"kill": "crash"}
"""Word with the same meaning in other tools or in the testbed's commands -> topology key."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a question such as `did you mean rate?`; an empty text if no name in `known` is similar."""
    close = [_SYNONYMS.get(word, "")]
    if close[0] not in known:
        close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""


def _quoted_words(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _format(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case Mapping():
            return "keys and values"
        case tuple():
            return "a list"
        case str() if len(value) > 60:
            return f"{value[:57]!r}..."
    return repr(value)
