"""The process that imports a user's code, started by `testbed.user_code`.

    python -m testbed.user_code.inspection_process FOLDER

The modules are in FOLDER/code. Each line of standard input is a question (a key of `_QUESTIONS`, with
its arguments). Each is answered by a line of JSON: `{"answer": ...}`; `{"refused": reason}` if the class
does not have the expected form or refuses the topology's parameters; or `{"raised": traceback}`. The
process ends when its input ends, or when no question arrives for some seconds.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import select
import signal
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from agents import shards, user_code
from agents.aggregator import storage
from agents.checks import DeclarationError
from agents.config import LocalTraining
from agents.rules import RULES
from agents.rules import interface as rules
from agents.rules.client_half import (
    ClientSettings,
    ClientSide,
    ClientState,
    Vectors,
    checked_copies,
    sizes,
)
from agents.rules.interface import Broadcast, Rule, Send, Server, State, Update
from agents.selection import SELECTIONS
from agents.selection.draws import Draws
from agents.selection.interface import ClientSelection
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.flower import Flower
from agents.tasks.interface import Task, calls_correct, mean_loss, unfit_classes, unfit_inputs
from agents.timing.nanoseconds import SECOND
from agents.wire.payloads import ModelMessage

_IDLE_S = 5.0
_FIT_S = 10.0
"""Seconds after which the trial of a task's `fit` is ended. The results of a `fit` that was ended are
not checked."""
_TRIED = 3
"""Updates, and model parameters, in the trial of a rule."""
_MAX_TRACEBACK = 20_000
"""Characters of a traceback to report."""
_SIMPLE = {bool: "bool", float: "float", int: "int", str: "str", type(None): "None"}
_OF_CLASS = ("dataset", "fits", "has_accuracy", "has_perplexity")
"""Attributes of a task that do not depend on its parameters."""
_SPLITS = "train", "test", "validation"
_ARRAYS = {
    "x": ("biuf", "numbers"),
    "y": ("biufU", "numbers or names"),
    "client": ("iuU", "whole numbers or names"),
}
"""Array in a split -> kinds of NumPy types that it may have, and a description of these kinds for
errors."""
_EXAMPLE = '{"train": {"x": x, "y": y}}, with arrays that have a row for each sample'
_KINDS: Mapping[str, tuple[Mapping[str, type], type, str]] = {
    "task": (TASKS, Task, "model"),
    "rule": (RULES, Rule, "begin"),
    "selection": (SELECTIONS, ClientSelection, "choose"),
}
"""Kind of a class -> our classes, the base class, and the method that every class needs."""


class _RefusedError(Exception):
    """The class does not have the expected form, or refuses its parameters. The text gives the
    reason."""


@contextmanager
def _refusing(
    kind: type[Exception] = ValueError, about: str = "", *, ours: bool = False
) -> Iterator[None]:
    """Errors of this kind are refusals. `about`: beginning of the reason. `ours`: whether those that the
    user's code raises are none."""
    try:
        yield
    except kind as error:
        if ours and user_code.is_from_user_code(error):
            raise
        raise _RefusedError(f"{about}{error}") from error


