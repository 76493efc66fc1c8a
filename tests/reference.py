"""A second simulator of the rules, to hold the testbed's runs against.

It was written from the rules' equations alone and shares no code with what it checks: float64 where that
has float32, the clients' trainings in closed form, and no queue of events but a look at who is next.
Clients have the quadratic f_i(w) = ½‖w − c_i‖² and `timing`, a list of durations that the trainings that
begin take in turn; nothing is drawn at random. All times are whole nanoseconds. Where the equations are
silent (a buffer that can fill no more, an interruption before the first step, importance after a
goodbye), it follows the testbed.

One instant, in this order: what the scenario does; trainings that end; their updates, handed to the rule
in the order of the clients, replies at once; the timer; replies after the aggregation, models before
requests. What is answered to a request within the same instant is handled as another such round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Draw = Callable[[Sequence[int]], Sequence[int]]


class Step(NamedTuple):
    at: int
    verb: str
    """`leave`, `join`, `crash` or `restart`."""
    client: int


@dataclass(frozen=True)
class Setting:
    rule: str
    parameters: Mapping[str, Any]
    """Every parameter that is not at its default; durations in ns."""
    centers: Sequence[Sequence[float]]
    steps: int
    lr: float
    timings: Sequence[Sequence[int]]
    scenario: Sequence[Step]
    """Steps in order of time. A client whose first step is `join` is absent at the start."""
    after: int


class Contribution(NamedTuple):
    client: int
    base: int
    """The version that it was trained from."""
    steps: int
    arrived: int
    weight: float


@dataclass(frozen=True)
class Version:
    number: int
    at: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Model:
    version: int
    w: Vector
    sent: int
    lr: float


@dataclass(frozen=True)
class Update:
    client: int
    model: Model
    end: Vector
    steps: int
    arrived: int

    @property
    def delta(self) -> Vector:
        return self.end - self.model.w

    @property
    def round_trip(self) -> int:
        return self.arrived - self.model.sent


@dataclass
class Training:
    model: Model
    start: int
    end: int
    steps: int

    def cut(self, now: int) -> None:
        """Let it end with the step that is being done at `now`."""
        done = -(-(now - self.start) * self.steps // (self.end - self.start))
        self.end = self.start + (self.end - self.start) * done // self.steps
        self.steps = done


@dataclass
class Client:
    index: int
    center: Vector
    timing: Sequence[int]
    steps: int
    send_buffer: str | None
    """None: what is ready is sent; `overwrite` or `hold`: once it is asked for."""
    inbox: Model | None = None
    training: Training | None = None
    ready: Update | None = None
    asked: bool = False
    begun: int = 0

    def receive(self, model: Model, now: int) -> None:
        self.inbox = model
        self._begin(now)

    def _begin(self, now: int) -> None:
        held = self.send_buffer == "hold" and self.ready is not None
        if self.training is None and self.inbox is not None and not held:
            takes = self.timing[self.begun % len(self.timing)]
            self.begun += 1
            self.training = Training(self.inbox, now, now + takes, self.steps)
            self.inbox = None

    def finish(self, now: int) -> Update | None:
        """The training's end: what is sent, if anything."""
        assert self.training is not None
        model, steps = self.training.model, self.training.steps
        phi = 1 - (1 - model.lr) ** steps
        end = model.w + phi * (self.center - model.w)
        self.ready = Update(self.index, model, end, steps, now)
        self.training = None
        sent = self._send(now) if self.asked or self.send_buffer is None else None
        self._begin(now)
        return sent

    def pull(self, now: int) -> Update | None:
        self.asked = True
        return self._send(now) if self.ready is not None else None

    def interrupt(self, now: int) -> Update | None:
        if self.ready is None and self.training is not None:
            self.training.cut(now)
        return self.pull(now)

    def _send(self, now: int) -> Update:
        assert self.ready is not None
        sent, self.ready, self.asked = self.ready, None, False
        self._begin(now)
        return replace(sent, arrived=now)

    def stop(self) -> None:
        self.inbox = self.training = self.ready = None
        self.asked = False


