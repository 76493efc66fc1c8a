"""The thirteen rules in plain NumPy, written from the papers' equations without code of `agents`.

`Reference` is an adapter. Its `faults` name known mistakes (`fl_conformance.faults`), each of which
changes one line of the computation. So the kit knows the models that an implementation with this mistake
would have computed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike

from fl_conformance.adapter import ClientUpdate, Setting, Vector


class Reference:
    """Computes every rule, with the mistakes named in `faults`."""

    def __init__(self, faults: Collection[str] = ()) -> None:
        self._faults = frozenset(faults)
        self._answered: set[int] = set()
        self._next_tick = math.inf
        self._rule: _RuleReference

    def start(self, setting: Setting) -> None:
        self._rule = RULES[setting.rule](setting, self._faults)
        self._rule.begin()
        self._next_tick = self._rule.first_tick()

    def receive(self, update: ClientUpdate) -> None:
        rule = self._rule
        self._tick(update.at, inclusive="tick_before_arrivals" in self._faults)
        rule.now = update.at
        if update.client not in rule.present and "departed_applied" not in self._faults:
            return
        if update.dispatch in self._answered and "duplicate_applied" not in self._faults:
            return
        self._answered.add(update.dispatch)
        rule.flush()
        if rule.training.get(update.client) == update.dispatch:
            del rule.training[update.client]
        rule.arrived(update)

    def model(self, at: float, client: str | None = None) -> Vector:
        rule = self._rule
        self._tick(at, inclusive=client is None)
        rule.now = at
        if client is None or "sent_after_aggregation" in self._faults:
            rule.flush()
        if client is not None:
            rule.sends += 1
            rule.training[client] = rule.sends
            rule.version_sent[client] = rule.version
        if "never_updated" in self._faults:
            return rule.models[0].copy()
        if "one_version_behind" in self._faults:
            return rule.models[max(0, rule.version - 1)].copy()
        return rule.w.copy()

    def join(self, client: str, at: float) -> None:
        self._tick(at, inclusive=False)
        rule = self._rule
        rule.now = at
        rule.flush()
        rule.present = [one for one in rule.setting.clients if one in {*rule.present, client}]
        rule.admit(client)

    def leave(self, client: str, at: float, memory: ArrayLike | None = None) -> None:
        self._tick(at, inclusive=False)
        rule = self._rule
        rule.now = at
        rule.flush()
        rule.present = [one for one in rule.present if one != client]
        rule.training.pop(client, None)
        if "buffer_lost_on_leave" in self._faults:
            rule.buffer = [update for update in rule.buffer if update.client != client]
        rule.remove(client, None if memory is None else np.asarray(memory, dtype=np.float64))

    def _tick(self, at: float, *, inclusive: bool) -> None:
        rule = self._rule
        while self._next_tick < at or (inclusive and self._next_tick == at):
            rule.now = self._next_tick
            rule.tick()
            self._next_tick = rule.following_tick(self._next_tick)


class _RuleReference:
    """The methods are the equations; the faults are in them."""

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        self.setting, self.faults = setting, faults
        self.parameters: dict[str, Any] = {"server_lr": 1.0, **self.defaults, **setting.parameters}
        self.w, self.version = setting.model.copy(), 0
        self.models = [self.w]
        self.made = [0.0]
        self.present = list(setting.present)
        self.clients = len(setting.clients)
        self.buffer: list[ClientUpdate] = []
        self.training: dict[str, int] = {}
        """Client -> the dispatch that it works on."""
        self.version_sent: dict[str, int] = {}
        self.sends = 0
        self.now = 0.0
        self._draws = iter(setting.draws)

    def begin(self) -> None: ...

    def arrived(self, update: ClientUpdate) -> None:
        raise NotImplementedError

    def admit(self, client: str) -> None:
        pass

    def remove(self, client: str, memory: Vector | None) -> None:
        pass

    def flush(self) -> None:
        """Do what is due after the reply to the last sender."""

    def first_tick(self) -> float:
        return cast(float, self.parameters.get("period", math.inf))

    def following_tick(self, tick: float) -> float:
        return round(tick / self.first_tick() + 1) * self.first_tick()

    def tick(self) -> None:
        pass

    @property
    def eta(self) -> float:
        return 1.0 if "server_lr_ignored" in self.faults else float(self.parameters["server_lr"])

    def importance(self, client: str) -> float:
        """p_i."""
        if "importance_ignored" in self.faults:
            return 1 / self.clients
        if "samples_as_importance" in self.faults:
            total = sum(one.samples for one in self.setting.clients.values())
            return self.setting.clients[client].samples / total
        return self.setting.clients[client].importance

    def delta(self, update: ClientUpdate) -> Vector:
        """Δ_i = w_i − w_b, divided by the effective number of steps."""
        base = update.base
        if "base_current" in self.faults:
            base = self.w
        if "base_previous" in self.faults:
            base = self.models[max(0, update.base_version - 1)]
        if "base_first" in self.faults:
            base = self.models[0]
        if "model_as_delta" in self.faults:
            base = np.zeros_like(base)
        delta = (_trained(update) - base) / update.effective_steps
        return -delta if "sign" in self.faults else delta

    def end(self, update: ClientUpdate) -> Vector:
        """w_i."""
        if "delta_as_model" in self.faults:
            return update.vector - update.base
        if "sign" in self.faults:
            return 2 * update.base - update.vector
        return update.vector

    def staleness(self, update: ClientUpdate) -> int:
        """τ = v − b."""
        tau = max(0, self.version - update.base_version)  # a faulty server may lag behind
        if "staleness_plus_one" in self.faults:
            return tau + 1
        if "staleness_minus_one" in self.faults:
            return max(0, tau - 1)
        if "staleness_ignored" in self.faults:
            return 0
        if "staleness_at_upload" in self.faults:
            at_upload = sum(made < update.uploaded for made in self.made) - 1
            return max(0, at_upload - update.base_version)
        return tau

    def divide(self, count: int, updates: Sequence[ClientUpdate]) -> float:
        if "not_divided" in self.faults:
            return 1.0
        if "divided_by_clients" in self.faults:
            return 1 / self.clients
        if "divided_by_contributors" in self.faults:
            return 1 / len({update.client for update in updates})
        if "divided_twice" in self.faults:
            return 1 / count**2
        return 1 / count

    def size(self, count: int) -> int:
        return count + ("one_too_late" in self.faults) - ("one_too_early" in self.faults)

    def add(self, step: Vector) -> None:
        """w ← w + η_g · step."""
        replaces = "delta_as_model" in self.faults
        self.make(self.eta * step if replaces else self.w + self.eta * step)

    def make(self, w: Vector) -> None:
        self.w = w
        self.version += 1
        self.models.append(w)
        self.made.append(self.now)

    def empty(self) -> list[ClientUpdate]:
        taken = list(self.buffer)
        if "buffer_not_cleared" not in self.faults:
            self.buffer.clear()
        return taken

    def draw(self) -> list[str]:
        return list(next(self._draws, []))


class _RoundsReference(_RuleReference):
    """Rounds wait for the clients they have drawn."""

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self.drawn: Counter[str] = Counter()
        self.waiting: set[str] = set()

    def begin(self) -> None:
        self.drawn = Counter(self.draw())
        self.waiting = set(self.drawn)
        if "multiplicity_ignored" in self.faults:
            self.drawn = Counter(set(self.drawn))

    def admit(self, client: str) -> None:
        if not self.waiting:
            self.begin()

    def remove(self, client: str, memory: Vector | None) -> None:
        if client in self.waiting:
            if "leaver_counted" not in self.faults:
                del self.drawn[client]
            self.waiting.remove(client)
            self.end_if_complete()

    def end_if_complete(self) -> None:
        if not self.waiting:
            if self.buffer:
                self.aggregate()
            self.begin()

    def aggregate(self) -> None:
        raise NotImplementedError


class _FedAvgReference(_RoundsReference):
    """w ← w + η_g τ_eff Σ_{i∈S} p'_i Δ_i (McMahan 2017)."""

    began = 0.0

    def begin(self) -> None:
        super().begin()
        if self.parameters.get("sample") is None:
            self.drawn = Counter(self.present)
            self.waiting = set(self.drawn)
        self.began = self.now

    def first_tick(self) -> float:
        timeout = self.parameters.get("round_timeout")
        return math.inf if timeout is None else self.began + timeout

    def following_tick(self, tick: float) -> float:
        return self.first_tick() if self.began == tick else tick + 1e-9

    def tick(self) -> None:
        if self.now >= self.first_tick():
            for client in self.waiting:
                del self.drawn[client]
            self.waiting = set()
            self.end_if_complete()

    def arrived(self, update: ClientUpdate) -> None:
        late = update.client not in self.waiting or update.base_version != self.version
        if late and "late_applied" not in self.faults:
            return
        self.buffer.append(update)
        self.waiting.discard(update.client)
        self.end_if_complete()

    def aggregate(self) -> None:
        updates = self.empty()
        weights = [max(1, self.drawn[u.client]) * self.importance(u.client) for u in updates]
        scale = 1 / sum(weights)
        if self.parameters.get("weights") == "unbiased" and "weights_renormalised" not in self.faults:
            scale = len(self.present) / self.drawn.total()
        if "weights_not_normalised" in self.faults:
            scale = 1.0
        if self.faults & {"not_divided", "divided_by_clients", "leaver_counted"}:
            scale *= self.divide(len(updates), updates) * len(updates)
        if "leaver_counted" in self.faults:
            scale *= len(updates) / self.drawn.total()
        tau_eff = 1.0
        if "tau_eff_ignored" not in self.faults:
            steps = [weight * u.effective_steps for weight, u in zip(weights, updates, strict=True)]
            tau_eff = sum(steps) / sum(weights)
        total = sum(weight * self.delta(u) for weight, u in zip(weights, updates, strict=True))
        self.add(np.asarray(tau_eff * scale * total))


