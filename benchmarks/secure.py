"""Time of secure aggregation for a million parameters and ten clients, relative to a copy of the model.

    python -m benchmarks.secure [--parameters 1000000] [--clients 10] [--updates 10]

Each line is the best of several tries, in milliseconds and in copies: multiples of the time to copy the
model's float32 vector, which shows the speed of memory. One thread, as a device with a share of a core
has.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before NumPy is imported

import numpy as np  # noqa: E402

from agents.rules.interface import Contribution, SumUp  # noqa: E402
from agents.secure.arithmetic import (  # noqa: E402
    FIELD,
    SecureRun,
    Words,
)
from agents.secure.party import (  # noqa: E402
    Party,
    expand_seed,
    new_seed,
)
from agents.secure.secure_messages import decode_sum  # noqa: E402
from agents.secure.server import SecureSums, SumBegun, weighted_sum  # noqa: E402

_TRIES = 5


def _best(work: Callable[[], object], tries: int = _TRIES) -> float:
    """CPU seconds of the best try."""
    took = []
    for _ in range(tries):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--updates", type=int, default=10)
    given = parser.parse_args()
    size, updates = given.parameters, given.updates
    needed = max(2, round(0.7 * given.clients))
    settings = SecureRun(
        clients=[f"c{k}" for k in range(given.clients)],
        updates=updates,
        weights=64,
        colluding=max(1, needed // 2),
        needed=needed,
        range=1.0,
        bits=16,
        timeout=60.0,
    )
    parties = [Party("run", name, settings, size) for name in settings.clients]
    for party in parties:
        for name, other in zip(settings.clients, parties, strict=True):
            party.add_peer(name, other.public)
    code, sums = parties[0].code, SecureSums(settings, size)
    vector, rng = np.full(size, 0.01, np.float32), np.random.default_rng(0)
    target, mask = np.empty_like(vector), expand_seed(new_seed(), size)
    copy = _best(lambda: np.copyto(target, vector), 50)
    up, clients = 4 * code.length * (given.clients - 1) / 1e6, given.clients
    print(
        f"{size:,} parameters, N = {clients}, U = {needed}, T = {settings.colluding}, K = {updates}"
        f"\nshares for each update of {4 * size / 1e6:.1f} MB: {up:.1f} MB up"
    )
    print(f"a copy: {1e3 * copy:.2f} ms, {8 * size / copy / 1e9:.1f} GB/s read and written\n")

    def line(what: str, seconds: float) -> None:
        print(f"{what:44} {1e3 * seconds:9.2f} ms {seconds / copy:8.1f} copies")

    words, _ = parties[0].grid.round(vector, rng)
    line("client: expand a mask", _best(lambda: expand_seed(new_seed(), size)))
    noise = expand_seed(new_seed(), code.colluding * code.length)
    holders = range(given.clients)
    line("client: code it into shares", _best(lambda: code.shares(mask, noise, holders)))
    line("client: mask and sealed shares, all of it", _best(lambda: list(parties[0].prepare(1))))
    line("client: round an update", _best(lambda: parties[0].grid.round(vector, rng)))
    line("client: add the mask (masking)", _best(lambda: FIELD.sum(words, mask)))

    received, used = [], []
    for dispatch in range(1, updates + 1):
        sender = parties[dispatch % given.clients]
        for name, share in sender.prepare(dispatch):
            parties[settings.clients.index(name)].receive_share(sender.name, share)
        masked = sender.masked(dispatch, vector, rng)
        received.append(masked.words)
        used.append(Contribution(sender.name, dispatch, 0, 1.0))
    weights = [1] * updates
    line("server: sum up K masked updates", _best(lambda: weighted_sum(received, weights)))
    words = weighted_sum(received, weights)
    found = SumBegun(1, SumUp(tuple(used)), words, weights, {*settings.clients})
    answers: list[Words] = []
    took = []
    for party in parties:
        began = time.process_time()
        payload = party.answer(found.number, found.updates)
        took.append(time.process_time() - began)
        _, summed = decode_sum(payload)
        assert summed is not None  # noqa: S101
        answers.append(summed)
    line("client: sum up its shares of K masks", min(took))
    rows = np.stack(answers[:needed])
    decoded = code.mask(range(needed), rows)
    line("server: decode the mask of the sum", _best(lambda: code.mask(range(needed), rows)))
    line("server: take it off (unmasking)", _best(lambda: FIELD.difference(found.words, decoded)))
    found.answers.update(zip(settings.clients, answers, strict=True))
    opened = sums.open(found)
    print(
        f"\nlargest error of the sum: {np.abs(opened - updates * 0.01).max() / sums.grid.step:.2f} steps"
    )


if __name__ == "__main__":
    main()
