"""What happens in the recorded scenarios of the conformance kit, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.conformance.recording import Join, Leave, Script, Up, Wait

THIRDS = (0.25, 0.5, 0.25)
"""Importance in proportion to the samples 10, 20, 10."""

_ASYNCHRONOUS = (
    Up(1, "a", (0.5, 0.25)),
    Up(2, "b", (-0.25, 0.5)),
    Up(3, "a", (0.75, -0.5), steps=2),
    Up(4, "c", (1.0, 0.125), steps=3),
    Up(5, "a", (-0.5, 0.375)),
    Up(5, "b", (0.25, -1.0)),
    Up(6.5, "c", (0.5, 0.5), uploaded=4.5),
    Up(7, "b", (1.5, -0.25)),
)
"""Deltas of three clients. `a` is fast. Two arrive together at 5 s. An upload of `c` takes 2 s."""

_LEAVING = (
    Up(1, "a", (0.5, 0.25)),
    Leave(1.5, "a"),
    Up(2, "a", (4.0, 4.0)),
    Up(2.5, "b", (-0.25, 0.5)),
    Join(3, "a"),
    Up(4, "c", (1.0, 0.125)),
    Up(5, "a", (0.75, -0.5)),
    Up(6, "a", (0.75, -0.5), again=True),
    Up(6.5, "b", (0.25, 1.0)),
    Up(7, "c", (-0.5, 0.25)),
)
"""`a` leaves after its update; what still arrives of it counts for nothing. It joins again, and one of
its updates arrives twice."""


_GRADIENTS = (
    Up(1, "a", (0.5, 0.25)),
    Up(2, "b", (-0.25, 0.5)),
    Up(3, "a", (1.0, 0.125)),
    Up(4, "c", (0.25, -1.0)),
    Up(5, "b", (0.75, -0.5)),
    Up(5, "c", (0.5, 0.5)),
)

_ROUNDS = (
    Up(1, "a", (0.5, 0.25)),
    Up(2, "b", (-0.25, 0.5)),
    Up(3, "c", (1.0, 0.125)),
    Up(5, "a", (0.75, -0.5)),
    Up(5, "b", (0.25, -1.0)),
    Up(5, "c", (-0.5, 0.375)),
)

SCRIPTS: Mapping[str, Sequence[Script]] = {
    "fedavg": [
        Script(
            "uniform",
            "Two rounds of all clients with equal importance.",
            {},
            _ROUNDS,
            importance=(1 / 3, 1 / 3, 1 / 3),
        ),
        Script(
            "by samples",
            "Two rounds of all clients, weighted by their samples.",
            {},
            _ROUNDS,
            importance=THIRDS,
        ),
        Script(
            "server step size",
            "As `by samples`, with half the step.",
            {"server_lr": 0.5},
            _ROUNDS,
            importance=THIRDS,
        ),
        Script(
            "sampled",
            "Each round draws two of three clients without replacement; p is renormalised over them.",
            {"sample": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "c", (1.0, 0.125)),
                Up(3, "b", (-0.25, 0.5)),
                Up(3, "c", (0.25, -1.0)),
            ),
            importance=THIRDS,
            draws=[["a", "c"], ["b", "c"], ["a", "b"]],
        ),
        Script(
            "with replacement",
            "Each round draws three times with replacement; a client that is drawn twice counts twice.",
            {"sample": 3, "replacement": True},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "c", (1.0, 0.125)),
                Up(3, "b", (-0.25, 0.5)),
                Up(4, "a", (0.25, -1.0)),
                Up(4, "b", (0.5, 0.5)),
                Up(4, "c", (-1.0, 0.25)),
            ),
            importance=THIRDS,
            draws=[["a", "c", "a"], ["b", "b", "b"], ["a", "b", "c"], ["a", "a", "a"]],
        ),
        Script(
            "unbiased",
            "Each round draws two of three clients; an update has the weight p_i N/n.",
            {"sample": 2, "weights": "unbiased"},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (1.0, 0.125)),
                Up(3, "b", (-0.25, 0.5)),
                Up(3, "c", (0.25, -1.0)),
            ),
            importance=THIRDS,
            draws=[["a", "b"], ["b", "c"], ["a", "b"]],
        ),
        Script(
            "leave and join",
            "A selected client goes offline: the round ends without it. It joins "
            "again and takes part in the next round.",
            {},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Leave(3, "c"),
                Join(3.5, "c"),
                Up(4, "a", (1.0, 0.125)),
                Up(5, "b", (0.25, -1.0)),
                Up(6, "a", (0.75, -0.5)),
                Up(6, "b", (0.5, 0.5)),
                Up(7, "c", (-0.5, 0.375)),
            ),
            importance=THIRDS,
        ),
        Script(
            "timeout",
            "A round ends 2.5 s after its start without the slow client, whose update is "
            "late and counts for nothing.",
            {"round_timeout": 2.5},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "c", (4.0, 4.0), of=0),
                Up(4, "a", (1.0, 0.125)),
                Up(4, "b", (0.25, -1.0)),
                Wait(5),
            ),
            importance=THIRDS,
        ),
        Script(
            "fednova",
            "Clients send their deltas divided by their steps; the aggregate is multiplied "
            "by the mean number of steps (Wang 2020, arXiv 2007.07481).",
            {},
            (
                Up(1, "a", (0.5, 0.25), steps=2, effective_steps=2),
                Up(2, "b", (-0.25, 0.5), steps=4, effective_steps=4),
                Up(3, "c", (1.0, 0.125), steps=1),
                Up(4, "a", (0.75, -0.5), steps=2, effective_steps=2),
                Up(4, "b", (0.25, -1.0), steps=4, effective_steps=4),
                Up(5, "c", (-0.5, 0.375), steps=1),
            ),
            importance=THIRDS,
        ),
    ],
    "fedasync": [
        Script(
            "polynomial",
            "β = 0.6 and s(τ) = (τ+1)^(−0.5), the defaults of the paper.",
            {},
            _ASYNCHRONOUS,
        ),
        Script(
            "constant",
            "s(τ) = 1: every update has the weight 0.5.",
            {"mixing": 0.5, "staleness": "constant"},
            _ASYNCHRONOUS,
        ),
        Script(
            "hinge",
            "s(τ) = 1 if τ ≤ 1, else 1/(2(τ−1)+1).",
            {"staleness": "hinge", "a": 2, "b": 1},
            _ASYNCHRONOUS,
        ),
        Script(
            "leave and join",
            "A client leaves and joins; an update of an absent client and a repeated "
            "update count for nothing.",
            {},
            _LEAVING,
        ),
    ],
    "async_fedavg": [
        Script("identical", "d_i = 1: every update counts in full.", {"server_lr": 0.5}, _ASYNCHRONOUS),
        Script(
            "time based, given",
            "d_i from given update times 2, 4 and 8 s.",
            {"weights": "time_based", "update_times": [2.0, 4.0, 8.0]},
            _ASYNCHRONOUS,
        ),
        Script(
            "time based, estimated",
            "d_i from the running means of the round trips; 1 until every client has been seen.",
            {"weights": "time_based", "server_lr": 0.25},
            _ASYNCHRONOUS,
        ),
        Script(
            "leave and join",
            "A client leaves and joins; an update of an absent client and a repeated "
            "update count for nothing.",
            {},
            _LEAVING,
        ),
    ],
    "fedfix": [
        Script(
            "counted ticks",
            "Ticks every 2 s; an update that took two ticks counts twice. An arrival at "
            "the instant of a tick counts in that tick.",
            {"period": 2.0},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(5, "c", (0.25, -1.0)),
                Up(6, "a", (0.75, -0.5)),
                Up(6, "b", (0.5, 0.5)),
                Wait(8),
                Up(9, "c", (-0.5, 0.375)),
                Wait(10),
            ),
        ),
        Script(
            "given times",
            "Ticks every 2 s, with given update times 1, 3 and 5 s; half the step.",
            {"period": 2.0, "update_times": [1.0, 3.0, 5.0], "server_lr": 0.5},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(3, "a", (1.0, 0.125)),
                Up(3, "b", (-0.25, 0.5)),
                Up(5, "c", (0.25, -1.0)),
                Wait(6),
                Up(7, "a", (0.75, -0.5)),
                Wait(8),
            ),
        ),
        Script(
            "leave and join",
            "The update of a client that leaves before the tick counts.",
            {"period": 2.0},
            (
                Up(1, "a", (0.5, 0.25)),
                Leave(1.5, "a"),
                Up(1.75, "b", (-0.25, 0.5)),
                Wait(2),
                Join(2.5, "a"),
                Up(3.5, "a", (1.0, 0.125)),
                Up(4.5, "a", (1.0, 0.125), again=True),
                Up(5, "c", (0.25, -1.0)),
                Wait(6),
            ),
        ),
    ],
    "fedbuff": [
        Script(
            "mean of two",
            "K = 2 without a discount. The fast client fills several places of the buffers.",
            {"buffer_size": 2},
            _ASYNCHRONOUS,
        ),
        Script(
            "staleness",
            "K = 2 and s(τ) = 1/√(1+τ); the sum is divided by K, not by the weights.",
            {"buffer_size": 2, "staleness": "inverse_sqrt"},
            _ASYNCHRONOUS,
        ),
        Script(
            "server step size",
            "K = 3 with half the step and the discount.",
            {"buffer_size": 3, "staleness": "inverse_sqrt", "server_lr": 0.5},
            _ASYNCHRONOUS,
        ),
        Script(
            "no buffer",
            "K = 1: vanilla asynchronous learning.",
            {"buffer_size": 1, "staleness": "inverse_sqrt"},
            _ASYNCHRONOUS,
        ),
        Script(
            "after aggregation",
            "K = 2; the contributors of a buffer get the new model.",
            {"buffer_size": 2, "reply": "after_aggregation", "staleness": "inverse_sqrt"},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "c", (0.25, -1.0)),
                Up(5, "b", (0.75, -0.5)),
                Up(6, "c", (0.5, 0.5)),
            ),
        ),
        Script(
            "concurrency",
            "Two of three clients train at the same time; an idle client is drawn after each upload.",
            {"buffer_size": 2, "concurrency": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "c", (-0.25, 0.5)),
                Up(3, "b", (1.0, 0.125)),
                Up(4, "a", (0.25, -1.0)),
            ),
            draws=[["a", "b"], ["c"], ["a"], ["c"], ["b"]],
        ),
        Script(
            "leave and join",
            "The update of a client that leaves stays in the buffer; an update of an "
            "absent client and a repeated update count for nothing.",
            {"buffer_size": 2},
            _LEAVING,
        ),
    ],
    "fedfa": [
        Script(
            "models",
            "Window of 3 models; aggregated at every arrival once the window is full.",
            {"window_size": 3},
            _ASYNCHRONOUS,
        ),
        Script(
            "models, half the step",
            "Window of 2 models; the mean is mixed in with η_g = 0.5.",
            {"window_size": 2, "server_lr": 0.5},
            _ASYNCHRONOUS,
        ),
        Script(
            "deltas",
            "Window of 3 deltas, each of which counts three times.",
            {"window_size": 3, "variant": "delta", "server_lr": 0.25},
            _ASYNCHRONOUS,
        ),
        Script(
            "fednova",
            "Window of 2 deltas divided by their steps; the mean is multiplied by the mean "
            "number of steps.",
            {"window_size": 2, "variant": "delta", "server_lr": 0.5},
            (
                Up(1, "a", (0.5, 0.25), steps=2, effective_steps=2),
                Up(2, "b", (-0.25, 0.5), steps=4, effective_steps=4),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "c", (0.25, -1.0), steps=2, effective_steps=2),
            ),
        ),
        Script(
            "leave and join",
            "The model of a client that leaves stays in the window.",
            {"window_size": 2},
            _LEAVING,
        ),
    ],
    "as_fedavg": [
        Script(
            "mean of two",
            "Δ = 2. A sender gets the model from before the aggregation of its own.",
            {"every": 2},
            _ASYNCHRONOUS,
        ),
        Script(
            "half the step",
            "Δ = 3, mixed in with η_g = 0.5.",
            {"every": 3, "server_lr": 0.5},
            _ASYNCHRONOUS,
        ),
        Script(
            "leave and join",
            "The model of a client that leaves stays in the mean.",
            {"every": 2},
            _LEAVING,
        ),
    ],
    "defedavg_niid": [
        Script(
            "overwrite",
            "Two draws per round; a client that is drawn twice counts twice. Clients train "
            "on while they are not drawn.",
            {"sample": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5), of=0),
                Up(3, "c", (1.0, 0.125), of=0),
                Up(4, "a", (0.25, -1.0), of=1),
                Up(5, "c", (0.75, -0.5), of=2),
                Up(6, "b", (0.5, 0.5), of=2),
            ),
            draws=[["a", "a"], ["b", "c"], ["c", "a"], ["b", "b"], ["a", "b"]],
        ),
        Script(
            "hold",
            "Three draws per round from clients that hold their update, with half the step.",
            {"sample": 3, "send_buffer": "hold", "server_lr": 0.5},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5), of=0),
                Up(3, "c", (1.0, 0.125), of=0),
                Up(4, "a", (0.25, -1.0), of=1),
            ),
            draws=[["a", "b", "a"], ["c", "c", "a"], ["a", "b", "c"]],
        ),
        Script(
            "leave and join",
            "A drawn client leaves: its draws are dropped (the paper says nothing of "
            "it; this is the testbed's choice).",
            {"sample": 4},
            (
                Up(1, "a", (0.5, 0.25)),
                Leave(2, "b"),
                Join(3, "b"),
                Up(4, "c", (1.0, 0.125), of=0),
                Up(5, "a", (0.25, -1.0), of=1),
            ),
            draws=[["a", "b", "a", "b"], ["c", "c", "a", "c"], ["a", "b", "c", "c"]],
        ),
    ],
    "defedavg_iid": [
        Script(
            "first two",
            "The first two updates of different clients make a version; a second update of "
            "the same client waits for the next round.",
            {"buffer_size": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "c", (0.25, -1.0), of=0),
                Up(5, "b", (0.75, -0.5), of=1),
                Up(6, "b", (0.5, 0.5), of=2),
                Up(7, "a", (-0.5, 0.375)),
                Up(8, "c", (0.25, 0.25)),
            ),
        ),
        Script(
            "first three",
            "Rounds of three with half the step.",
            {"buffer_size": 3, "server_lr": 0.5},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "c", (1.0, 0.125)),
                Up(4, "a", (0.25, -1.0)),
                Up(5, "b", (0.75, -0.5)),
                Up(5, "c", (0.5, 0.5)),
            ),
        ),
        Script(
            "leave and join",
            "The update of a client that leaves counts.",
            {"buffer_size": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Leave(1.5, "a"),
                Up(2, "b", (-0.25, 0.5)),
                Join(3, "a"),
                Up(4, "c", (1.0, 0.125), of=0),
                Up(5, "a", (0.25, -1.0)),
                Up(5.5, "a", (9, 9), again=True),
                Up(6, "b", (0.75, -0.5), of=2),
                Up(7, "c", (0.5, 0.5)),
            ),
        ),
    ],
    "area": [
        Script(
            "every",
            "Every second message; the message that completes a pair is answered with the old "
            "model. Clients have the importance 1/4, 1/4 and 1/2.",
            {"every": 2},
            _ASYNCHRONOUS,
        ),
        Script(
            "half the step",
            "Every third message, with η_g = 0.5: the rest of u stays.",
            {"every": 3, "server_lr": 0.5},
            _ASYNCHRONOUS,
        ),
        Script(
            "period",
            "Every 2 s; messages at the instant of an aggregation count in it.",
            {"criterion": "period", "period": 2.0},
            (*_ASYNCHRONOUS, Wait(8)),
        ),
        Script(
            "random",
            "At recorded intervals.",
            {"criterion": "random", "rate": 0.5},
            (*_ASYNCHRONOUS, Wait(8)),
            intervals=(1.5, 0.75, 2.0, 3.25, 10.0),
        ),
        Script(
            "goodbye and join",
            "A client says goodbye and its model is taken out of the mean; it joins "
            "again and begins with the model that it is sent.",
            {"every": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (0.75, -0.5)),
                Leave(3.5, "b", goodbye=True),
                Up(4, "c", (1.0, 0.125)),
                Up(5, "a", (0.25, -1.0)),
                Join(5.5, "b"),
                Up(6, "c", (0.5, 0.5)),
                Up(7, "b", (-1.0, 0.25)),
                Up(8, "a", (1.5, -0.25)),
            ),
        ),
        Script(
            "crash",
            "A client vanishes and comes back with its memory: its last model stays in the mean.",
            {"every": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Leave(2.5, "a"),
                Up(3, "b", (0.75, -0.5)),
                Up(4, "c", (1.0, 0.125)),
                Join(5, "a"),
                Up(6, "a", (0.25, -1.0)),
                Up(6.5, "a", (0.25, -1.0), again=True),
                Up(7, "b", (0.5, 0.5)),
            ),
        ),
    ],
    "asysg": [
        Script(
            "mean of two",
            "n = 2 gradients; the mean.",
            {"gradients": 2, "server_lr": 0.5},
            _GRADIENTS,
        ),
        Script(
            "sum of two",
            "n = 2 gradients; the sum, as in the paper.",
            {"gradients": 2, "mean": False, "server_lr": 0.25},
            _GRADIENTS,
        ),
        Script(
            "leave and join",
            "The gradient of a client that leaves counts.",
            {"gradients": 2, "server_lr": 0.5},
            (
                Up(1, "a", (0.5, 0.25)),
                Leave(1.5, "a"),
                Up(2, "b", (-0.25, 0.5)),
                Join(2.5, "a"),
                Up(3, "a", (1.0, 0.125)),
                Up(3.5, "a", (9, 9), again=True),
                Up(4, "c", (0.25, -1.0)),
            ),
        ),
    ],
    "favano": [
        Script(
            "stochastic",
            "Every 2 s two clients are drawn and interrupted; α_i is their number of steps.",
            {"period": 2.0, "sample": 2},
            (
                Up(2.25, "a", (2.0, 0.0), steps=2),
                Up(2.5, "b", (0.0, 1.0), steps=4),
                Up(4.25, "a", (1.5, -0.5), steps=4),
                Up(4.5, "c", (3.0, 2.0), steps=8),
                Up(6.25, "b", (0.5, 0.25), steps=2),
                Up(6.25, "c", (-1.0, 1.0), steps=1),
            ),
            draws=[["a", "b"], ["a", "c"], ["b", "c"], ["a", "b"]],
        ),
        Script(
            "deterministic",
            "One client per round, with half the step; α_i is its mean number of steps.",
            {"period": 2.0, "sample": 1, "debias": "deterministic", "server_lr": 0.5},
            (
                Up(2.25, "a", (2.0, 0.0), steps=2),
                Up(4.25, "a", (1.5, -0.5), steps=4),
                Up(6.5, "b", (0.5, 0.25), steps=3),
            ),
            draws=[["a"], ["a"], ["b"], ["c"]],
        ),
        Script(
            "leave and join",
            "A drawn client leaves: s is one less.",
            {"period": 2.0, "sample": 2},
            (
                Up(2.25, "a", (2.0, 0.0), steps=2),
                Leave(2.5, "b"),
                Join(3, "b"),
                Up(4.25, "b", (0.5, 0.25), steps=2),
                Up(4.5, "c", (3.0, 2.0), steps=4),
            ),
            draws=[["a", "b"], ["b", "c"], ["a", "b"]],
        ),
    ],
    "port": [
        Script(
            "similarity",
            "Two updates per version; stale updates are weighted by direction, staleness and samples.",
            {"min_updates": 2},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "b", (0.25, -1.0)),
                Up(5, "a", (0.75, -0.5)),
                Up(6, "b", (-0.5, 0.375)),
                Up(7, "a", (0.25, 0.75)),
                Up(8, "c", (0.5, 0.5)),
                Up(9, "a", (-1.0, 0.25)),
                Up(10, "b", (0.5, -0.25)),
            ),
        ),
        Script(
            "half the step",
            "As `similarity` with λ = 1, μ = 2, S = 4 and half the step.",
            {
                "min_updates": 2,
                "similarity_weight": 2.0,
                "staleness_weight": 1.0,
                "staleness_bound": 4,
                "server_lr": 0.5,
            },
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "b", (0.25, -1.0)),
                Up(5, "a", (0.75, -0.5)),
                Up(6, "c", (0.5, 0.5)),
            ),
        ),
        Script(
            "stale client",
            "The server waits for a client that trains from a model more than S = 1 version old.",
            {"min_updates": 2, "staleness_bound": 1, "urgent": False},
            (
                Up(1, "a", (0.5, 0.25)),
                Up(2, "b", (-0.25, 0.5)),
                Up(3, "a", (1.0, 0.125)),
                Up(4, "b", (0.25, -1.0)),
                Up(5, "a", (0.75, -0.5)),
                Up(6, "b", (0.5, 0.5)),
                Up(7, "c", (-0.5, 0.375)),
                Up(8, "a", (0.25, 0.75)),
                Up(9, "b", (0.5, -0.25)),
            ),
        ),
    ],
}