def main() -> None:
    folder = Path(sys.argv[1])
    user_code.use_folder(str(folder / "code"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints must not look like an answer
    while select.select([sys.stdin], [], [], _IDLE_S)[0] and (line := sys.stdin.readline()):
        answers.write(json.dumps(_answer(json.loads(line), folder)) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    question, kind, name = (request.pop(key) for key in ("question", "kind", "name"))
    try:
        return {"answer": _QUESTIONS[question](_find_class(kind, name), folder, **request)}
    except _RefusedError as error:
        return {"refused": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's code may raise anything
        return {"raised": user_code.user_traceback(error)[-_MAX_TRACEBACK:]}


def _find_class(kind: str, name: str) -> Any:
    is_task = kind == "task"
    ours, base, method = _KINDS[kind]
    with _refusing(LookupError, ours=True):
        cls: Any = user_code.find_class(name, ours, base)
    if getattr(cls, method) is getattr(base, method):
        raise _RefusedError(f"{name} has no method {method}, which every {kind} needs")
    if is_task and cls.fits != (cls.fit is not Task.fit):
        mend = "define it" if cls.fits else "write fits: ClassVar[bool] = True, or remove fit"
        raise _RefusedError(
            f"{name} has fits = {cls.fits} {'without a' if cls.fits else 'and a'} method fit: {mend}"
        )
    if is_task and not (isinstance(cls.dataset, str | None) or callable(cls.dataset)):
        raise _RefusedError(
            f"its dataset is {cls.dataset!r:.80}, expected the name of a dataset, or a method "
            "that returns one"
        )
    return cls


def _make(cls: Any, params: Mapping[str, Any]) -> Any:
    with _refusing():
        return cls(**params)


def _class(cls: Any, _: Path) -> dict[str, Any]:
    """Answer with what all objects of the class share: parameters, description and attributes."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        "about": inspect.cleandoc(cls.__doc__ or ""),
        "parameters": [
            _parameter(field, hints[field.name]) for field in dataclasses.fields(cls) if field.init
        ],
        "attributes": {
            key: value
            for key in _OF_CLASS
            if hasattr(cls, key) and not callable(value := getattr(cls, key))
        },
        "brings_dataset": callable(getattr(cls, "dataset", None)),
    }


def _parameter(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = default is dataclasses.MISSING
    try:
        found = {"name": field.name, "type": _describe_type(hint), "required": required}
        json.dumps(default := None if required else default)
    except TypeError:
        raise _RefusedError(
            f"its parameter {field.name} ({field.type!s}) has a type that a topology cannot express: "
            "use int, float, str, bool, a Literal, a list of these, or one of them | None"
        ) from None
    return {**found, "default": default}


def _describe_type(hint: Any) -> Any:
    """JSON for `testbed.user_code`. Raises TypeError if a YAML file cannot express the
    type."""
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            mark = next((mark for mark in arguments[1:] if isinstance(mark, str)), "")
            return {"of": _describe_type(arguments[0]), "mark": mark}
        case origin if origin is Literal:
            return {"literal": list(arguments)}
        case origin if origin in (Union, types.UnionType):
            return {"either": [_describe_type(option) for option in arguments]}
        case origin if origin is list or (origin is tuple and arguments[1:] == (...,)):
            return {"list": _describe_type(arguments[0])}
    if not isinstance(hint, type) or hint not in _SIMPLE:
        raise TypeError
    return _SIMPLE[hint]


def _facts(cls: Any, _: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Answer with what depends on the object's parameters."""
    made = _make(cls, params)
    if ClientSelection in cls.__mro__:
        return {name: bool(getattr(made, name)) for name in ("needs_loss", "needs_battery")}
    if Rule not in cls.__mro__:
        return {}
    facts = {name: bool(getattr(made, name)) for name in ("draws", "takes_fednova", "keeps_bases")}
    with _refusing(about="its client_side is invalid: "):
        side = dataclasses.asdict(made.client_side)
    sums: dict[str, Any]
    try:
        sums = dataclasses.asdict(made.sums())
    except ValueError as error:
        sums = {"reason": str(error)}
    return {**facts, "assumes_uniform": str(made.assumes_uniform), "_client_side": side, "_sums": sums}


def _check(cls: Any, folder: Path, params: dict[str, Any], clients: int) -> None:
    made = _make(cls, params)
    if Task in cls.__mro__ and not isinstance(made.l2, int | float):
        raise _RefusedError(f"its l2 is {made.l2!r:.80}, expected a number")
    with _refusing():
        made.check(clients)
    if Rule in cls.__mro__:
        with _refusing(DeclarationError, "its client_side does not declare what it does: "):
            _try_rule(made, clients, folder / "state.bin")
    if ClientSelection in cls.__mro__:
        with _refusing(DeclarationError):
            _try_selection(made, cls.__name__, clients, folder / "state.bin")


def _try_selection(selection: ClientSelection, name: str, clients: int, file: Path) -> None:
    """Draw with `selection`, at first without any knowledge about clients, then with updates and battery
    levels of some of them. Then save its memory to `file`, and load it again."""
    names = [f"client-{k}" for k in range(clients)]
    draws = Draws(name, selection, dict.fromkeys(names, 1 / clients), {})
    rng = np.random.default_rng(0)
    for number in range(2 * _TRIED):
        idle = names if number % 2 == 0 else names[: max(1, clients // 2)]
        count = min(1 + number % _TRIED, len(idle))
        draws.now = number * SECOND

        def of_rule(rng: np.random.Generator, idle: list[str] = idle, count: int = count) -> list[str]:
            return [idle[i] for i in rng.choice(len(idle), count, replace=False)]

        for client in draws.draw(idle, count, of_rule, rng, number, replacement=False):
            loss = math.nan if number == 1 else 1.0 / (1 + number)
            draws.note_round(client, loss=loss, took=SECOND, staleness=number)
            draws.note_battery(client, 0.5, float(number))
    _try_saving(draws, file, "memory", "strings, lists, dicts and NumPy arrays")


def _try_saving(state: object, file: Path, what: str, possible: str) -> None:
    try:
        storage.save_snapshot(state, file)
        storage.load_snapshot(file)
    except Exception as error:
        raise _RefusedError(
            f"its {what} cannot be saved for a restart after a crash ({error}): use only numbers, "
            f"{possible}"
        ) from error


def _try_rule(rule: Rule, clients: int, file: Path) -> None:
    """Run the first updates of a run through both halves of `rule`. Then save the state of the server's
    half to `file`, and load the state again."""
    importance = {f"client-{k}": 1 / clients for k in range(clients)}
    w = np.zeros(_TRIED, np.float32)
    server = Server(w, dict(importance), np.random.default_rng(0), population=importance)
    state = rule.begin(server)
    if not isinstance(state, State):
        raise _RefusedError(f"its begin returns {state!r}, expected a State")
    side = rule.client_side
    sends = [action for action in _actions("start", state.start(), side) if isinstance(action, Send)]
    for dispatch, send in enumerate(sends[:_TRIED], 1):
        update = Update(
            client=send.client,
            dispatch=dispatch,
            base_version=0,
            vector=np.zeros(_TRIED, np.float32),
            kind="model" if side.kind == "residual" else side.kind,
            vectors=_try_client(rule, send, dispatch),
            base=np.zeros(_TRIED, np.float32) if rule.keeps_bases else None,
        )
        _actions("update", state.update(update), side)
    if sends and side.model_vectors:  # a client that joins again needs the vectors, too
        client = sends[0].client
        del server.clients[client]
        _actions("leave", state.leave(client), side)
        server.clients[client] = importance[client]
        _actions("join", state.join(client), side)
    if not isinstance(server.w, np.ndarray) or (server.w.shape, server.w.dtype) != (w.shape, w.dtype):
        raise _RefusedError("its update replaces server.w by another type of array: change it in place")
    possible = "strings, lists, dicts, sets, NumPy arrays and objects of the code's own classes"
    _try_saving((state, server), file, "state", possible)


def _try_client(rule: Rule, send: Send, dispatch: int) -> Vectors:
    """Make two updates with the client half of `rule`. Return the vectors of the second update, which
    depends on the memory that the first update left. Return no vectors if the rule's kind is
    `residual`."""
    half = rule.begin_client(ClientSettings(local=LocalTraining(steps=1)))
    if not isinstance(half, ClientState):
        raise _RefusedError(f"its begin_client returns {half!r:.80}, expected a ClientHalf")
    if half.side.kind == "residual":
        return {}
    vectors: Vectors = {}
    for sequence in (1, 2):
        model = ModelMessage(
            run="trial",
            version=0,
            dispatch=dispatch + sequence,
            schema="",
            vector=np.zeros(_TRIED, np.float32),
            lr=send.lr,
            acknowledged=sequence - 1,
            vectors={name: np.asarray(v, np.float32) for name, v in send.vectors.items()},
        )
        half.acknowledge(model)
        half.begin(model)
        form = half.form(sequence, model, 1, lambda: np.zeros(_TRIED, np.float32))
        form.vector()
        vectors = form.vectors
    return vectors


def _actions(method: str, returned: Any, side: ClientSide) -> list[Any]:
    if rules.is_action_list(returned):
        for action in returned:
            if isinstance(action, Send):
                expected, like = sizes(side.model_vectors, _TRIED), np.zeros(0, np.float32)
                checked_copies(f"Send of {method}", action.vectors, expected, like)
            elif isinstance(action, Broadcast) and side.model_vectors:
                raise DeclarationError(f"{method} returns a Broadcast, which has no vectors: use Send")
        return [*returned]
    raise _RefusedError(f"its {method} returns {returned!r:.80}, expected a list of actions")


def _extent(cls: Any, _: Path, params: dict[str, Any], frozen: list[str]) -> tuple[Any, ...]:
    """Answer with the result of `agents.models.flat.extent`."""
    from agents.models import flat

    task = _make(cls, params)
    with _refusing(ours=True):
        return flat.extent(task, frozen)


def _start(cls: Any, _: Path, params: dict[str, Any], seed: int, **files: Any) -> list[str]:
    """`files`: as for `agents.models.flat.write_start`. Answer with a description of each difference
    between the user's file and the module."""
    from agents.models import flat

    return flat.write_start(_make(cls, params), seed, **files)


def _shards(cls: Any, folder: Path, params: dict[str, Any], clients: int) -> list[str]:
    """Answer with the paths of the files. Each answer has a new folder, because a cached answer still
    needs its files."""
    brought = [*_make(cls, params).shards_for(clients)]
    if len(brought) != clients:
        raise _RefusedError(f"its shards has {len(brought)}, expected one for each of {clients} devices")
    paths, own = [], Path(tempfile.mkdtemp(dir=folder))
    for number, shard in enumerate(brought):
        if not isinstance(shard, Shard):
            raise _RefusedError(f"its shards has {shard!r:.80}, expected an agents.shards.Shard each")
        if not len(shard.x) == len(shard.y) > 0:
            raise _RefusedError(
                f"its shards[{number}] has {len(shard.x)} inputs and {len(shard.y)} labels, expected "
                "the same number of both, at least one"
            )
        if (found := _shard_layout(shard)) != (first := _shard_layout(brought[0])):
            raise _RefusedError(
                f"its shards[{number}] has {found}, but the first one has {first}: make them equal"
            )
        paths.append(own / f"shard-{number}.safetensors")
        shards.save(shard, paths[-1])
    return [*map(str, paths)]


def _shard_layout(shard: Shard) -> str:
    """Describe what all shards of a task must share."""
    x, y = (f"{each.dtype} of shape {each.shape[1:]}" for each in (shard.x, shard.y))
    return f"inputs {x}, labels {y}, scale {shard.scale}"


def _dataset(cls: Any, _: Path, params: dict[str, Any], to: str) -> list[str]:
    """Write each split to SPLIT.npz in the folder `to`. Answer with the names of the splits."""
    splits = _check_keys("its dataset()", _make(cls, params).dataset(), _SPLITS)
    for split, value in splits.items():
        arrays = _check_keys(split, value, _ARRAYS)
        whole = {name: _array(f"{name} of {split}", array, name) for name, array in arrays.items()}
        np.savez(Path(to, f"{split}.npz"), **whole)
    return [*splits]


def _check_keys(what: str, value: Any, keys: Iterable[str]) -> Mapping[str, Any]:
    first, *_ = keys
    if not isinstance(value, Mapping) or first not in value:
        found = (
            f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"is {type(value)}"
        )
        raise _RefusedError(f"{what} {found}, expected {_EXAMPLE}")
    if unknown := [key for key in value if key not in keys]:
        raise _RefusedError(f"{what} has {unknown[0]!r}, expected only {', '.join(keys)}")
    return value


def _array(what: str, value: Any, key: str) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise _RefusedError(f"{what} is not an array: {error}") from error
    kinds, names = _ARRAYS[key]
    if array.dtype.kind == "O" and "U" in kinds:  # a pandas column
        other = next((one for one in array.flat if not isinstance(one, str)), None)
        if other is None:
            return array.astype(str)
        raise _RefusedError(f"{what} holds {other!r:.80} among names, expected {names}")
    if array.dtype.kind not in kinds:
        raise _RefusedError(f"{what} holds {array.dtype}, expected {names}")
    return array


def _step(
    cls: Any,
    _: Path,
    params: dict[str, Any],
    samples: str,
    seed: int,
    lr: float,
    *,
    client: str,
    index: int,
    trains: bool,
) -> None:
    """Train on the shard in the file `samples` if `trains`; else evaluate it. Only a task's own `fit`
    uses `client` and `index`."""
    import torch

    from agents.models import flat

    flat.seed_generators(seed)
    task: Task = _make(cls, params)
    shard = shards.load(Path(samples))
    if cls is Flower:  # each sample stands for a whole partition of the app
        _try_app(task, shard.subset(np.arange(1)), lr, trains=trains)
        return
    if trains and cls.fits:
        _try_fit(task, shard, client, index, lr)
        return
    module = task.model().train(trains)
    outputs = _outputs(task, module, shard)
    _try_loss(task, outputs, shard)
    if (weights := task.weights(shard.tensors()[1])) is not None:
        _check_length("weights", weights, shard, "the shape of its loss:")
        if not (torch.isfinite(weights) & (weights >= 0)).all():
            wrong = next(one for one in weights.tolist() if not 0 <= one < math.inf)
            raise _RefusedError(f"its weights has {wrong:g}, expected numbers of at least 0")
    if trains:
        if not torch.isfinite(loss := mean_loss(task, outputs, shard.tensors()[1])):
            raise _RefusedError(f"its loss is {loss.item()} with the initial model")
        loss.backward()  # type: ignore[no-untyped-call]
    if calls_correct(task):
        _try_correct(task, outputs, shard)


def _outputs(task: Task, module: Any, shard: Shard) -> Any:
    x, y = shard.tensors()
    try:
        outputs = module(x)
    except (IndexError, RuntimeError, ValueError) as error:  # raised for wrong shapes and types
        reason = str(error).partition("\n")[0] + user_code.error_place(error)
        raise _RefusedError(f"its model {unfit_inputs(x, reason)}") from error
    shape = getattr(outputs, "shape", ())
    if type(task).loss is Task.loss and len(shape) < 2:
        found = f"a tensor of shape {tuple(shape)}" if shape else f"a {type(outputs).__name__}"
        raise _RefusedError(
            f"its model returns {found}, but the cross-entropy takes scores of the shape ({len(y)}, "
            "classes): return these, or define a loss"
        )
    return outputs


def _try_loss(task: Task, outputs: Any, shard: Shard) -> None:
    try:
        losses = task.loss(outputs, shard.tensors()[1])
    except (IndexError, RuntimeError) as error:  # torch's message names neither classes nor labels
        crossed = type(task).loss is Task.loss or shard.y.dtype.kind == "i"
        has_classes = len(_shape(outputs) or ()) > 1
        if has_classes and crossed and (message := unfit_classes(shard.y, outputs.shape)):
            raise _RefusedError(message) from error
        raise
    expected = f"one value for each of {len(shard)} samples:"
    _check_length("loss", losses, shard, expected, ", as with reduction='none'")


def _try_correct(task: Task, outputs: Any, shard: Shard) -> None:
    without = "define correct, or has_accuracy: ClassVar[bool] = False if the task has no accuracy"
    is_default = type(task).correct is Task.correct
    if is_default and len(_shape(outputs) or ()) < 2:
        raise _RefusedError(
            f"its model returns outputs of shape {_shape(outputs)}, which have no scores of classes: "
            f"{without}"
        )
    if is_default and shard.y.dtype.kind != "i":
        raise _RefusedError(f"its labels are {shard.y.dtype}, not integer classes: {without}")
    right = task.correct(outputs, shard.tensors()[1])
    if right is not None:
        _check_length("correct", right, shard, "one value per sample:")


def _shape(value: object) -> tuple[int, ...] | None:
    import torch

    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _check_length(what: str, value: object, shard: Shard, expected: str, mend: str = "") -> None:
    if (shape := _shape(value)) != (len(shard),):
        found = f"is {value!r:.80}" if shape is None else f"has the shape {shape}"
        raise _RefusedError(f"its {what} {found}, expected {expected} ({len(shard)},){mend}")


class _TimeOverError(BaseException):
    """Not an Exception, so that the `fit` on trial does not catch it."""


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises _TimeOverError if the `with` block takes longer than `_FIT_S` seconds."""

    def stop(*_: object) -> None:
        raise _TimeOverError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _FIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _try_app(task: Task, partition: Shard, lr: float, *, trains: bool) -> None:
    """Train on a partition if `trains`, else evaluate it, for at most `_FIT_S` seconds."""
    import torch

    module = task.model()
    with (
        suppress(_TimeOverError),
        _refusing(NotImplementedError, ours=True),
        _refusing(ours=True),
        _time_limit(),
    ):
        if trains:
            task.fit(module, partition, lr)
        else:
            with torch.no_grad():
                module(torch.from_numpy(partition.x))


def _try_fit(task: Task, shard: Shard, client: str, index: int, lr: float) -> None:
    """Take at most `_FIT_S` seconds, and check the results. `index`: number of the device in device
    order. `lr`: step size."""
    from agents.client.training import FitTrainer
    from agents.models.flat import learned, vector_of

    trainer = FitTrainer(task, shard, LocalTraining(steps=1, lr=lr))
    trainer.set_client(client, index, {})
    flat = trainer.flat
    try:
        with _refusing(TypeError, ours=True), _time_limit():
            trainer.train(vector_of(flat.w), np.random.default_rng(0))
    except _TimeOverError:
        return
    for (name, parameter), part in zip(learned(flat.module), flat.parts, strict=True):
        if parameter.data_ptr() != flat.w[part].data_ptr():
            raise _RefusedError(
                f"its fit gives the parameter {name} a new tensor, so that the training would be lost: "
                "change it in place, as torch's optimizers and load_state_dict do"
            )


_QUESTIONS: Mapping[str, Callable[..., Any]] = {
    "class": _class,
    "facts": _facts,
    "check": _check,
    "extent": _extent,
    "start": _start,
    "shards": _shards,
    "dataset": _dataset,
    "step": _step,
}


if __name__ == "__main__":
    main()
