"""A naive implementation of FedBuff, FedAsync and Port with one planted fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_conformance.adapter import ClientUpdate, Setting, Vector


class Naive:
    """Adapter with the fault `fault`; no fault if it is empty."""

    fault = ""

    def start(self, setting: Setting) -> None:
        if setting.rule not in ("fedbuff", "fedasync", "port"):
            raise NotImplementedError(f"no {setting.rule}")
        if setting.parameters.get("staleness") == "hinge" or setting.parameters.get("urgent") is False:
            raise NotImplementedError("plain variants only")
        self.setting, self.options = setting, dict(setting.parameters)
        self.w: Any = setting.model.copy()
        self.old = [self.w]
        self.made = [0.0]
        self.present, self.seen = set(setting.present), set[int]()
        self.buffer: list[ClientUpdate] = []
        self.beta = float(self.options.get("mixing", 0.6))

    def receive(self, update: ClientUpdate) -> None:
        if update.client not in self.present or update.dispatch in self.seen:
            return
        self.seen.add(update.dispatch)
        if self.setting.rule == "fedasync":
            self._mix(update)
            return
        self.buffer.append(update)
        size = self.options["buffer_size" if self.setting.rule == "fedbuff" else "min_updates"]
        if len(self.buffer) < size:
            return
        parts = [(self._weight(one), self._delta(one)) for one in self.buffer]
        lr = float(self.options.get("server_lr", 1.0))
        if self.setting.rule == "fedbuff":
            total = len(self.setting.clients) if self.fault == "participants" else size
        else:
            total = 1.0 if self.fault == "weights" else sum(weight for weight, _ in parts)
        step = lr * sum(weight * delta for weight, delta in parts) / total
        self._make(self.w - step if self.fault == "sign" else self.w + step, update.at)
        if self.fault != "buffer":
            self.buffer = []

    def model(self, at: float, client: str | None = None) -> Any:
        return self.w

    def join(self, client: str, at: float) -> None:
        self.present.add(client)

    def leave(self, client: str, at: float, memory: object = None) -> None:
        self.present.discard(client)

    def _tau(self, update: ClientUpdate) -> int:
        now = len(self.old) - 1
        if self.fault == "upload":
            now = sum(made < update.uploaded for made in self.made) - 1
        return max(0, now - update.base_version) + (self.fault == "staleness")

    def _weight(self, update: ClientUpdate) -> float:
        tau = self._tau(update)
        if self.setting.rule == "fedbuff":
            return 1.0 if self.options.get("staleness", "none") == "none" else 1 / np.sqrt(1 + tau)
        bound = self.options.get("staleness_bound", 10)
        cosine = 1.0
        if tau > 1:
            drift, delta = self.w - self.old[update.base_version], update.vector
            cosine = drift @ delta / np.linalg.norm(drift) / np.linalg.norm(delta)
        similar = self.options.get("similarity_weight", 1.0) * (1 + cosine) / 2
        fresh = self.options.get("staleness_weight", 3.0) * bound / (tau + bound)
        return update.samples * float(similar + fresh)

    def _delta(self, update: ClientUpdate) -> Vector:
        assert update.trained is not None
        if self.fault == "model":
            return update.trained
        return update.trained - (self.w if self.fault == "base" else update.base)

    def _mix(self, update: ClientUpdate) -> None:
        discount = 1.0
        if self.options.get("staleness") != "constant":
            discount = (self._tau(update) + 1) ** -0.5
        beta = self.beta * discount
        if self.fault == "mixing":
            self.beta = beta
        self._make((1 - beta) * self.w + beta * update.vector, update.at)

    def _make(self, w: Vector, at: float) -> None:
        self.w = w
        self.old.append(w)
        self.made.append(at)


class Participants(Naive):
    """Divides by the number of clients."""

    fault = "participants"
