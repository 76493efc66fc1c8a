"""The reference conforms, known mistakes are named, and whatever an adapter does is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_conformance import ClientUpdate, ConformanceError, Setting, check, report, rule_names
from fl_conformance.__main__ import main
from fl_conformance.reference import Reference
from fl_conformance.scenario import FOLDER, read
from fl_conformance.steps import Tolerance
from naive import Naive

HERE = Path(__file__).parent
KIT = HERE.parent
EXACT = Tolerance(1e-12, 1e-12)
NAIVE = "naive:Naive"


@pytest.mark.parametrize("rule", rule_names())
def test_reference_has_the_recorded_models(rule: str) -> None:
    result = check(Reference, rule, tolerance=EXACT)
    assert {one.scenario.name: one.outcome for one in result.results} == dict.fromkeys(
        [one.name for one in result.file.scenarios], "conforms"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("format: 2", "format is 2, this version reads format 1"),
        ("", "'format' is missing"),
        ("format: [", "while parsing a flow sequence"),
    ],
)
def test_scenarios_of_another_format_are_refused(line: str, problem: str, tmp_path: Path) -> None:
    text = (FOLDER / "port.yaml").read_text(encoding="utf-8")
    assert text.count("format: 1\n") == 1
    (tmp_path / "port.yaml").write_text(text.replace("format: 1", line), encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        read(tmp_path / "port.yaml")
    assert str(tmp_path / "port.yaml") in str(error.value)
    assert problem in str(error.value)


def test_example_of_the_readme_prints_what_it_says() -> None:
    readme = (KIT / "README.md").read_text(encoding="utf-8")
    code, printed = (
        readme.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "text")
    )
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    said = " ".join(report.text(check(names["Adapter"], "fedbuff", "mean of two")).split())
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert [line for line in lines if line not in said] == []
    assert len(lines) == 6


def planted(fault: str) -> type[Naive]:
    return type("Planted", (Naive,), {"fault": fault})


@pytest.mark.parametrize("rule", ["fedbuff", "fedasync", "port"])
def test_naive_adapter_without_fault_conforms(rule: str) -> None:
    assert check(Naive, rule).exit_code == 0


@pytest.mark.parametrize(
    ("rule", "fault", "cause"),
    [
        ("fedbuff", "participants", "divided_by_clients"),
        ("fedbuff", "sign", "sign"),
        ("fedbuff", "base", "base_current"),
        ("fedbuff", "staleness", "staleness_plus_one"),
        ("fedbuff", "model", "model_as_delta"),
        ("fedbuff", "buffer", "buffer_not_cleared"),
        ("fedbuff", "upload", "staleness_at_upload"),
        ("fedasync", "mixing", "mixing_not_reset"),
        ("fedasync", "staleness", "staleness_plus_one"),
        ("port", "weights", "weights_not_normalised"),
    ],
)
def test_planted_fault_is_named(rule: str, fault: str, cause: str) -> None:
    result = check(planted(fault), rule)
    different = [one for one in result.results if one.outcome == "differs"]
    assert different
    assert [one.explanations[0].cause for one in different] == [{cause}] * len(different)
    assert result.exit_code == 1


def test_two_faults_together_are_named() -> None:
    result = check(partial(Reference, ("sign", "not_divided")), "fedbuff", "mean of two")
    assert {"sign", "not_divided"} in [one.cause for one in result.results[0].explanations]


def test_unknown_difference_is_told_with_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{__name__}:Odd", "--rule", "fedbuff", "--scenario", "mean of two"]) == 1
    assert "0.37·a1 + 0.37·b2" in capsys.readouterr().out


class Odd(Naive):
    """Takes 0.74 of each mean, which no known mistake does."""

    def start(self, setting: Setting) -> None:
        super().start(setting)
        self.options["server_lr"] = 0.74


class Raises(Naive):
    def receive(self, update: ClientUpdate) -> None:
        raise KeyError("weights")


class WrongShape(Naive):
    def model(self, at: float, client: str | None = None) -> Any:
        return self.w[:2]


class NotFinite(Naive):
    def model(self, at: float, client: str | None = None) -> Any:
        return self.w * np.nan


class Complex(Naive):
    def model(self, at: float, client: str | None = None) -> Any:
        return self.w * (1 + 1j)


class Texts(Naive):
    def model(self, at: float, client: str | None = None) -> Any:
        return [str(value) for value in self.w]


class Unreadable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError


class RaisesUnreadable(Naive):
    def receive(self, update: ClientUpdate) -> None:
        raise Unreadable


class RaisesControls(Naive):
    def receive(self, update: ClientUpdate) -> None:
        raise ValueError("a\x1b[2Jb\rc")


class Closes(Naive):
    def receive(self, update: ClientUpdate) -> None:
        raise GeneratorExit


class Ends(Naive):
    def receive(self, update: ClientUpdate) -> None:
        os._exit(0)


class Crashes(Naive):
    def receive(self, update: ClientUpdate) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Changes(Naive):
    """Returns one array all the time, and changes all that it is handed."""

    def start(self, setting: Setting) -> None:
        super().start(setting)
        self.buffer_of_model = setting.model.copy()
        setting.model[:] = np.nan

    def receive(self, update: ClientUpdate) -> None:
        super().receive(update)
        if self.setting.rule == "fedasync":
            update.vector[:] = update.base[:] = np.nan

    def model(self, at: float, client: str | None = None) -> Any:
        self.buffer_of_model[:] = self.w
        return self.buffer_of_model


def test_adapter_may_change_what_it_is_handed() -> None:
    assert check(Changes, "fedasync").exit_code == 0


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("Raises", "receive of the update of a at 1 s: KeyError: 'weights'"),
        ("WrongShape", "shape (2,), expected (3,)"),
        ("NotFinite", "expected finite numbers"),
        ("Complex", "model returned ndarray, expected a vector of numbers"),
        ("Texts", "model returned list, expected a vector of numbers"),
        ("RaisesUnreadable", "Unreadable: its message cannot be read"),
        ("RaisesControls", "ValueError: a [2Jb c"),
        ("Closes", "GeneratorExit"),
    ],
)
def test_faulty_adapter_is_exit_code_2(
    adapter: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{__name__}:{adapter}", "--rule", "fedbuff"]) == 2
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    ("adapter", "code", "problem"),
    [
        (NAIVE, 0, ""),
        (f"{__name__}:Raises", 2, ""),
        (f"{__name__}:Ends", 2, "the adapter ended its process (exit code 0)"),
        (f"{__name__}:Crashes", 2, "the adapter ended its process (signal 11)"),
        ("--help", 0, ""),
        ("--nothing", 2, "unrecognized arguments"),
    ],
)
def test_process_of_the_adapter_may_end(adapter: str, code: int, problem: str) -> None:
    command = [sys.executable, "-m", "fl_conformance", adapter, "--rule", "fedbuff"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert (done.returncode, problem in done.stderr) == (code, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([NAIVE, "--rule", "fedbuf"], "fedbuf: unknown rule"),
        ([NAIVE, "--rule", "fedbuff", "--scenario", "none"], "no such scenario"),
        (["nowhere:Adapter"], "nowhere cannot be imported"),
        (["naive:Nobody"], "no class Nobody"),
        (["naive"], "expected module:Class"),
        ([f"{__name__}:EXACT"], "no method start"),
        ([], "no adapter"),
        (["nowhere.py:Adapter"], "no such file"),
        ([NAIVE, "--rule", "area"], "skipped every scenario"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_json_has_the_first_difference_and_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["naive:Participants", "--rule", "fedbuff", "--json"]
    assert main(arguments) == 1
    scenario = json.loads(capsys.readouterr().out)["rules"][0]["scenarios"][0]
    assert scenario["difference"]["version"] == 1
    assert scenario["difference"]["expected"] == [1.125, -0.625, 0.5]
    assert scenario["causes"][0]["names"] == ["divided_by_clients"]


def test_kit_imports_numpy_and_yaml_alone() -> None:
    code = (
        "import sys, fl_conformance.__main__ as kit;"
        "kit.main(['fl_conformance.reference:Reference', '--rule', 'fedbuff']);"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "print(*sorted(names - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    names = set(done.stdout.splitlines()[-1].split())
    own = {name for name in names if "cython" not in name}  # NumPy's and PyYAML's own
    assert own <= {"__main__", "fl_conformance", "numpy", "yaml", "_yaml"}


def environment() -> dict[str, str]:
    places = {str(Path(module.__file__).parents[1]) for module in (np, __import__("yaml"))}  # type: ignore[arg-type]
    return {"PYTHONPATH": ":".join([str(KIT), *sorted(places)])}
