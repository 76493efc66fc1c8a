"""A client's draws follow from the seed alone, in later versions of the project too."""

from __future__ import annotations

import pytest

from agents import random_generators
from agents.random_generators import NOISE, THINKING, TIMING, TRAINING, client_generator


@pytest.mark.parametrize(
    ("purpose", "drawn"),
    [
        ((TRAINING, 5), [617, 484, 398, 725]),
        ((THINKING,), [934, 474, 479, 189]),
        ((TIMING,), [765, 714, 89, 644]),
    ],
)
def test_draws_depend_on_seed_client_and_purpose(purpose: tuple[int, ...], drawn: list[int]) -> None:
    assert client_generator(7, "a", *purpose).integers(0, 1000, 4).tolist() == drawn
    assert client_generator(8, "a", *purpose).integers(0, 1000, 4).tolist() != drawn
    assert client_generator(7, "b", *purpose).integers(0, 1000, 4).tolist() != drawn


def test_clients_with_equal_name_checksums_draw_differently() -> None:
    """`plumless` and `buckeroo` have one CRC-32: with that as key, they shared noise and batches, and
    their virtual devices all that is random."""
    for purpose in (TRAINING, NOISE):
        a, b = (
            client_generator(7, name, purpose, 5).standard_normal(4) for name in ("plumless", "buckeroo")
        )
        assert (a != b).all()
    a, b = (
        random_generators.generator(7, name, "churn").standard_normal(4)
        for name in ("plumless", "buckeroo")
    )
    assert (a != b).all()
    a, b = (
        random_generators.generator(7, "a", purpose).standard_normal(4)
        for purpose in ("plumless", "buckeroo")
    )
    assert (a != b).all()


def test_name_is_hashed_to_four_words_of_the_key() -> None:
    assert random_generators.key_of("a") == (310482890, 3401391050, 3006382842, 1306272666)
    names = ["", "a", "aa", "pi-1", "pi-11", "plumless", "buckeroo"]
    assert {len(random_generators.key_of(name)) for name in names} == {4}
    assert len({random_generators.key_of(name) for name in names}) == len(names)
