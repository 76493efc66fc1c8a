"""CPU time that secure aggregation costs a client, measured on this host."""

from __future__ import annotations

import time

import numpy as np

from agents.pipeline.interface import ExchangeCost
from agents.pipeline.secure.party import Party
from agents.pipeline.secure.settings import SecureRun

_MESSAGE_TIME = 0.0014
"""CPU seconds on a whole core to send or receive a small message (waking up, MQTT, TCP), without its
content. Fitted to a run in docker (docs/evidence/privacy.md)."""
_TRIES = 5


def measure_cost(secure: SecureRun, parameters: int) -> ExchangeCost:
    """Per update, share and answer, for a model of `parameters` parameters."""
    names = [secure.clients[0], secure.clients[-1]]
    party, peer = (Party("run", name, secure, parameters) for name in names)
    for name in secure.clients:
        party.add_peer(name, Party("run", name, secure, 1).public)
    party.add_peer(peer.name, peer.public)
    peer.add_peer(party.name, party.public)
    update, rng = np.zeros(parameters, np.float32), np.random.default_rng(0)
    masks, shares, answers = [], [], []
    for turn in range(1 + _TRIES):
        dispatches = range(turn * secure.updates, (turn + 1) * secure.updates)
        for dispatch in dispatches:
            began = time.process_time()
            sealed = dict(party.prepare(dispatch))
            party.masked(dispatch, update, rng)
            masks.append(time.process_time() - began)
            if peer.name in sealed:
                began = time.process_time()
                peer.receive_share(party.name, sealed[peer.name])
                shares.append(time.process_time() - began)
        began = time.process_time()
        party.answer(turn, [(party.name, dispatch, 1) for dispatch in dispatches])
        answers.append(time.process_time() - began)
    share = min(shares, default=0.0) + _MESSAGE_TIME
    return ExchangeCost(min(masks), share, min(answers) + 2 * _MESSAGE_TIME)
