from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.core.properties import value
from bokeh.document import Document
from bokeh.models.ranges import Range1d
from bokeh.models.sources import ColumnDataSource
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from agents import events
from analysis import metrics
from analysis.charts import CHARTS, chart, paper, screen
from analysis.charts.action_marks import with_actions
from analysis.charts.chart import (
    COLORS,
    INKS,
    PALETTE,
    Axis,
    Chart,
    Column,
    Layer,
    Theme,
    arrays,
    remarks,
)
from analysis.charts.lanes import lanes
from analysis.charts.learning_curves import curves, target_reached
from analysis.load import Run, load
from analysis.names import distinct
from tests.analysis.conftest import EVENTS, with_records, write_by_hand


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a scenario and fidelity figures, so that every chart has data."""
    directory = write_by_hand(tmp_path_factory.mktemp("run"))
    acted: list[events.Record] = [
        events.Acted(4.2, "slow", "scenario", 0.0, {"action": "set", "link": {"up": 1e5, "rtt": 0.2}}),
        events.Acted(4.3, "fast", "scenario", 0.0, {"action": "set", "cpu": 0.05}),
        events.Acted(4.4, "mute", "scenario", 0.0, {"action": "pause"}),
    ]
    parts: list[events.Record] = [
        events.EvaluatedPart(at, version, "device", name, 10, loss, 0.5)
        for at, version, losses in ((0.0, 0, (2.0, 4.0, 3.0)), (5.0, 2, (1.5, 0.5, 1.0)))
        for name, loss in zip(("fast", "slow", "mute"), losses, strict=True)
    ]
    parts += [events.EvaluatedPart(at, int(at), "class", "3", 10, 1.0, 0.5) for at in (0.0, 2.0)]
    made: list[events.Record] = [*acted, *parts]
    lines = [*EVENTS[:6], *(events.to_line(each).strip() for each in made), *EVENTS[6:]]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    cpu = {"asked": 0.5, "got": 0.4, "error": -20.0}
    up = {"asked": 1e6, "got": 9e5, "error": -10.0}
    never = {"asked": 0.1, "got": None, "error": None}
    figures = {"fast": {"group": "pi", "cpu": cpu, "up": up}, "slow": {"group": "pi", "cpu": never}}
    (directory / "fidelity.json").write_text(json.dumps({"devices": figures}))
    return load(directory)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = write_by_hand(tmp_path_factory.mktemp("empty"))
    (directory / "events.jsonl").write_text("")
    return load(directory)


def layer(chart: Chart, name: str) -> Layer:
    return next(one for one in chart.layers if one.name == name)


def column(chart: Chart, name: str, column: str) -> list[float]:
    values: list[float] = layer(chart, name).columns[column].tolist()
    return values


def test_accuracy_is_drawn_against_time_versions_and_bytes(run: Run) -> None:
    chart = CHARTS["accuracy"]([run])
    assert (chart.x.title, chart.y.title) == ("device time (s)", "test accuracy (%)")
    assert column(chart, "fedbuff", "x") == [0.0, 5.0, 10.0]
    assert column(chart, "fedbuff", "y") == [10.0, 85.0, 80.0]
    assert column(CHARTS["accuracy-by-version"]([run]), "fedbuff", "x") == [0, 2, 3]
    by_bytes = CHARTS["loss-by-bytes"]([run])
    assert column(by_bytes, "fedbuff", "x") == pytest.approx([0.0, 0.0052, 0.0078])  # MB: 2600 each
    assert column(by_bytes, "fedbuff", "y") == [2.3, 0.9, 1.1]


def test_losses_by_device_are_drawn_as_a_spread(run: Run) -> None:
    chart = CHARTS["loss-by-device"]([run])
    assert [column(chart, "fedbuff", name) for name in "xy"] == [[0.0, 5.0], [3.0, 1.0]]
    assert column(chart, "fedbuff, lowest", "y") == [2.0, 0.5]
    assert column(chart, "fedbuff, highest", "y") == [4.0, 1.5]
    assert layer(chart, "fedbuff, highest").columns["device"].tolist() == ["slow", "fast"]
    assert column(chart, "fedbuff", "deviation") == pytest.approx([(2 / 3) ** 0.5, (1 / 6) ** 0.5])
    assert "at the end: 0.408" in chart.note
    without = replace(run, parts=run.parts[run.parts["part"] == "class"])
    assert CHARTS["loss-by-device"]([without]).is_empty
    assert CHARTS["accuracy-by-energy"]([run]).is_empty  # no energy was counted
    assert not CHARTS["accuracy"]([run]).is_empty


def test_runs_that_differ_in_their_seed_share_a_colour_and_a_legend(run: Run) -> None:
    fields = {name: getattr(run, name) for name in run.__dataclass_fields__}
    other = Run(**fields | {"topology": {**run.topology, "seed": 2}})
    lower = run.evaluations.assign(accuracy=[0.1, 0.65, 0.6], at=[0.0, 6.0, 8.0])
    other = replace(other, evaluations=lower)
    chart = CHARTS["accuracy"]([run, other])
    band, line, _ = chart.layers
    assert (band.mark, line.mark, line.name) == ("band", "line", "fedbuff")
    assert line.columns["x"].tolist() == [0.0, 5.0, 6.0, 8.0, 10.0]
    # 10, 85, 84, 82, 80 % and 10, 55.8, 65, 60 %, which then stays
    assert band.columns["low"].tolist() == pytest.approx([10.0, 55.8333, 65.0, 60.0, 60.0], abs=1e-3)
    assert line.columns["y"].tolist() == pytest.approx([10.0, 70.4167, 74.5, 71.0, 70.0], abs=1e-3)
    assert "mean of 2 seeds" in chart.remarks[0]
    apart = curves([run, other], "accuracy", "time", apart=True).layers
    assert [one.name for one in apart] == ["fedbuff seed ?", "fedbuff seed 2", "scenario"]
    assert apart[0].color != apart[1].color
    bars = layer(CHARTS["staleness-histogram"]([run, other]), "fedbuff").columns
    assert bars["count"].tolist() == [4, 0, 2]  # of both
    assert len(layer(CHARTS["contributions"]([run, other]), "fedbuff").columns["x"]) == 6


def test_device_lanes_have_a_span_per_state(run: Run) -> None:
    chart = CHARTS["devices"]([run])
    spans = layer(chart, "devices").columns
    assert chart.y.ticks == {0.0: "fast", 1.0: "slow", 2.0: "mute"}
    assert "wait" not in spans["state"]
    first = {name: values[0] for name, values in spans.items()}
    assert (first["y"], first["begin"], first["end"], first["state"]) == (0, 0.0, 0.5, "download")
    assert first["sequence"] == 1
    assert COLORS[first["color"]] == chart.legend["download"]
    assert spans["state"][-1] == "paused"
    assert spans["sequence"][-1] == -1  # the work of no update


def test_legend_of_lanes_lists_the_states_that_occurred(run: Run, empty: Run) -> None:
    """This includes a state that appears later on a page, and a single state."""
    chart = CHARTS["devices"]([run])
    assert list(chart.legend) == ["download", "train", "upload", "paused"]
    drawn = screen.draw(CHARTS["devices"]([empty]))
    for newer in (replace(chart, legend={"train": "blue"}), chart):
        drawn.update(newer)
        items: list[Any] = drawn.figure.legend[0].items
        assert [item.label for item in items] == [value(meaning) for meaning in newer.legend]
    (legend,) = paper.draw(replace(chart, legend={"train": "blue"})).legends
    assert [text.get_text() for text in legend.get_texts()] == ["train"]


def test_lanes_of_several_runs_show_the_newest_updates(run: Run) -> None:
    """The newest of all runs together: in each run updates arrive at 2, 5 and 8 s."""
    other = replace(run, topology={"rule": {"name": "fedasync"}})
    chart = lanes([run, other], max_updates=3)
    assert chart.x.limits == (5.0, None)
    assert "the newest 3 updates" in chart.note
    assert lanes([run, other], max_updates=6).x.limits == (0.0, None)


def spans(*rows: tuple[int, float, float, int]) -> dict[str, Column]:
    """Columns of spans: lane, begin, end, colour."""
    lane, begin, end, hue = zip(*rows, strict=True)
    return arrays(y=lane, height=np.full(len(rows), 0.8), begin=begin, end=end, color=hue)


def test_short_spans_become_shares_of_time() -> None:
    """In the first lane, each second has 0.5 s of one state and 0.25 s of another; it ends after
    6 s. The second lane has one span. At 1 s per pixel, bins are 4 s long."""
    rounds = [(0, at, at + 0.5, 0) for at in range(6)] + [(0, at + 0.5, at + 0.75, 1) for at in range(6)]
    drawn = spans(*rounds, (1, 0.0, 8.0, 3))
    short = chart.find_crowded(drawn, 1.0)
    assert short.tolist() == [True] * 12 + [False]
    assert not chart.find_crowded(drawn, 0.125).any()  # 4 and 2 pixels
    bars = chart.shares_of_time({name: column[short] for name, column in drawn.items()}, 4.0)
    rows = [*zip(*(bars[name].tolist() for name in ("begin", "end", "color")), strict=True)]
    assert rows == [(0.0, 4.0, 0), (0.0, 4.0, 1), (4.0, 5.75, 0), (4.0, 5.75, 1)]
    shares = [0.5, 0.25, 1.0 / 1.75, 0.5 / 1.75]
    assert bars["height"] / 0.8 == pytest.approx(shares)
    bottom = bars["y"] + bars["height"] / 2  # the y axis of lanes points down
    assert bottom == pytest.approx([0.4, 0.0, 0.4, 0.4 - 0.8 * shares[2]])
    late = {name: column[short] for name, column in drawn.items()}
    late |= {name: late[name] + 2**40 for name in ("begin", "end")}
    assert chart.shares_of_time(late, 4.0)["height"] == pytest.approx(bars["height"], abs=1e-3)
    assert chart.shares_note(drawn) == ""
    assert not chart.find_crowded(spans((0, 3.0, 3.1, 0), (1, 0.0, 8.0, 3)), 1.0).any()  # one span


def test_many_lanes_are_labelled_by_group(directory: Path) -> None:
    devices = {f"d{number}": {"group": "ab"[number >= 60]} for number in range(80)}
    (directory / "manifest.json").write_text(json.dumps({"devices": devices}))
    (directory / "events.jsonl").write_text(EVENTS[-1] + "\n")
    chart = CHARTS["devices"]([load(directory)])
    assert chart.y.ticks == {29.5: "a ×60", 69.5: "b ×20"}


BLANK = Chart("t", Axis("device time", "s"), Axis("y"), ())


def test_actions_within_a_second_share_a_mark(run: Run) -> None:
    columns = layer(with_actions(BLANK, [run]), "scenario").columns
    assert columns["x"].tolist() == [4.2]
    what = "1: link up 100 kbit/s, rtt 200 ms slow; cpu 0.05 fast; pause mute"
    assert columns["what"].tolist() == [what]
    assert columns["label"].tolist() == ["1"]  # too long to stand above the plot
    assert with_actions(BLANK, [run]).key == (f"{what} (4.2 s)",)
    twice = layer(with_actions(BLANK, [run, run]), "scenario").columns
    assert twice["what"].tolist() == [what]
    assert with_actions(BLANK, [run]).whole_note == ""
    assert layer(with_actions(BLANK, [run], since=4.5), "scenario").columns["x"].tolist() == []


def crash(at: float, device: str = "fast") -> events.Acted:
    return events.Acted(at, device, "scenario", 0.0, {"action": "crash"})


def test_marks_are_labelled_with_words_if_all_fit(directory: Path) -> None:
    """The run takes 10 s; 70 characters fit above its plot."""
    roomy = with_actions(BLANK, [with_records(directory, crash(2.0), crash(6.0))])
    assert layer(roomy, "scenario").columns["label"].tolist() == ["crash fast", "crash fast"]
    assert roomy.key == ()
    narrow = with_actions(BLANK, [with_records(directory, crash(2.0), crash(3.1), crash(9.9))])
    assert layer(narrow, "scenario").columns["label"].tolist() == ["1", "2", "3"]
    assert narrow.key[1] == "2: crash fast (3.1 s)"


def test_marks_of_one_of_several_runs_name_the_run(directory: Path) -> None:
    run = with_records(directory, crash(2.0), crash(6.0))
    other = replace(run, topology={"rule": {"name": "fedavg"}}, scenario=run.scenario[:1])
    found = with_actions(BLANK, [run, other], colors={id(run): "red"})
    marks = layer(found, "scenario").columns
    assert marks["what"].tolist() == ["1: crash fast", "2: fedbuff: crash fast"]
    assert [COLORS[index] for index in marks["color"]] == ["grey", "red"]


def test_two_runs_of_a_rule_are_named_by_their_differences(run: Run) -> None:
    def named(*topologies: dict[str, Any]) -> list[str]:
        return list(distinct([replace(run, topology=topology) for topology in topologies]))

    def fedbuff(size: int, lr: float = 0.1) -> dict[str, Any]:
        return {"name": f"t{size}", "rule": {"name": "fedbuff", "size": size}, "task": {"lr": lr}}

    assert named(fedbuff(3), fedbuff(10)) == ["fedbuff size 3", "fedbuff size 10"]
    assert named(fedbuff(3), fedbuff(3, 0.5)) == ["fedbuff lr 0.1", "fedbuff lr 0.5"]
    devices = [{"name": "pi", "cpu": share} for share in (0.5, 1.0)]
    assert named(*({"rule": {"name": "area"}, "devices": [one]} for one in devices)) == [
        "area cpu 0.5",
        "area cpu 1",
    ]


def test_chart_without_a_line_to_draw_is_omitted(run: Run) -> None:
    assert not CHARTS["accuracy"]([run]).is_bare
    assert CHARTS["accuracy"]([replace(run, evaluations=run.evaluations[:1])]).is_bare
    assert CHARTS["staleness-histogram"]([replace(run, updates=run.updates[:2])]).is_bare  # one bar


def test_resource_use_is_drawn_over_time(directory: Path) -> None:
    """CPU use is half a core, except that the device is absent from 4 to 16 s and its counter
    restarts."""
    lines = [
        json.dumps(
            {"device": "fast", "at": 100.0 + t, "cpu": 0.5 * (t if t < 10 else t - 16), "memory": 2**20}
        )
        for t in (0, 1, 2, 3, 4, 16, 17, 18, 19, 20)
    ]
    (directory / "telemetry.jsonl").write_text("\n".join(lines) + "\n")
    chart = CHARTS["cpu-over-time"]([load(directory)])
    assert column(chart, "fast", "x") == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 19.0]
    shares = column(chart, "fast", "y")
    assert shares[:2] == shares[-2:] == pytest.approx([50.0, 50.0])
    assert np.isnan(shares[2:-2]).all()
    memory = CHARTS["memory-over-time"]([load(directory)])
    assert column(memory, "fast", "y")[:2] == [1.0, 1.0]
    assert CHARTS["rates-over-time"]([load(directory)]).is_bare  # nobody counts bytes


def test_marks_are_merged_where_many_actions_happen(directory: Path) -> None:
    churn = [crash(at) for at in range(5, 60)]
    quiet = events.Acted(900.0, "slow", "scenario", 0.0, {"action": "pause"})
    chart = with_actions(BLANK, [with_records(directory, *churn, quiet)])
    marks = layer(chart, "scenario").columns
    assert marks["x"].tolist() == [5, *range(6, 60, 2), 900]
    assert marks["what"].tolist()[-2:] == ["28: crash fast", "29: pause slow"]
    # Until 59 s of 900 there is room for one label.
    assert [label for label in marks["label"] if label] == ["1–28", "29"]
    assert chart.remarks == ("each vertical mark stands for up to 2 s of the scenario",)


def test_link_traces_do_not_hide_a_crash(directory: Path) -> None:
    (directory / "topology.yaml").write_text("devices: [{name: pi, link: {trace: {up: walk.up}}}]\n")
    change = {"action": "set", "link": {"up": 1e5}}
    steps = [events.Acted(at / 2, "fast", "scenario", 0.0, change) for at in range(100)]
    by_hand = events.Acted(30.0, "fast", "hand", 0.0, change)
    chart = with_actions(BLANK, [with_records(directory, *steps, crash(20.0, "slow"), by_hand)])
    assert layer(chart, "scenario").columns["what"].tolist() == [
        "1: crash slow",
        "2: link up 100 kbit/s fast",
    ]
    assert chart.remarks == ("100 link changes from traces are not marked",)


def test_staleness_is_drawn_per_group(run: Run) -> None:
    chart = CHARTS["staleness"]([run])
    assert column(chart, "pi", "x") == [2.0, 5.0, 8.0]
    assert column(chart, "pi", "y") == [0, 0, 2]
    bars = layer(CHARTS["staleness-histogram"]([run]), "pi").columns
    assert bars["first"].tolist() == bars["last"].tolist() == [0, 1, 2]
    assert bars["y"].tolist() == pytest.approx([200 / 3, 0, 100 / 3])


def test_outliers_do_not_squeeze_the_histogram(run: Run) -> None:
    """The staleness of 1,000 updates is 0 to 39, except for two updates."""
    staleness = np.arange(1000) % 40
    staleness[[7, 8]] = 900, 901
    many = run.updates.iloc[np.zeros(1000, int)].assign(staleness=staleness)
    chart = CHARTS["staleness-histogram"]([replace(run, updates=many)])
    assert chart.note == "not shown: 2 of 1,000 updates above 39"
    assert layer(chart, "pi").columns["last"].tolist() == [*range(40)]
    few = many.assign(staleness=np.minimum(staleness, 60))  # less than twice as high as the others
    assert CHARTS["staleness-histogram"]([replace(run, updates=few)]).note == ""


def test_remarks_on_several_charts_are_listed_once() -> None:
    first, second = BLANK.with_remarks("a", "b"), BLANK.with_note("own").with_remarks("b")
    assert (remarks([first, second]), second.whole_note) == (("a", "b"), "own; b")


def test_many_updates_are_sampled_evenly_across_groups(run: Run) -> None:
    many = replace(run, updates=run.updates.iloc[np.arange(25_000) % len(run.updates)])
    chart = CHARTS["staleness"]([many])
    held = many.updates["group"].value_counts()
    points = [layer for layer in chart.layers if layer.mark == "points"]
    assert sum(len(one.columns["x"]) for one in points) <= 10_000
    for one in points:
        assert len(one.columns["x"]) == pytest.approx(held.get(one.name, 0) / 3, abs=1)
    assert chart.note == "an evenly spaced sample of the updates"


def test_contributions_are_drawn_per_device(run: Run) -> None:
    chart = CHARTS["contributions"]([run])
    assert column(chart, "pi", "y") == pytest.approx([200 / 3, 100 / 3])
    assert column(chart, "nano", "importance") == [20.0]
    assert chart.note == "χ² = 0.045, Jain's index 0.6, 20.0% of the importance without any update"


def test_fidelity_is_drawn_against_requested_values(run: Run) -> None:
    chart = CHARTS["cpu"]([run])
    assert (column(chart, "devices", "x"), column(chart, "devices", "y")) == ([50.0], [40.0])
    assert chart.note.startswith("1 not shown")
    assert CHARTS["rates"]([run]).note == "measured before the start"
    assert column(CHARTS["rates"]([run]), "uplink", "y") == pytest.approx([0.9])  # Mbit/s


def test_target_missed_by_some_seeds_is_noted(run: Run) -> None:
    other = {**run.topology, "seed": 1}
    late = replace(run, topology=other, evaluations=run.evaluations.assign(accuracy=0.3))
    unknown = replace(run, topology=other, evaluations=run.evaluations.assign(accuracy=np.nan))
    for runs in ([run, late], [unknown, run]):
        assert "80% (1 of 2 did)" in CHARTS["time-to-accuracy"](runs).note


def test_time_to_accuracy_is_drawn(run: Run) -> None:
    """From 10 % at 0 s to 85 % at 5 s."""
    chart = CHARTS["time-to-accuracy"]([run])
    assert chart.x.ticks == {0.0: "60%", 1.0: "70%", 2.0: "80%", 3.0: "85%"}
    assert column(chart, "fedbuff", "y") == pytest.approx([10 / 3, 4.0, 14 / 3, 5.0])


def test_curve_of_a_model_that_no_longer_changes_lasts_until_the_run_ends(run: Run) -> None:
    early = replace(run, evaluations=run.evaluations.assign(at=[0.0, 2.0, 4.0]))
    chart = CHARTS["accuracy"]([early])
    assert column(chart, "fedbuff", "x") == [0.0, 2.0, 4.0, 10.0]
    assert column(chart, "fedbuff", "y") == pytest.approx([10.0, 85.0, 80.0, 80.0])


def test_share_of_runs_that_reached_the_target_is_drawn(run: Run) -> None:
    """Three runs reach 85 % at 5, 3 and 7 s; one breaks off after 4 s without it."""

    def seed(number: int, at: list[float], accuracy: float = 0.85) -> Run:
        evaluations = run.evaluations.assign(at=at, accuracy=[0.1, accuracy, accuracy])
        return replace(run, topology={**run.topology, "seed": number}, evaluations=evaluations)

    broken = replace(seed(4, [0, 2, 4], 0.5), ended=None)
    runs = [seed(1, [0, 5, 10]), seed(2, [0, 3, 10]), seed(3, [0, 7, 10]), broken]
    chart = target_reached(runs, 0.85)
    # Kaplan–Meier: 3/4 are left at 3 s; two of these are observed after 4 s, and half of them at 5 s.
    assert column(chart, "fedbuff", "x") == [0, 3, 4, 5, 7, 10]
    assert column(chart, "fedbuff", "y") == pytest.approx([0, 25, 25, 62.5, 100, 100])
    assert (column(chart, "fedbuff, missed", "x"), column(chart, "fedbuff, missed", "y")) == ([4], [25])
    assert not chart.is_bare
    assert CHARTS["target-reached"](runs).title == "Runs that have reached an accuracy of 50%"


def test_accuracy_is_drawn_by_class_and_group(directory: Path) -> None:
    """`fast` (40 % of 10 samples) and `slow` (80 % of 30) are one group, `mute` another."""
    parts = [("class", "0", 5, 0.9), ("class", "10", 5, 0.5), ("class", "2", 5, 0.7)]
    parts += [("device", "fast", 10, 0.4), ("device", "slow", 30, 0.8), ("device", "mute", 5, 0.2)]
    run = with_records(
        directory,
        *(events.EvaluatedPart(5.0, 2, *one[:3], 0.5, one[3]) for one in parts),
    )
    table = metrics.accuracy_by(run, "class")
    assert (list(table.columns), table.index.tolist()) == (["0", "2", "10"], [5.0])
    assert metrics.accuracy_by(run, "group").loc[5.0].to_dict() == pytest.approx(
        {"pi": 0.7, "nano": 0.2}
    )
    chart = CHARTS["accuracy-by-class"]([run])
    assert column(chart, "10, fedbuff", "y") == [50.0]
    other = replace(run, topology={"rule": {"name": "fedavg"}})
    chart = CHARTS["accuracy-by-group"]([run, other])
    assert column(chart, "fedavg", "y") == pytest.approx([45.0])
    assert column(chart, "fedavg, lowest", "y") == pytest.approx([20.0])
    assert CHARTS["accuracy-by-class"]([replace(run, parts=run.parts[:0])]).is_bare


def test_layer_with_columns_of_unequal_length_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' differ in length"):
        Layer("a", "line", arrays(x=[1, 2], y=[1]))
    with pytest.raises(ValueError, match=r"the tooltip of 'a' needs missing columns: \['z'\]"):
        Layer("a", "line", arrays(x=[1], y=[1]), hover={"name": "$name", "depth": "z"})


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_with_matplotlib(run: Run, empty: Run, name: str) -> None:
    drawn, ground = _picture(CHARTS[name]([run]), "light")
    assert (np.abs(drawn.astype(int) - ground) > 40).any(axis=2).mean() > 0.01  # something is to be seen
    _picture(CHARTS[name]([empty]), "dark")


def _picture(chart: Chart, theme: Theme) -> tuple[np.ndarray, np.ndarray]:
    figure = paper.draw(chart, theme)
    figure.set_dpi(50)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    return pixels, pixels[0, 0]


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_with_bokeh(run: Run, empty: Run, name: str) -> None:
    early, late = CHARTS[name]([empty]), CHARTS[name]([run])
    drawn = screen.draw(early, "dark")
    before = dict(drawn.sources)
    drawn.update(late)
    assert all(drawn.sources[layer] is source for layer, source in before.items())  # patched in place
    for one in late.layers:
        if one.mark != "diagonal":
            shown: dict[str, Any] = dict(drawn.sources[one.name].data)
            lengths = {name: len(rows) for name, rows in one.columns.items()}
            assert {name: len(rows) for name, rows in shown.items()} == lengths
    document = Document()
    document.add_root(drawn.figure)
    document.validate()
    assert document.to_json()  # what a browser is sent


def test_updated_chart_empties_removed_layers_and_adds_new_ones() -> None:
    def chart(*names: str) -> Chart:
        layers = [Layer(name, "line", arrays(x=[1.0], y=[2.0])) for name in names]
        return Chart("t", Axis("x"), Axis("y", limits=(0.0, float(len(names)))), tuple(layers))

    drawn = screen.draw(chart("a", "b"))
    drawn.update(chart("b", "c", "d"))
    lengths = {name: len(source.data["x"]) for name, source in drawn.sources.items()}
    assert lengths == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert isinstance(drawn.figure.y_range, Range1d)
    assert drawn.figure.y_range.end == 3.0


def test_points_can_be_streamed_to_a_chart(run: Run) -> None:
    source = screen.draw(CHARTS["accuracy"]([run])).sources["fedbuff"]
    assert isinstance(source, ColumnDataSource)
    source.stream({"x": [11.0], "y": [90.0], "version": [4], "at": [11.0]})
    assert list(dict(source.data)["x"]) == [0.0, 5.0, 10.0, 11.0]


def test_matplotlib_figure_shows_the_data(run: Run) -> None:
    axes: Axes = paper.draw(CHARTS["accuracy"]([run])).axes[0]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[0.0, 10.0], [5.0, 85.0], [10.0, 80.0]]
    assert axes.get_ylim() == (0.0, 100.0)
    shown = [text.get_text() for text in axes.texts if text.get_text()]
    assert shown[0] == "1"  # and below the plot what it stands for
    assert [text[:12] for text in shown[1:]] == ["1: link up 1"]


def test_palette_has_contrast_on_light_and_dark() -> None:
    """A contrast of 1.9 or more (WCAG's ratio), as Okabe and Ito's own orange has on white."""

    def luminance(hexadecimal: str) -> float:
        channels = np.array([int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for ground in (INKS["light"].paper, INKS["dark"].paper):
        for color in PALETTE.values():
            low, high = sorted((luminance(ground), luminance(color)))
            assert (high + 0.05) / (low + 0.05) > 1.9, (ground, color)
