"""A client's side of secure aggregation: its masks, the shares of the others' masks, and sums of these.

    with a model:   mask z, N shares of it, one sealed for each client that is there
    with an update: the update, rounded, plus z
    when asked:     Σ a_i (share of z_i) over the updates of one buffer

It gives a sum of K updates or more of which none counts for more than the others together, and each
share only once: of two sums that differ by one update, their difference would be that update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from agents.models.vectors import Vector
from agents.pipeline.interface import PeerError, Wanted
from agents.pipeline.secure import masks, secure_messages
from agents.pipeline.secure.channels import KEY_BYTES, ChannelError, Channels
from agents.pipeline.secure.coding import code_of
from agents.pipeline.secure.field import FIELD, Words
from agents.pipeline.secure.masked_update import DIVERGED, Masked
from agents.pipeline.secure.quantisation import Grid, dominates
from agents.pipeline.secure.settings import SecureRun
from agents.timing.nanoseconds import Nanoseconds

_MASKS = 4
"""Of its own that a client keeps: of the training that goes on, and of one in its send buffer."""


@dataclass(slots=True)
class _Mask:
    words: Words
    holders: tuple[int, ...]
    took: Nanoseconds = 0
    """From when it was begun until its shares were on their way."""


class Party:
    """One client's side: the client `name`, for models of `size` parameters.

    `add_peer` and `receive_share` may be called in another thread than the other methods. They never
    wait for a computation of that thread."""

    def __init__(
        self,
        run: str,
        name: str,
        settings: SecureRun,
        size: int,
        seed: Callable[[], bytes] = masks.new_seed,
    ) -> None:
        self._run, self.name, self._settings = run, name, settings
        self._places = {client: place for place, client in enumerate(settings.clients)}
        self.code = code_of(settings, size)
        self.grid = Grid(settings.range, settings.bits)
        self._channels = Channels()
        self._seed = seed
        self._keys: dict[str, bytes] = {}
        self._masks: dict[int, _Mask] = {}
        self._lock = threading.Lock()
        """Of what others have sent: keys, and the shares that are held."""
        self._held: dict[str, dict[int, Words]] = {}
        """By client and dispatch, of each client in the order in which they came."""

    @property
    def public(self) -> bytes:
        """Its public key, which the others are to `add_peer`."""
        return self._channels.public

    @property
    def share_size(self) -> int:
        """Bytes of the message with a share."""
        return secure_messages.share_size(self.code.length)

    def add_peer(self, client: str, key: bytes) -> None:
        """`client` is there with this public key; of one that started anew, it is another one than
        before. Raises PeerError."""
        if client not in self._places or len(key) != KEY_BYTES:
            raise PeerError("no public key of a client of this run")
        if client == self.name:
            return
        with self._lock:
            if (former := self._keys.pop(client, None)) is not None:
                self._channels.forget(former)
        try:
            self._channels.check_key(bytes(key))
        except ChannelError as error:  # found here, it spoils nobody's masks
            raise PeerError(f"{error} of {client}") from error
        with self._lock:
            self._keys[client] = bytes(key)

    def prepare(self, dispatch: int) -> Iterator[tuple[str, bytes]]:
        """Make the mask of the update that will answer `dispatch`; for each client that is known, the
        message with its share."""
        code = self.code
        with self._lock:
            keys = dict(self._keys)
        known = [name for name in self._settings.clients if name in keys or name == self.name]
        holders = tuple(self._places[name] for name in known)
        mask = masks.expand_seed(self._seed(), code.size)
        noise = masks.expand_seed(self._seed(), code.colluding * code.length)
        shares = code.shares(mask, noise, holders)
        self._masks[dispatch] = _Mask(mask, holders)
        while len(self._masks) > _MASKS:
            del self._masks[min(self._masks)]
        for name, share in zip(known, shares, strict=True):
            if name == self.name:
                self._hold(name, dispatch, share)
                continue
            content = np.ascontiguousarray(share, "<u4").tobytes()
            about = self._about(self.name, name, dispatch)
            yield (
                name,
                secure_messages.encode_share(dispatch, self._channels.seal(content, keys[name], about)),
            )

    def note_preparation_time(self, dispatch: int, took: Nanoseconds) -> None:
        """Note how long the mask and its shares took."""
        self._masks[dispatch].took = took

    def masked(self, dispatch: int, vector: Vector, rng: np.random.Generator) -> Masked:
        """The update that answers `dispatch`, shape (d,), as it is sent; `rng` rounds it."""
        mask = self._masks.pop(dispatch)
        try:
            words, outside = self.grid.round(vector, rng)
        except ValueError:
            words, outside = np.zeros(vector.size, np.uint32), DIVERGED
        return Masked(FIELD.sum(words, mask.words), mask.holders, outside, mask.took)

    def receive_share(self, sender: str, payload: bytes | bytearray) -> None:
        """A share of a mask of `sender`. Raises PeerError."""
        try:
            dispatch, sealed = secure_messages.decode_share(payload, self.code.length)
            with self._lock:
                key = self._keys.get(sender)
            if key is None:
                raise PeerError(f"a share of {sender}, whose key is not known")
            about = self._about(sender, self.name, dispatch)
            content = self._channels.open(sealed, key, about)
            share = secure_messages.elements(np.frombuffer(content, "<u4"))
        except (secure_messages.SecureWireError, ChannelError) as error:
            raise PeerError(f"a share of {sender}: {error}") from error
        self._hold(sender, dispatch, share)

    def answer(self, number: int, wanted: Wanted) -> bytes:
        """The message with the sum that request `number` of the server asks for; what is summed is
        forgotten. Raises PeerError for what no honest server asks for."""
        keys = [(client, dispatch) for client, dispatch, _ in wanted]
        least, largest = self._settings.updates, self._settings.largest_weight
        if (found := len(set(keys))) < max(least, len(keys)):
            raise PeerError(f"a sum of {found} updates, expected {least} different ones or more")
        if not all(1 <= weight <= largest for _, _, weight in wanted):
            raise PeerError(f"a weight that is not from 1 to {largest}")
        weights = [weight for _, _, weight in wanted]
        if dominates(weights):
            raise PeerError("an update that counts for more than the others of its sum")
        with self._lock:
            if not all(dispatch in self._held.get(client, ()) for client, dispatch in keys):
                return secure_messages.encode_sum(number, None)
            shares = [self._held[client].pop(dispatch) for client, dispatch in keys]
        summed = FIELD.product(np.array([weights], np.uint64), np.stack(shares))
        return secure_messages.encode_sum(number, summed[0])

    def _hold(self, client: str, dispatch: int, share: Words) -> None:
        """Where there is no room, the oldest share of the client that has most of them is forgotten: so
        whoever sends too many loses its own, and as few may be left of one that is gone."""
        with self._lock:
            own = self._held.setdefault(client, {})
            own.pop(dispatch, None)
            own[dispatch] = share
            if sum(map(len, self._held.values())) > self._settings.most_shares:
                most = max(self._held.values(), key=len)
                del most[next(iter(most))]

    def _about(self, sender: str, recipient: str, dispatch: int) -> dict[str, str]:
        return {"run": self._run, "from": sender, "to": recipient, "dispatch": str(dispatch)}