class _FedAsyncReference(_RuleReference):
    """w ← (1 − β_t) w + β_t w_i, β_t = η_g β s(τ) (Xie 2019)."""

    defaults: ClassVar = {"mixing": 0.6, "staleness": "polynomial", "a": None, "b": 4}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._mixing = float(self.parameters["mixing"])

    def arrived(self, update: ClientUpdate) -> None:
        discount = self.discount(self.staleness(update))
        if "staleness_inverted" in self.faults:
            discount = 1 / discount
        beta = self.eta * self._mixing * discount
        if "mixing_not_reset" in self.faults:
            self._mixing *= discount
        if "divided_by_clients" in self.faults:
            beta /= self.clients
        if "model_replaced" in self.faults:
            beta = 1.0
        if "shares_swapped" in self.faults:
            beta = 1 - beta
        if "model_as_delta" in self.faults:
            self.make(self.w + beta * update.vector)
        else:
            self.make((1 - beta) * self.w + beta * self.end(update))

    def discount(self, tau: int) -> float:
        """s(τ)."""
        kind, a, b = self.parameters["staleness"], self.parameters["a"], self.parameters["b"]
        if kind == "polynomial":
            return float((tau + 1) ** -(0.5 if a is None else a))
        if kind == "hinge" and tau > b:
            one = 0 if "hinge_without_one" in self.faults else 1
            return float(1 / ((10 if a is None else a) * (tau - b) + one))
        return 1.0


