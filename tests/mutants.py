"""Mutation testing: change one place of the source at a time, and see whether a test fails.

    python -m tests.mutants [--sample N] [--seed S] [--jobs N] [FILE...]

The tests of a file (`TESTS`) run on a copy of the project in which that one place is changed. A mutant
is killed where one of them fails, or where they take much longer than without it. Every survivor is
printed: it shows a missing test, or changes nothing, which `EQUIVALENT` then explains. An explanation of
a mutant that there is not is an error: its line has changed, or is in another file by now.

Why no other tool: mutmut 3.8 mutates no property, no other decorated function, no default of a class and
no constant of a module, draws no sample, and has no place for the reason why a mutant is equivalent.
cosmic-ray 8.7 starts a process for each mutant, which takes 5 s of a core to import PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import gc
import importlib
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("agents", "analysis", "testbed", "tests", "topologies", "images", "docs", "pyproject.toml")
MEMORY = 6 << 30
"""Bytes that the tests of one mutant may take."""

RULES = "tests/agents/rules/test_*.py --deselect tests/agents/rules/test_properties.py"
PROPERTIES = "tests/agents/rules/test_properties.py"
CORES = (
    "tests/agents/test_aggregator_*.py tests/agents/test_client_*.py tests/agents/test_differential.py"
)
VIRTUAL_PARTS = " ".join(
    f"tests/testbed/test_virtual_{part}.py"
    for part in ("actions", "device", "event_queue", "network", "timing")
)
VIRTUAL_SCENARIO = "tests/testbed/test_virtual_scenario.py"
VIRTUAL = "tests/testbed/test_virtual_[ns]*.py tests/testbed/test_virtual_timing.py"
FAULTS = "tests/testbed/test_virtual_faults.py"
EXACT = "tests/testbed/test_exactness.py -k 'not regains and not coincide'"
FUZZ = "tests/testbed/test_virtual_fuzz.py -k 0"  # a quarter of its runs
VIRTUAL_RUN = "tests/testbed/test_virtual_run.py -k 'not where_theory'"  # which takes 12 s
VIRTUAL_LAYERS = "tests/testbed/test_virtual_layers.py"
VIRTUAL_OBJECTIVES = "tests/testbed/test_virtual_objectives.py"
VIRTUAL_TRAINING = "tests/testbed/test_virtual_training.py"
OF_TORCH = "tests/agents/test_skipped_parameters.py tests/agents/test_sample_weights.py"
RECORDS = "tests/testbed/test_replay.py tests/agents/test_durable.py -k 'not processes'"
BOOKS = "tests/agents/test_aggregator_s*.py tests/agents/test_recording.py"
WHOLE_RUNS = "tests/test_behaviours.py -m 'not docker'"

TESTS: dict[str, list[str]] = {
    "agents/aggregator/main.py": [WHOLE_RUNS],
    "agents/client/main.py": [WHOLE_RUNS],
    "agents/rules/__init__.py": [
        "tests/agents/test_config.py tests/testbed/test_topology.py",
        PROPERTIES,
    ],
    "agents/rules/interface.py": [CORES, RULES, PROPERTIES],
    "agents/rules/parts.py": [RULES, PROPERTIES],
    "agents/rules/*.py": [
        "tests/agents/rules/test_{name}*.py",
        "tests/agents/rules/test_[cp]*s.py -k '{name} or {words}'",  # closed forms, properties
    ],
    "agents/aggregator/evaluation.py": ["tests/agents/test_evaluation.py", VIRTUAL_RUN],
    "agents/secure/server.py": ["tests/agents/secure/test_*.py"],
    "agents/secure/*.py": [
        "tests/agents/secure/test_[ms]*.py -k 'not galois'",  # whose import takes a second
        "tests/agents/secure/test_*.py",
    ],
    "agents/aggregator/inputs.py": ["tests/agents/test_run_phase.py", BOOKS, RECORDS, VIRTUAL_RUN],
    "agents/aggregator/clients.py": [
        "tests/agents/test_recovery.py tests/agents/test_own_vectors.py",
        CORES,
        RULES,
        VIRTUAL,
        PROPERTIES,
        FUZZ,
    ],
    **{
        f"agents/aggregator/{name}.py": [BOOKS, RECORDS, VIRTUAL, VIRTUAL_RUN]
        for name in ("recording", "storage")
    },
    "agents/pipeline/*.py": [
        "tests/agents/test_byzantine.py tests/agents/test_compression.py",
        "tests/agents/test_differential.py",
    ],
    "agents/aggregator/dispatches.py": [
        "tests/agents/secure/test_*.py",
        CORES,
        RULES,
        VIRTUAL,
        PROPERTIES,
        FUZZ,
    ],
    "agents/aggregator/*.py": [CORES, RULES, VIRTUAL, PROPERTIES, FUZZ],
    "agents/client/training.py": ["tests/agents/test_training.py", OF_TORCH, VIRTUAL_TRAINING],
    "agents/client/*.py": [CORES, RULES, VIRTUAL, PROPERTIES, FUZZ],
    "testbed/virtual/stacked_training.py": [
        VIRTUAL_TRAINING,
        OF_TORCH,
        "tests/testbed/test_virtual_pool.py",
        VIRTUAL_RUN,
    ],
    "testbed/virtual/layers.py": [VIRTUAL_LAYERS],
    "testbed/virtual/objectives.py": [VIRTUAL_OBJECTIVES, VIRTUAL_TRAINING, OF_TORCH, VIRTUAL_RUN],
    "testbed/plan/costs.py": [VIRTUAL_PARTS, "tests/testbed/test_rounds.py"],
    "testbed/plan/rounds.py": ["tests/testbed/test_rounds.py"],
    "testbed/virtual/*.py": [VIRTUAL_PARTS, VIRTUAL_SCENARIO, FAULTS, VIRTUAL_RUN, EXACT, FUZZ],
    "analysis/metrics.py": ["tests/analysis/test_metrics.py", "tests/analysis/test_[ces]*.py"],
}
"""Arguments of pytest by source file, quickest first. The first pattern that matches counts."""

SHELLS = {"agents/aggregator/main.py", "agents/client/main.py"}
"""Mutated only where they are named: whole runs in real time test them (45 s each, with --jobs 1)."""

_NETWORK, _RUN = "testbed/virtual/network.py", "testbed/virtual/run.py"
_OBJECTIVES, _SIMULATION = "testbed/virtual/objectives.py", "testbed/virtual/simulation.py"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "agents/aggregator/core.py",
        "self._epoch: Nanoseconds = 0",
        "self._epoch: Nanoseconds = 1",
    ): "`Started`, the first input that counts, sets it",
    (
        "agents/aggregator/progress.py",
        "self._newest = -1",
        "self._newest = -2",
    ): "no version has either number",
    (
        "agents/aggregator/dispatches.py",
        "self._announced[client] = {one: first for one, first in told if not 0 < first <= number}",
        "self._announced[client] = {one: first for one, first in told if not 1 < first <= number}",
    ): "dispatch 1 tells of no loss: nothing was sent before it",
    (
        "agents/aggregator/intake.py",
        "_MAX_LOSS = 3.5e38",
        "_MAX_LOSS = 3.5e+38",
    ): "1 more is the same float",
    (
        "agents/aggregator/intake.py",
        "if _MAX_LOSS < abs(message.loss) < math.inf:",
        "if _MAX_LOSS <= abs(message.loss) < math.inf:",
    ): "no float32 is that large",
    (
        "agents/aggregator/intake.py",
        "share, w = (self._settings.bounds.norm or 0.0) / length, self._server.w",
        "share, w = (self._settings.bounds.norm or 1.0) / length, self._server.w",
    ): "it is called with a bound only",
    (
        "agents/aggregator/progress.py",
        '_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 3}',
        '_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 4}',
    ): "the end comes last with either number",
    (
        "agents/aggregator/evaluation.py",
        "_NICE = 19",
        "_NICE = 20",
    ): "Linux has no niceness above 19 and takes this for it",
    (
        "agents/client/training.py",
        "if l2:",
        "if True:",
    ): "adds 0 to the loss and to the gradient, more slowly",
    (
        "agents/client/training.py",
        "if length > bound:",
        "if length >= bound:",
    ): "multiplies by 1 where they are equal",
    (
        "agents/client/training.py",
        "if length > local.clip_gradient:",
        "if length >= local.clip_gradient:",
    ): "multiplies by 1 where they are equal",
    (
        "agents/client/training.py",
        "if tensor.is_cpu:",
        "if True:",
    ): "without a GPU all tensors are on the CPU, and both sums are in float64",
    (
        "agents/client/training.py",
        "if tensor.is_cpu:",
        "if False:",
    ): "without a GPU all tensors are on the CPU, and both sums are in float64",
    (
        "agents/client/training.py",
        "return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))",
        "return float(torch.linalg.vector_norm(tensor, ))",
    ): "without a GPU all tensors are on the CPU, and both sums are in float64",
    (
        "agents/client/training.py",
        "self.flat = FlatModule(build(task, start).to(self._device), trained=not task.fits)",
        "self.flat = FlatModule(build(task, start).to(self._device), )",
    ): "memory for a gradient that an own `fit` has no use for",
    (
        "analysis/metrics.py",
        'at = (evaluations["at"] * 1e9).round()',
        'at = (evaluations["at"] * 1000000001.0).round()',
    ): "whole multiples of another unit, as small",
    (
        "agents/rules/area.py",
        "self._settled = True",
        "self._settled = False",
    ): "at first u is 0, and moves nothing",
    (
        "agents/rules/fedasync.py",
        "return 1.0 if staleness <= self.b else 1 / (a * (staleness - self.b) + 1)",
        "return 1.0 if staleness < self.b else 1 / (a * (staleness - self.b) + 1)",
    ): "at τ = b both sides are 1",
    (_NETWORK, "self._open = True", "self._open = False"): "Line sets it before anything is sent",
    (
        _OBJECTIVES,
        "self._memory: NDArray[Any] = np.empty(0, dtype)",
        "self._memory: NDArray[Any] = np.empty(1, dtype)",
    ): "it grows when more is needed",
    (_OBJECTIVES, "flat = p.reshape(-1)", "flat = p.reshape(-2)"): "to numpy they are the same",
    (
        _SIMULATION,
        "if self._snapshot is None or self._snapshot[0] != dispatch.version:",
        "if True:",
    ): "copies of a version are equal; it takes more memory",
    (
        _SIMULATION,
        "device.trainings.pop(sequence - 2, None)  # replaced in the send buffer by its successor",
        "device.trainings.pop(sequence + 2, None)  # replaced in the send buffer by its successor",
    ): "what nobody asks for is kept: it takes more memory",
    (
        "testbed/virtual/stacked_training.py",
        "return max(job.local.first_batch(len(job.indices)), job.local.batches(len(job.indices))[1])",
        "return min(job.local.first_batch(len(job.indices)), job.local.batches(len(job.indices))[1])",
    ): "larger parts, with the same results",
    (
        _RUN,
        "self._pulses += 1",
        "pass",
    ): "how often the view is refreshed",
    (
        _RUN,
        "self._pulses += 1",
        "self._pulses += 2",
    ): "how often the view is refreshed",
    (
        _RUN,
        "if self._pulses % 64 == 0 and time.monotonic() >= self._due:",
        "if self._pulses % 64 == 0 and time.monotonic() > self._due:",
    ): "how often the view is refreshed",
    (
        _SIMULATION,
        "_MAX_EVENTS_AT_ONCE = 100",
        "_MAX_EVENTS_AT_ONCE = 101",
    ): "far above what happens at once in a run that goes on",
    (
        _SIMULATION,
        'self._thread = ThreadPoolExecutor(1, "evaluation")',
        'self._thread = ThreadPoolExecutor(2, "evaluation")',
    ): "there is one evaluation at a time",
    (
        _SIMULATION,
        "self._events.plan(step.at, SCENARIO, 0, lambda: self._play(step))",
        "self._events.plan(step.at, SCENARIO, 1, lambda: self._play(step))",
    ): "all that have this rank have the same index",
}
"""Why a mutant changes nothing that a test should see, by file, line, and mutated line."""

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_PAIRS = [("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil")]
CALLS = dict(_PAIRS) | {b: a for a, b in _PAIRS}
NOT_MUTATED = {"annotation", "returns", "decorator_list"}
"""Fields of nodes. What raises, asserts or words a message is left as it is, too, and `strict=True`."""


@dataclass(frozen=True)
class Mutant:
    """`file` with `text` in place of its bytes from `start` to `end`."""

    file: str
    start: int
    end: int
    text: str

    def source(self) -> bytes:
        source = (ROOT / self.file).read_bytes()
        return source[: self.start] + self.text.encode() + source[self.end :]

    def change(self) -> tuple[int, str, str]:
        """The number of the first line that differs, that line, and what it becomes."""
        old, new = (ROOT / self.file).read_text().splitlines(), self.source().decode().splitlines()
        number = next(
            n for n, (before, after) in enumerate(zip(old, new, strict=False)) if before != after
        )
        return number + 1, old[number].strip(), new[number].strip()


class Mutator:
    """All mutants of a file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._source = (ROOT / file).read_bytes()
        self._lines = [0]
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def mutants(self) -> list[Mutant]:
        return [mutant for mutant in self.candidates() if _compiles(mutant)]

    def candidates(self) -> list[Mutant]:
        """Return all changes, including those that do not compile."""
        found = dict.fromkeys(self._visit(ast.parse(self._source), ""))
        return [mutant for mutant in found if mutant.source() != self._source]

    def _visit(self, node: ast.AST, returns: str) -> Iterator[Mutant]:
        """Mutants of `node`, in a function that returns `returns`, and of what is in it."""
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _only_elsewhere(node):
            return
        if isinstance(node, ast.FunctionDef):
            returns = ast.unparse(node.returns) if node.returns else ""
        yield from self._of(node, returns)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in NOT_MUTATED:
                    yield from self._visit(child, returns)

    def _of(self, node: ast.AST, returns: str) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left, operators, comparators):
                for operator, (a, b) in zip(operators, pairwise([left, *comparators]), strict=True):
                    yield from self._operator(a, operator, b)
            case ast.BoolOp(operator, values):
                for a, b in pairwise(values):
                    yield from self._operator(a, operator, b)
            case ast.BinOp(a, operator, b):
                yield from self._operator(a, operator, b)
            case ast.AugAssign(a, operator, b):
                yield from self._operator(a, operator, b)
                yield self._replace(node, "pass")
            case ast.Expr(ast.Call()):
                yield self._replace(node, "pass")
            case ast.UnaryOp(ast.Not(), operand):
                yield self._replace(node, f"({self._text(operand)})")
            case ast.Constant(bool(value)):
                yield self._replace(node, str(not value))
            case ast.Constant(int(value) | float(value)):
                yield self._replace(node, repr(value + 1))
            case ast.If(test) | ast.IfExp(test):
                yield self._replace(test, "True")
                yield self._replace(test, "False")
            case ast.While(test):
                yield self._replace(test, "False")
            case ast.comprehension(ifs=tests):
                yield from (self._replace(test, "True") for test in tests)
            case ast.Return(ast.List() | ast.ListComp() as value):
                yield self._replace(value, "[]")
            case ast.Return(ast.expr() as value) if returns == "bool" and not isinstance(
                value, ast.Constant
            ):
                yield self._replace(value, f"not ({self._text(value)})")
            case ast.Return(ast.expr() as value) if returns.startswith(("list[", "Actions")):
                yield self._replace(value, "[]")
            case ast.Call(ast.Name("sorted" | "reversed"), [first, *_]):
                yield self._replace(node, f"list({self._text(first)})")
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name) as function) if name in CALLS:
                yield self._replace(function, self._text(function).removesuffix(name) + CALLS[name])
                if name in ("min", "max") and len(node.args) == 2:  # without the bound
                    yield from (self._replace(node, f"({self._text(one)})") for one in node.args)
        if isinstance(node, ast.Call):
            spans = [*map(self._span, node.args), *map(self._span, node.keywords)]
            for keyword in node.keywords:
                start, end = self._span(keyword)
                if keyword.arg not in (None, "strict"):
                    end = min((first for first, _ in spans if first > start), default=end)
                    yield Mutant(self._file, start, end, "")

    def _operator(self, a: ast.expr, operator: ast.AST, b: ast.expr) -> Iterator[Mutant]:
        if type(operator) in OPERATORS:
            start, end = self._span(a)[1], self._span(b)[0]
            between = self._source[start:end].decode()
            yield Mutant(self._file, start, end, between.replace(*OPERATORS[type(operator)], 1))

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> Mutant:
        return Mutant(self._file, *self._span(node), text)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset


