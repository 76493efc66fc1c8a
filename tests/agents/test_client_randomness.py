"""A client's draws follow from the seed alone, in later versions of the project too."""

from __future__ import annotations

import pytest

from agents.client.randomness import THINKING, TIMING, TRAINING, generator


@pytest.mark.parametrize(
    ("purpose", "drawn"),
    [
        ((TRAINING, 5), [825, 694, 386, 211]),
        ((THINKING,), [585, 120, 130, 352]),
        ((TIMING,), [629, 620, 670, 775]),
    ],
)
def test_seed_client_and_purpose_say_what_is_drawn(purpose: tuple[int, ...], drawn: list[int]) -> None:
    assert generator(7, "a", *purpose).integers(0, 1000, 4).tolist() == drawn
    assert generator(8, "a", *purpose).integers(0, 1000, 4).tolist() != drawn
    assert generator(7, "b", *purpose).integers(0, 1000, 4).tolist() != drawn