class _AsyncFedAvgReference(_RuleReference):
    """w ← w + η_g d_i Δ_i, d_i = 1 or (Σ_j 1/τ_j) τ_i p_i (Fraboni 2023, 4.3)."""

    defaults: ClassVar = {"weights": "identical", "update_times": None}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._trips: defaultdict[str, list[float]] = defaultdict(list)

    def arrived(self, update: ClientUpdate) -> None:
        self._trips[update.client].append(update.at - update.sent)
        weight = self._weight(update.client)
        if "divided_by_clients" in self.faults:
            weight /= self.clients
        self.add(weight * self.delta(update))

    def _weight(self, client: str) -> float:
        """d_i."""
        given = self.parameters["update_times"]
        if self.parameters["weights"] == "identical" or "time_weights_ignored" in self.faults:
            return 1.0
        if given is None and len(self._trips) < self.clients:
            return 1.0
        means = {one: sum(trips) / len(trips) for one, trips in self._trips.items()}
        if "last_round_trip" in self.faults:
            means = {one: trips[-1] for one, trips in self._trips.items()}
        times = means if given is None else dict(zip(self.setting.clients, given, strict=True))
        return sum(1 / time for time in times.values()) * times[client] * self.importance(client)


class _FedFixReference(_RuleReference):
    """Every Δt: w ← w + η_g Σ_{i∈S} d_i Δ_i, d_i = ⌈τ_i/Δt⌉ p_i (Fraboni 2023, 4.4)."""

    defaults: ClassVar = {"update_times": None}

    def arrived(self, update: ClientUpdate) -> None:
        self.buffer.append(update)

    def tick(self) -> None:
        if updates := self.empty():
            weights = [self._ticks(u) * self.importance(u.client) for u in updates]
            if "weights_normalised" in self.faults:
                weights = [weight / sum(weights) for weight in weights]
            self.add(np.asarray(sum(d * self.delta(u) for d, u in zip(weights, updates, strict=True))))

    def _ticks(self, update: ClientUpdate) -> int:
        """⌈τ_i/Δt⌉; if τ_i is not given, the ticks after the dispatch, up to now."""
        if "time_weights_ignored" in self.faults:
            return 1
        period = float(self.parameters["period"])
        given = self.parameters["update_times"]
        if given is not None:
            times = dict[str, float](zip(self.setting.clients, given, strict=True))
            return max(1, math.ceil(times[update.client] / period))
        return round(self.now / period) - int(update.sent // period)


class _FedBuffReference(_RuleReference):
    """At K updates: w ← w + (η_g/K) Σ s(τ_i) Δ_i (Nguyen 2022; Toghani & Uribe 2022)."""

    defaults: ClassVar = {"buffer_size": 10, "staleness": "none"}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._deltas: list[tuple[Vector, float]] = []

    def arrived(self, update: ClientUpdate) -> None:
        self.buffer.append(update)
        size = self.parameters["buffer_size"]
        if len(self.buffer) < self.size(size):
            return
        updates = self.empty()
        weights = [self._discount(self.staleness(u)) for u in updates]
        share = self.divide(size, updates)
        if "weights_normalised" in self.faults:
            share = 1 / sum(weights)
        self.add(
            np.asarray(share * sum(s * self.delta(u) for s, u in zip(weights, updates, strict=True)))
        )

    def _discount(self, tau: int) -> float:
        """s(τ)."""
        if self.parameters["staleness"] == "none":
            return 1.0
        discount = 1 / math.sqrt(1 + tau)
        return 1 / discount if "staleness_inverted" in self.faults else discount


class _FedFaReference(_RuleReference):
    """w ← mean of the window's models, or w + η_g × mean of the window's deltas (Xu 2024)."""

    defaults: ClassVar = {"variant": "param"}

    def arrived(self, update: ClientUpdate) -> None:
        size = self.parameters["window_size"]
        length = self.size(size)
        self.buffer = [*self.buffer, update][-length:]
        if len(self.buffer) < length and "window_not_full" not in self.faults:
            return
        count = len(self.buffer)
        share = self.divide(count, self.buffer)
        if self.parameters["variant"] == "param":
            mean = share * sum(self.end(u) for u in self.buffer)
            self.make((1 - self.eta) * self.w + self.eta * mean)
        else:
            steps = [u.effective_steps for u in self.buffer]
            tau_eff = 1.0 if "tau_eff_ignored" in self.faults else sum(steps) / count
            self.add(np.asarray(tau_eff * share * sum(self.delta(u) for u in self.buffer)))
        if "window_emptied" in self.faults:
            self.buffer = []


class _AsFedAvgReference(_RuleReference):
    """At every Δ-th arrival: w ← mean of the Δ models (Iakovidou & Kim 2024, section 5)."""

    def arrived(self, update: ClientUpdate) -> None:
        self.buffer.append(update)

    def flush(self) -> None:
        if len(self.buffer) >= self.size(self.parameters["every"]):
            updates = self.empty()
            mean = self.divide(len(updates), updates) * sum(self.end(u) for u in updates)
            self.make((1 - self.eta) * self.w + self.eta * mean)
            if "buffer_not_cleared" in self.faults:
                self.buffer = updates[-(self.parameters["every"] - 1) :] if len(updates) > 1 else []


class _DeFedAvgNiidReference(_RoundsReference):
    """Clients are drawn with replacement: w ← w + η_g (1/n) Σ m_i Δ_i (Wang 2024, Algorithm 1)."""

    def arrived(self, update: ClientUpdate) -> None:
        if update.client in self.waiting:
            self.buffer.append(update)
            self.waiting.discard(update.client)
            self.end_if_complete()

    def aggregate(self) -> None:
        updates = self.empty()
        share = self.divide(self.drawn.total(), updates)
        total = sum(max(1, self.drawn[u.client]) * self.delta(u) for u in updates)
        self.add(np.asarray(share * total))


class _DeFedAvgIidReference(_RuleReference):
    """At n updates of different clients: w ← w + η_g (1/n) Σ Δ_i (Wang 2024, Algorithm 2)."""

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._held: list[ClientUpdate] = []

    def arrived(self, update: ClientUpdate) -> None:
        twice = update.client in {u.client for u in self.buffer}
        if twice and "counted_twice" not in self.faults:
            if "second_dropped" not in self.faults:
                self._held.append(update)
            return
        self.buffer.append(update)
        if len(self.buffer) >= self.size(self.parameters["buffer_size"]):
            updates = self.empty()
            share = self.divide(len(updates), updates)
            self.add(np.asarray(share * sum(self.delta(u) for u in updates)))
            held, self._held = self._held, []
            for one in held:
                self.arrived(one)


class _AreaReference(_RuleReference):
    """u ← u + p_i m_i; x ← x + η_g u, u ← (1 − η_g) u (Iakovidou & Kim 2024, Algorithms 1-2)."""

    defaults: ClassVar = {"criterion": "every"}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._u = np.zeros_like(self.w)
        self._members = {client: setting.clients[client].importance for client in setting.present}
        self._since = 0
        self._ends: dict[str, Vector] = dict.fromkeys(setting.present, self.w)
        """y_i of each member, shape (d,): the end of its last training, or the model it joined with."""
        self._intervals = iter(setting.intervals)

    def first_tick(self) -> float:
        if self.parameters["criterion"] == "random":
            return next(self._intervals, math.inf)
        return super().first_tick()

    def following_tick(self, tick: float) -> float:
        if self.parameters["criterion"] == "random":
            return tick + next(self._intervals, math.inf)
        return super().following_tick(tick)

    def arrived(self, update: ClientUpdate) -> None:
        trained = _trained(update)
        message = trained - self._ends.get(update.client, update.base)
        self._ends[update.client] = trained
        if "model_as_delta" in self.faults:
            message = trained
        if "residual_of_base" in self.faults:
            message = trained - update.base
        p = self._members[update.client] / sum(self._members.values())
        if "importance_ignored" in self.faults:
            p = 1 / len(self._members)
        if "not_divided" in self.faults:
            p = 1.0
        self._u = self._u + p * (-message if "sign" in self.faults else message)
        self._since += 1

    def flush(self) -> None:
        if self.parameters["criterion"] == "every" and self._since >= self.size(
            self.parameters["every"]
        ):
            self.tick()

    def tick(self) -> None:
        if self._since or self._u.any():
            self._since = 0
            step = self.eta * self._u
            if "buffer_not_cleared" not in self.faults:
                self._u = self._u - step
            if "rest_dropped" in self.faults:
                self._u = np.zeros_like(step)
            self.make(self.w + step)

    def admit(self, client: str) -> None:
        """y_i = x: x + u ← (P (x+u) + p_i x)/(P + p_i)."""
        if client not in self._members:
            before = sum(self._members.values())
            self._members[client] = self.setting.clients[client].importance
            if "joiner_not_counted" not in self.faults:
                self._u = self._u * before / sum(self._members.values())
            self._ends[client] = self.w

    def remove(self, client: str, memory: Vector | None) -> None:
        """With y_i: x + u ← (P (x+u) − p_i y_i)/(P − p_i)."""
        if memory is not None and "goodbye_ignored" not in self.faults:
            before, p = sum(self._members.values()), self._members.pop(client)
            self._ends.pop(client, None)
            total = before * (self.w + self._u) - p * memory
            self._u = total / (before - p) - self.w


class _AsySGReference(_RuleReference):
    """At n gradients: w ← w − γ (1/n) Σ g_i (Lian 2015)."""

    defaults: ClassVar = {"mean": True}

    def arrived(self, update: ClientUpdate) -> None:
        self.buffer.append(update)
        n = self.parameters["gradients"]
        if len(self.buffer) >= self.size(n):
            updates = self.empty()
            mean = self.parameters["mean"] != ("mean_for_sum" in self.faults)
            share = self.divide(n, updates) if mean else 1.0
            sign = 1 if "sign" in self.faults else -1
            self.add(np.asarray(sign * share * sum(u.vector for u in updates)))


class _FavanoReference(_RoundsReference):
    """w ← (w + Σ ŵ_i)/(s + 1), ŵ_i = w_b + (w_i − w_b)/α_i, mixed in with η_g (Leconte 2023)."""

    defaults: ClassVar = {"debias": "stochastic"}

    def __init__(self, setting: Setting, faults: frozenset[str]) -> None:
        super().__init__(setting, faults)
        self._steps: defaultdict[str, list[int]] = defaultdict(list)
        """Client -> local steps of each of its updates."""

    def end(self, update: ClientUpdate) -> Vector:
        """ŵ_i."""
        trained = _trained(update)
        if "not_debiased" in self.faults:
            return trained
        steps = self._steps[update.client]
        if self.parameters["debias"] == "deterministic":
            alpha = sum(steps) / len(steps)
        else:
            alpha = sum(n > 0 for n in steps) / len(steps) * update.steps
        delta = (trained - update.base) / alpha
        return update.base + (-delta if "sign" in self.faults else delta)

    def begin(self) -> None:
        pass

    def admit(self, client: str) -> None:
        pass

    def tick(self) -> None:
        if not self.waiting:
            super().begin()

    def arrived(self, update: ClientUpdate) -> None:
        if update.client in self.waiting:
            self._steps[update.client].append(update.steps)
            self.buffer.append(update)
            self.waiting.discard(update.client)
            self.end_if_complete()

    def end_if_complete(self) -> None:
        if not self.waiting and self.buffer:
            self.aggregate()

    def aggregate(self) -> None:
        updates = self.empty()
        total = sum(self.end(u) for u in updates)
        if "server_not_counted" in self.faults:
            mean = total * self.divide(len(updates), updates)
        else:
            mean = (self.w + total) * self.divide(len(updates) + 1, updates)
        self.make((1 - self.eta) * self.w + self.eta * mean)


class _PortReference(_RuleReference):
    """w ← w + η_g Σ ω_i Δ_i, ω_i ∝ n_i (μ(1 + cos)/2 + λ S/(τ + S)) (Su & Li 2022)."""

    defaults: ClassVar = {
        "min_updates": 15,
        "similarity_weight": 1.0,
        "staleness_weight": 3.0,
        "staleness_bound": 10,
    }

    def arrived(self, update: ClientUpdate) -> None:
        self.buffer.append(update)
        self._aggregate_if_ready()

    def remove(self, client: str, memory: Vector | None) -> None:
        self._aggregate_if_ready()

    def _aggregate_if_ready(self) -> None:
        bound = self.parameters["staleness_bound"]
        versions = [self.version_sent[client] for client in self.training]
        stale = any(self.version - version > bound for version in versions)
        if stale and "stale_not_awaited" not in self.faults:
            return
        if len(self.buffer) < self.size(self.parameters["min_updates"]):
            return
        updates = self.empty()
        weights = [self._weight(u) for u in updates]
        total = 1.0 if "weights_not_normalised" in self.faults else sum(weights)
        if self.faults & {"divided_by_clients", "divided_by_contributors"}:
            total = 1 / self.divide(len(updates), updates)
        self.add(
            np.asarray(sum(o * self.delta(u) for o, u in zip(weights, updates, strict=True)) / total)
        )

    def _weight(self, update: ClientUpdate) -> float:
        mu, lam = self.parameters["similarity_weight"], self.parameters["staleness_weight"]
        bound, tau = self.parameters["staleness_bound"], self.staleness(update)
        cosine = 1.0
        if tau > 1 and "similarity_ignored" not in self.faults:
            base = update.base_version
            if "base_two_ago" in self.faults:
                base = max(0, self.version - 2)
            cosine = _cosine(self.w - self.models[base], self.delta(update))
        samples = 1 if "samples_ignored" in self.faults else update.samples
        return samples * float(mu * (1 + cosine) / 2 + lam * bound / (tau + bound))


def _trained(update: ClientUpdate) -> Vector:
    """The base model if the client sent a gradient."""
    return update.base if update.trained is None else update.trained


def _cosine(a: Vector, b: Vector) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


RULES: dict[str, type[_RuleReference]] = {
    "area": _AreaReference,
    "as_fedavg": _AsFedAvgReference,
    "async_fedavg": _AsyncFedAvgReference,
    "asysg": _AsySGReference,
    "defedavg_iid": _DeFedAvgIidReference,
    "defedavg_niid": _DeFedAvgNiidReference,
    "favano": _FavanoReference,
    "fedasync": _FedAsyncReference,
    "fedavg": _FedAvgReference,
    "fedbuff": _FedBuffReference,
    "fedfa": _FedFaReference,
    "fedfix": _FedFixReference,
    "port": _PortReference,
}