def _only_elsewhere(node: ast.AST) -> bool:
    """Whether `node` is for type checkers, for a program's start, or our own assertion."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(node, ast.Expr):
        return ast.unparse(node).startswith("assert_never(")
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.source(), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def stale(explained: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the keys of `EQUIVALENT` without a mutant: file, line, and mutated line."""
    keys = list(explained)
    files = {file for file, _, _ in keys if (ROOT / file).exists()}
    there = {(file, *one.change()[1:]) for file in files for one in Mutator(file).candidates()}
    return [key for key in keys if key not in there]


def tests_of(file: str) -> list[str]:
    """Arguments of pytest, one after the other, for `file`."""
    name = Path(file).stem
    words = name.replace("_", "")
    groups = next(groups for pattern, groups in TESTS.items() if Path(file).match(pattern))
    return [group.format(name=name, words=words) for group in groups]


def run(group: str, tree: Path, seconds: float, *options: str) -> str:
    """Return the outcome of the tests `group` in `tree`: passed, failed or timeout. They run in a fork
    of this process, which has imported slow libraries and nothing of the project."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = 1
        with suppress(BaseException):
            code = _pytest(group, tree, *options)
        os._exit(code)
    end = time.monotonic() + seconds
    try:
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                return "timeout"
            time.sleep(0.01)
        return "failed" if ended[1] else "passed"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with all that it has started
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _pytest(group: str, tree: Path, *options: str) -> int:
    os.chdir(tree)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    sys.modules.pop("tests", None)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    shutil.rmtree(".hypothesis", ignore_errors=True)
    words = shlex.split(group)
    words = [
        str(path) for word in words for path in (sorted(tree.glob(word)) if "*" in word else [word])
    ]
    quick = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0"]
    code = int(pytest.main([*quick, f"--basetemp={tree / 'made'}", *options, *words]))
    Path("modules").write_text("\n".join(sys.modules))
    return code


def copy_of_project(folder: Path) -> Path:
    """The copy that belongs to this process, in `folder`."""
    tree = folder / str(os.getpid())
    if not tree.exists():
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, tree / name)
        compileall.compile_dir(tree, quiet=2)
    return tree


def unchanged(group: str, folder: Path) -> float:
    """Seconds that `group` takes on the project as it is. Raises SystemExit where it does not pass."""
    began = time.monotonic()
    tree = copy_of_project(folder)
    if (outcome := run(group, tree, 600)) != "passed":
        raise SystemExit(f"{(tree / 'said').read_text()}\nWithout a mutant {outcome}: pytest {group}")
    return time.monotonic() - began


def outcome(mutant: Mutant, seconds: dict[str, float], folder: Path) -> str:
    """killed, timeout or survived; `seconds` has what each group of tests takes unchanged."""
    tree = copy_of_project(folder)
    (tree / mutant.file).write_bytes(mutant.source())
    try:
        for group in tests_of(mutant.file):
            if (said := run(group, tree, 5 + 4 * seconds[group])) != "passed":
                return "killed" if said == "failed" else said
    finally:
        shutil.copy2(
            ROOT / mutant.file, tree / mutant.file
        )  # with its time: its byte code is valid again
    return "survived"


def import_what_is_heavy(groups: Sequence[str], folder: Path) -> None:
    """Import what the tests import from elsewhere, once for all forks."""
    tree = copy_of_project(folder)
    files = " ".join(word for group in groups for word in shlex.split(group) if word.endswith(".py"))
    if run(files, tree, 600, "--collect-only") != "passed":
        raise SystemExit(f"pytest cannot collect {files}")
    ours = {path.stem for path in ROOT.iterdir()} | {"__main__", "conftest"}
    for name in (tree / "modules").read_text().split():
        if name.partition(".")[0] not in ours:
            with suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(100_000)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, metavar="N", help="of all mutants, N drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that drawing")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("files", nargs="*", metavar="FILE")
    options = parser.parse_args()
    if old := stale(EQUIVALENT):
        shown = "".join(f"\n{file}\n    - {before}\n    + {after}" for file, before, after in old)
        raise SystemExit(f"EQUIVALENT explains what is no mutant any more:{shown}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no copy behind
    sources = {str(path.relative_to(ROOT)) for pattern in TESTS for path in ROOT.glob(pattern)}
    files = options.files or sorted(sources - SHELLS)
    mutants = [mutant for file in files for mutant in Mutator(file).mutants()]
    total = len(mutants)
    if options.sample is not None and options.sample < total:
        drawn = random.Random(options.seed).sample(range(total), options.sample)  # noqa: S311
        mutants = [mutants[number] for number in sorted(drawn)]
    groups = list(dict.fromkeys(group for mutant in mutants for group in tests_of(mutant.file)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        import_what_is_heavy(groups, folder)
        with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
            seconds = dict(zip(groups, pool.map(unchanged, groups, [folder] * len(groups)), strict=True))
            began = time.monotonic()
            n = len(mutants)
            outcomes = pool.map(outcome, mutants, [seconds] * n, [folder] * n)
            try:
                survived = report(zip(mutants, outcomes, strict=True))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            took = time.monotonic() - began
    print(f"{n} of {total} mutants in {took:.0f} s with --jobs {options.jobs}", end="")
    print(f"; all would take about {took * total / n / 60:.0f} min" if n < total else "")
    sys.exit(1 if survived else 0)


def report(results: Iterator[tuple[Mutant, str]]) -> int:
    """Print the outcome of the mutants; return how many survived without an explanation in
    `EQUIVALENT`."""
    counts: Counter[str] = Counter()
    for file, of_file in groupby(results, key=lambda result: result[0].file):
        here: Counter[str] = Counter()
        for mutant, said in of_file:
            number, before, after = mutant.change()
            why = EQUIVALENT.get((file, before, after))
            here["explained" if said == "survived" and why else said] += 1
            if said == "survived":
                print(
                    f"{file}:{number}",
                    f"- {before}",
                    f"+ {after}",
                    *([why] if why else []),
                    sep="\n    ",
                )
        print(_line(file, here), flush=True)
        counts += here
    print(_line("all", counts))
    return counts["survived"]


def _line(name: str, counts: Counter[str]) -> str:
    killed, total = counts["killed"] + counts["timeout"], counts.total()
    return (
        f"{name}: {killed} of {total} killed ({killed / total:.1%}, {counts['timeout']} by time); "
        f"{counts['survived']} survived, {counts['explained']} more are explained"
    )


if __name__ == "__main__":
    main()