@dataclass
class Server:
    setting: Setting
    draw: Draw
    """Whom a round takes of the members."""
    now: int = 0
    number: int = 0
    versions: list[Version] = field(default_factory=list)
    out: dict[int, int] = field(default_factory=dict)
    """The version that was sent to each client that has not answered it yet."""
    later: set[int] = field(default_factory=set)
    requests: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        setting = self.setting
        first: dict[int, str] = {}
        for step in setting.scenario:
            first.setdefault(step.client, step.verb)
        self.w = np.zeros(len(setting.centers[0]))
        self.members = [i for i in range(len(setting.centers)) if first.get(i) != "join"]
        self.rule = RULES[setting.rule](self, **setting.parameters)
        self.clients = [
            Client(i, np.array(center), timing, self.rule.steps, self.rule.send_buffer)
            for i, (center, timing) in enumerate(zip(setting.centers, setting.timings, strict=True))
        ]

    def send(self, client: int, lr: float | None = None) -> None:
        lr = self.rule.lr if lr is None else lr
        self.out[client] = self.number
        self.clients[client].receive(Model(self.number, self.w.copy(), self.now, lr), self.now)

    def apply(self, w: Vector, weighted: Sequence[tuple[Update, float]]) -> None:
        self.w, self.number = w, self.number + 1
        contributions = tuple(
            Contribution(u.client, u.model.version, u.steps, u.arrived, weight) for u, weight in weighted
        )
        self.versions.append(Version(self.number, self.now, contributions))

    @property
    def busy(self) -> set[int]:
        """Clients that have a model to answer, or are about to get one."""
        return self.out.keys() | self.later

    def idle(self, updates: Sequence[Update]) -> set[int]:
        """Return their senders, except those that left or returned since."""
        return ({update.client for update in updates} & set(self.members)) - self.busy

    def empty(self) -> None:
        """A round without updates."""
        self.versions.append(Version(self.number, self.now, ()))

    def staleness(self, update: Update) -> int:
        return self.number - update.model.version

    def run(self) -> None:
        self.rule.start()
        self._reply()
        scenario = list(self.setting.scenario)
        period = self.rule.period
        while self.now < self.setting.after:
            times = [client.training.end for client in self.clients if client.training is not None]
            times += [step.at for step in scenario[:1]]
            times += [(self.now // period + 1) * period] if period else []
            if not times or min(times) > self.setting.after:
                return
            self.now = min(times)
            while scenario and scenario[0].at == self.now:
                self._happen(scenario.pop(0))
            self._instant(tick=bool(period) and self.now % (period or 1) == 0)

    def _happen(self, step: Step) -> None:
        if step.verb in ("join", "restart"):
            self.members = sorted([*self.members, step.client])
            self.rule.joined(step.client)
            return
        self.members.remove(step.client)
        self.out.pop(step.client, None)
        self.later.discard(step.client)
        self.requests.discard(step.client)
        self.clients[step.client].stop()
        self.rule.left(step.client, goodbye=step.verb == "leave")

    def _instant(self, *, tick: bool) -> None:
        answers: list[Update] = []
        while True:
            for client in self.clients:
                if client.training is not None and client.training.end == self.now:
                    update = client.finish(self.now)
                    answers += [update] if update is not None else []
            for update in sorted(answers, key=lambda update: update.client):
                self.out.pop(update.client, None)
                self.rule.arrived(update)
            if tick:
                self.rule.tick()
            more = bool(self.requests)
            answers, tick = self._reply(), False
            if not more or self.now == self.setting.after:
                return

    def _reply(self) -> list[Update]:
        """Send what is deferred; the updates that come back at once."""
        later, self.later = sorted(self.later), set()
        requests, self.requests = sorted(self.requests), set()
        for client in later:
            self.send(client)
        told = [getattr(self.clients[client], self.rule.request)(self.now) for client in requests]
        return [update for update in told if update is not None]


class Rule:
    """Behaviour of the server. This base sends the model to every client that arrives. Parameters are
    attributes."""

    request = "pull"
    send_buffer: str | None = None
    server_lr = 1.0
    period = 0

    def __init__(self, server: Server, **parameters: Any) -> None:
        self.server = server
        self.steps, self.lr = server.setting.steps, server.setting.lr
        self.got: list[Update] = []
        vars(self).update(parameters)

    def start(self) -> None:
        for client in self.server.members:
            self.joined(client)

    def joined(self, client: int) -> None:
        self.server.send(client)

    def left(self, client: int, *, goodbye: bool) -> None:
        pass

    def arrived(self, update: Update) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        pass

    def add(self, weighted: Sequence[tuple[Update, float]]) -> None:
        """w ← w + Σ ω Δ."""
        self.server.apply(self.server.w + sum(weight * u.delta for u, weight in weighted), weighted)


class FedAvg(Rule):
    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.waiting: set[int] = set()

    def start(self) -> None:
        self.waiting = set(self.server.draw(self.server.members))
        self.server.later |= self.waiting

    def joined(self, client: int) -> None:
        if not self.waiting:
            self.start()

    def left(self, client: int, *, goodbye: bool) -> None:
        self.waiting.discard(client)
        self.check()

    def arrived(self, update: Update) -> None:
        self.got.append(update)
        self.waiting.discard(update.client)
        self.check()

    def check(self) -> None:
        if not self.waiting:
            got, self.got = self.got, []
            if got:
                self.add([(update, self.server_lr / len(got)) for update in got])
            self.start()


class FedAsync(Rule):
    mixing = 0.6
    staleness = "polynomial"
    a: float | None = None
    b = 4

    def arrived(self, update: Update) -> None:
        beta = self.server_lr * self.mixing * self.discount(self.server.staleness(update))
        self.server.apply((1 - beta) * self.server.w + beta * update.end, [(update, beta)])
        self.server.send(update.client)

    def discount(self, tau: int) -> float:
        if self.staleness == "polynomial":
            return float((tau + 1) ** -(0.5 if self.a is None else self.a))
        if self.staleness == "hinge" and tau > self.b:
            return 1 / ((10 if self.a is None else self.a) * (tau - self.b) + 1)
        return 1.0


class AsyncFedAvg(Rule):
    weights = "identical"
    update_times: Sequence[int] | None = None

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.trips: list[list[int]] = [[] for _ in server.setting.centers]

    def arrived(self, update: Update) -> None:
        self.trips[update.client].append(update.round_trip)
        d = self.time_based(update.client) if self.weights == "time_based" else 1.0
        self.add([(update, self.server_lr * d)])
        self.server.send(update.client)

    def time_based(self, client: int) -> float:
        if self.update_times is None and not all(self.trips):
            return 1.0
        times: Sequence[float] = self.update_times or [sum(trips) / len(trips) for trips in self.trips]
        return sum(1 / time for time in times) * times[client] / len(times)


class FedFix(Rule):
    update_times: Sequence[int] | None = None

    def arrived(self, update: Update) -> None:
        self.got.append(update)

    def tick(self) -> None:
        got, self.got = self.got, []
        p = 1 / len(self.server.clients)
        if got:
            self.add([(update, self.server_lr * self.ticks(update) * p) for update in got])
            self.server.later |= self.server.idle(got)
        else:
            self.server.empty()

    def ticks(self, update: Update) -> int:
        """⌈τ_i/Δt⌉, or the whole ticks from the dispatch to now."""
        if self.update_times is not None:
            return -(-self.update_times[update.client] // self.period)
        return self.server.now // self.period - update.model.sent // self.period


class Buffered(Rule):
    """Aggregates at `size` updates, or fewer if all present clients wait for it."""

    waits = True

    def arrived(self, update: Update) -> None:
        self.got.append(update)
        self.check()
        if not self.waits:
            self.server.send(update.client)

    def left(self, client: int, *, goodbye: bool) -> None:
        self.check()

    def check(self) -> None:
        waiting = self.server.idle(self.got) if self.waits else set()
        starved = bool(waiting) and not self.server.busy
        if (len(self.got) >= self.size or starved) and self.may_aggregate():
            got, self.got = self.got, []
            self.add(list(zip(got, self.weigh(got), strict=True)))
            self.server.later |= waiting

    @property
    def size(self) -> int:
        raise NotImplementedError

    def may_aggregate(self) -> bool:
        return True

    def weigh(self, got: Sequence[Update]) -> Sequence[float]:
        raise NotImplementedError


class FedBuff(Buffered):
    buffer_size = 10
    staleness = "none"
    reply = "immediate"

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.reply == "after_aggregation"

    @property
    def size(self) -> int:
        return self.buffer_size

    def weigh(self, got: Sequence[Update]) -> Sequence[float]:
        exponent = -0.5 if self.staleness == "inverse_sqrt" else 0.0
        return [self.server_lr / self.size * (1 + self.server.staleness(u)) ** exponent for u in got]


class AsySG(Buffered):
    """One step of size 1 makes the delta −g."""

    gradients: int
    mean = True

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.steps, self.lr = 1, 1.0

    @property
    def size(self) -> int:
        return self.gradients

    def weigh(self, got: Sequence[Update]) -> Sequence[float]:
        return [self.server_lr / (self.size if self.mean else 1)] * len(got)


class Port(Buffered):
    request = "interrupt"
    min_updates = 15
    urgent = True
    similarity_weight = 1.0
    staleness_weight = 3.0
    staleness_bound = 10

    @property
    def size(self) -> int:
        return self.min_updates

    def arrived(self, update: Update) -> None:
        self.server.requests.discard(update.client)
        super().arrived(update)

    def may_aggregate(self) -> bool:
        """Whether no client trains from too old a version. If it may, request the updates of those that
        do."""
        oldest = self.server.number - self.staleness_bound
        stale = {client for client, base in self.server.out.items() if base < oldest}
        self.server.requests |= stale if self.urgent else set()
        return not stale

    def weigh(self, got: Sequence[Update]) -> Sequence[float]:
        scores = [self.score(update) for update in got]
        return [self.server_lr * score / sum(scores) for score in scores]

    def score(self, update: Update) -> float:
        tau, bound = self.server.staleness(update), self.staleness_bound
        drift, delta = self.server.w - update.model.w, update.delta
        norms = float(np.linalg.norm(drift) * np.linalg.norm(delta))
        cosine = 1.0 if tau <= 1 else float(drift @ delta) / norms if norms else 0.0
        return self.similarity_weight * (1 + cosine) / 2 + self.staleness_weight * bound / (tau + bound)


class FedFa(Rule):
    window_size: int
    variant = "param"

    def arrived(self, update: Update) -> None:
        size, eta, w = self.window_size, self.server_lr, self.server.w
        new = 1 if len(self.got) == size else size
        self.got = [*self.got, update][-size:]
        if len(self.got) == size:
            if self.variant == "param":
                w = (1 - eta) * w + eta / size * sum(u.end for u in self.got)
            else:
                w = w + eta / size * sum(u.delta for u in self.got)
            self.server.apply(w, [(u, eta / size) for u in self.got[-new:]])
        self.server.send(update.client)


class AsFedAvg(Rule):
    every: int

    def arrived(self, update: Update) -> None:
        self.got.append(update)
        self.server.send(update.client)
        if len(self.got) == self.every:
            got, self.got = self.got, []
            share = self.server_lr / self.every
            w = (1 - self.server_lr) * self.server.w + share * sum(u.end for u in got)
            self.server.apply(w, [(u, share) for u in got])


class DeFedAvgNIID(Rule):
    sample: int
    send_buffer = "overwrite"

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.drawn: Counter[int] = Counter()

    def start(self) -> None:
        self.server.later |= set(self.server.members)
        self.begin_round()

    def begin_round(self) -> None:
        self.drawn, self.got = Counter(self.server.draw(self.server.members)), []
        self.server.requests |= set(self.drawn)

    def joined(self, client: int) -> None:
        super().joined(client)
        if not self.drawn:
            self.begin_round()

    def left(self, client: int, *, goodbye: bool) -> None:
        if client not in {update.client for update in self.got}:
            del self.drawn[client]
            self.check()

    def arrived(self, update: Update) -> None:
        self.got.append(update)
        self.check()

    def check(self) -> None:
        if len(self.got) == len(self.drawn):
            if self.got:
                share = self.server_lr / self.drawn.total()
                self.add([(u, share * self.drawn[u.client]) for u in self.got])
                self.server.later |= set(self.server.members)
            self.begin_round()


class DeFedAvgIID(Rule):
    buffer_size: int

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.second: list[Update] = []
        """Clients whose update this round already has."""

    def arrived(self, update: Update) -> None:
        again = update.client in {u.client for u in self.got}
        (self.second if again else self.got).append(update)
        self.check()

    def left(self, client: int, *, goodbye: bool) -> None:
        self.check()

    def check(self) -> None:
        missing = set(self.server.members) - {u.client for u in self.got}
        if len(self.got) >= self.buffer_size or (self.got and not missing):
            got, second, self.got, self.second = self.got, self.second, [], []
            self.add([(update, self.server_lr / len(got)) for update in got])
            self.server.later |= set(self.server.members)
            for update in second:
                self.arrived(update)


class Area(Rule):
    criterion = "every"
    every: int
    step = "constant"
    c: float
    d: float

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.u, self.k = np.zeros_like(server.w), 0
        self.y = dict.fromkeys(server.members, server.w)
        self.weights: list[float] = []

    @property
    def alpha(self) -> float:
        return self.lr if self.step == "constant" else self.c / (self.k + self.d)

    def joined(self, client: int) -> None:
        if client not in self.y:
            n, x = len(self.y), self.server.w
            self.u = (n * (x + self.u) + x) / (n + 1) - x
            self.y[client] = x
        self.server.send(client, self.alpha)

    def left(self, client: int, *, goodbye: bool) -> None:
        if goodbye:
            n, x = len(self.y), self.server.w
            self.u = (n * (x + self.u) - self.y.pop(client)) / (n - 1) - x

    def arrived(self, update: Update) -> None:
        self.u = self.u + (update.end - self.y[update.client]) / len(self.y)
        self.y[update.client] = update.end
        self.got.append(update)
        self.weights.append(1 / len(self.y))
        self.k += 1
        self.server.send(update.client, self.alpha)
        if self.criterion == "every" and len(self.got) == self.every:
            self.tick()

    def tick(self) -> None:
        got, weights, self.got, self.weights = self.got, self.weights, [], []
        self.k += 1
        if got or self.u.any():
            step = self.server_lr * self.u
            self.u = self.u - step
            self.server.apply(self.server.w + step, list(zip(got, weights, strict=True)))
        else:
            self.server.empty()


class Favano(Rule):
    request = "interrupt"
    send_buffer = "hold"
    debias = "stochastic"
    sample: int
    overdue = False

    def __init__(self, server: Server, **parameters: Any) -> None:
        super().__init__(server, **parameters)
        self.waiting: set[int] = set()
        self.done: defaultdict[int, list[int]] = defaultdict(list)
        self.sum = np.zeros_like(server.w)

    def tick(self) -> None:
        self.overdue = bool(self.waiting)
        if not self.overdue:
            self.waiting = set(self.server.draw(self.server.members))
            self.server.requests |= self.waiting

    def left(self, client: int, *, goodbye: bool) -> None:
        self.done.pop(client, None)
        if client in self.waiting:
            self.waiting.discard(client)
            self.check()

    def arrived(self, update: Update) -> None:
        self.waiting.discard(update.client)
        self.got.append(update)
        self.sum = self.sum + update.model.w + update.delta / self.alpha(update)
        self.check()

    def alpha(self, update: Update) -> float:
        """1 where no step was ever done, and so there is nothing to scale."""
        done = self.done[update.client]
        done.append(update.steps)
        if self.debias == "stochastic":
            return sum(steps > 0 for steps in done) / len(done) * update.steps or 1.0
        return sum(done) / len(done) or 1.0

    def check(self) -> None:
        if self.waiting:
            return
        if self.got:
            share = self.server_lr / (len(self.got) + 1)
            w = (1 - self.server_lr) * self.server.w + share * (self.server.w + self.sum)
            self.server.apply(w, [(u, share) for u in self.got])
            self.server.later |= self.server.idle(self.got)
            self.got, self.sum = [], np.zeros_like(w)
        if self.overdue:
            self.tick()


RULES: Mapping[str, type[Rule]] = {
    "area": Area,
    "as_fedavg": AsFedAvg,
    "async_fedavg": AsyncFedAvg,
    "asysg": AsySG,
    "defedavg_iid": DeFedAvgIID,
    "defedavg_niid": DeFedAvgNIID,
    "favano": Favano,
    "fedasync": FedAsync,
    "fedavg": FedAvg,
    "fedbuff": FedBuff,
    "fedfa": FedFa,
    "fedfix": FedFix,
    "port": Port,
}


def simulate(setting: Setting, draw: Draw = list) -> Server:
    """The run to its end: its `versions`, and the final model `w`."""
    server = Server(setting, draw)
    server.run()
    return server
