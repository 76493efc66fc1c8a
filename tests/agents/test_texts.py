from __future__ import annotations

from agents.texts import quantity


def test_numbers_of_things_are_written_in_words() -> None:
    assert [quantity(n, "run") for n in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]
    assert [quantity(n, "device asks", "devices ask") for n in (1, 2)] == [
        "1 device asks",
        "2 devices ask",
    ]
