"""The story of one client, from records."""

from __future__ import annotations

from agents import events
from agents.device_actions import Crash, to_json
from analysis.client_story import story

UPDATE = events.UpdateApplied(
    client="a",
    sequence=1,
    kind="delta",
    base_version=0,
    applied_version=2,
    staleness=1,
    weight=0.25,
    samples=10,
    steps=20,
    loss=0.5,
    bytes=2600,
    dispatched=0.0,
    downloaded=0.5,
    train_start=0.75,
    train_end=1.75,
    sent=2.0,
    arrived=2.5,
    applied=3.0,
    dispatch=1,
)


def test_story_lists_events_of_the_client_in_order_of_time() -> None:
    records: list[events.Record] = [
        events.RunStarted(0.0, 1e9, ("a", "b"), ()),
        events.Acted(3.5, "b", "scenario", 0.0, to_json(Crash())),
        UPDATE,
        events.VersionMade(3.0, 2, 2),
        events.UpdateRejected(4.0, "a", "not finite", 3),
        events.RoundUnfinished(4.0, "a", 2, 3.0, 4.0, 3),
        events.UpdateRejected(4.5, "b", "not finite", 2),
        events.Acted(5.0, "a", "hand", 0.0, to_json(Crash())),
        events.ClientStatus(5.1, "a", "offline"),
        events.Disrupted(6.0, 5.5, "nothing arrived"),
        events.RunEnded(9.0, "after", 2, 2),
    ]
    assert [str(moment) for moment in story(records, "a")] == [
        "     0.000 s  the run clock starts with it",
        "     0.000 s  sent version 0 as dispatch 1",
        "     0.500 s  received dispatch 1",
        "     0.750 s  trains until 1.750 s: 20 steps, loss 0.5",
        "     2.000 s  starts to upload update 1, 2,600 bytes",
        "     2.500 s  update 1, which answers dispatch 1, arrived",
        "     3.000 s  update 1 applied in version 2: staleness 1, weight 0.25",
        "     3.000 s  sent version 2, which leads to no applied update",
        "     4.000 s  update that answers dispatch 3 rejected: not finite",
        "     4.000 s  its dispatches up to 3 lead to no applied update",
        '     5.000 s  action of hand on its device: {"action": "crash"}',
        "     5.100 s  status offline",
        "     5.500 s  disruption until 6.000 s: nothing arrived",
        "     9.000 s  the run ends: time is up",
    ]


def test_story_of_an_update_that_is_not_applied_says_when_it_arrived() -> None:
    unfinished = events.RoundUnfinished(9.0, "a", 0, 1.0, 3.0, 4)
    assert [(moment.at, moment.what) for moment in story([unfinished], "a")] == [
        (1.0, "sent version 0, which leads to no applied update"),
        (3.0, "its answer to dispatch 4 arrives"),
        (9.0, "its dispatches up to 4 lead to no applied update"),
    ]


def test_story_includes_wrong_sums_and_notes_naming_the_client() -> None:
    records: list[events.Record] = [
        events.WrongSum(1.0, ("a", "b"), ("c",)),
        events.Note(2.0, "a retired, and took its memory"),
        events.Note(3.0, "ab retired"),
    ]
    assert [moment.at for moment in story(records, "a")] == [1.0, 2.0]
    assert [moment.at for moment in story(records, "c")] == [1.0]
    assert story(records, "d") == []
