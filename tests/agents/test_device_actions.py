from __future__ import annotations

import json
from typing import get_args

import pytest

from agents import events, features
from agents.device_actions import (
    BY_NAME,
    Action,
    Crash,
    DeviceState,
    Disconnect,
    Join,
    Leave,
    Pause,
    PowerOff,
    PowerOn,
    Reconnect,
    Restart,
    Resume,
    SetBackground,
    SetCpu,
    SetLink,
    Switching,
    from_json,
    hold_of,
    holds,
    to_json,
)
from agents.energy.messages import Charge, SetBattery, Unplug

ACTIONS: list[tuple[Action, str]] = [
    (SetCpu(0.05), '{"action": "set", "cpu": 0.05}'),
    (SetLink({"up": None, "rtt": 0.1}), '{"action": "set", "link": {"up": null, "rtt": 0.1}}'),
    (SetBackground(False), '{"action": "background", "on": false}'),
    (SetBattery(0.2), '{"action": "battery", "level": 0.2}'),
    (Charge(), '{"action": "charge"}'),
    (Charge(7.5), '{"action": "charge", "watts": 7.5}'),
    (Unplug(), '{"action": "unplug"}'),
    (Crash(), '{"action": "crash"}'),
    (Restart(), '{"action": "restart"}'),
    (Pause(), '{"action": "pause"}'),
    (Resume(), '{"action": "resume"}'),
    (Disconnect(), '{"action": "disconnect"}'),
    (Reconnect(), '{"action": "reconnect"}'),
    (Leave(), '{"action": "leave"}'),
    (Join(), '{"action": "join"}'),
    (PowerOff(), '{"action": "poweroff"}'),
    (PowerOn(), '{"action": "poweron"}'),
]


@pytest.mark.parametrize(("action", "text"), ACTIONS)
def test_actions_are_written_as_json_and_read_back(action: Action, text: str) -> None:
    assert json.dumps(to_json(action)) == text
    assert from_json(json.loads(text)) == action
    line = events.to_line(events.Acted(1.0, "pi-1", "scenario", 0.0, to_json(action)))
    read = events.from_line(line)
    assert isinstance(read, events.Acted)
    assert read.action == action


def test_every_action_is_covered() -> None:
    kinds = set(get_args(Action))
    assert {type(action) for action, _ in ACTIONS} == kinds
    assert {type(action) for action in BY_NAME.values()} == set(get_args(Switching))
    assert kinds == {SetCpu, SetLink, SetBackground, *get_args(features.Action), *get_args(Switching)}


@pytest.mark.parametrize(
    "details", [{"action": "dance"}, {"action": "set"}, {"action": "set", "gpu": 1}, {"cpu": 0.5}, {}]
)
def test_unknown_actions_of_another_version_are_skipped(details: dict[str, object]) -> None:
    assert from_json(details) is None


@pytest.mark.parametrize(
    "action", [action for action, _ in ACTIONS if not isinstance(action, SetBattery)]
)
def test_device_state_is_rebuilt_from_its_actions(action: Action) -> None:
    state = DeviceState().with_action(action)
    assert list(state.actions()) == [action]
    assert state.with_action(action) == state
    if isinstance(action, Switching):
        assert holds(action)[hold_of(action)] == (
            type(action) in {Crash, Pause, Disconnect, Leave, PowerOff}
        )


def _made(*actions: Action) -> list[Action]:
    state = DeviceState()
    for action in actions:
        state = state.with_action(action)
    return list(state.actions())


def test_last_action_about_a_pause_or_outage_counts() -> None:
    assert _made(Crash(), Pause(), Restart(), Disconnect()) == [Pause(), Restart(), Disconnect()]
    assert _made(Pause(), Disconnect(), Leave(), Join()) == [Join()]
    assert _made(Leave(), Join(), Pause()) == [Join(), Pause()]
    assert _made(Join(), Leave()) == [Leave()]
    assert _made(PowerOff(), Crash(), Join()) == [PowerOff(), Join()]
    assert _made(SetBattery(0.2), Charge(), Unplug()) == [Unplug()]


def test_link_settings_accumulate_and_survive_a_restart() -> None:
    first, second = SetLink({"up": 1000, "loss": 0.5}), SetLink({"up": None})
    made = _made(first, SetCpu(0.5), second, Leave(), Join(), SetCpu(0.1))
    assert made == [SetCpu(0.1), SetLink({"up": None, "loss": 0.5}), Join()]
