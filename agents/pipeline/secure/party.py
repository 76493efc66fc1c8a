"""A client's side of secure aggregation. The client makes masks, sends shares of its masks to the other
clients, and sums the shares that it holds.

    when a model arrives:   make a mask z and its shares, and send one sealed share to each known client
    when an update is sent: round the update and add z
    when the server asks:   send Σ a_i (share of z_i) over the updates of one buffer

A client answers only for sums of at least K updates in which no update has more weight than the others
together, and it uses each share only once. Otherwise two sums that differ by one update would reveal
that update.
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
"""Maximum number of own masks: for the running training and for updates that wait to be sent."""


@dataclass(slots=True)
class _Mask:
    """Not used yet."""

    words: Words
    holders: tuple[int, ...]
    took: Nanoseconds = 0
    """Nanoseconds from the start of making the mask until its shares were sent."""


class Party:
    """The client `name`, for models of `size` parameters.

    `add_peer` and `receive_share` may be called in a different thread than the other methods, and never
    wait for a computation of these.
    """

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
        """Protects the keys and shares that other clients have sent."""
        self._held: dict[str, dict[int, Words]] = {}
        """By client and dispatch; those of one client are in the order of their arrival."""

    @property
    def public(self) -> bytes:
        return self._channels.public

    @property
    def share_size(self) -> int:
        return secure_messages.share_size(self.code.length)

    def add_peer(self, client: str, key: bytes) -> None:
        """A restarted client has a new key. Raises PeerError."""
        if client not in self._places or len(key) != KEY_BYTES:
            raise PeerError("expected a public key of a client of this run")
        if client == self.name:
            return
        with self._lock:
            if (former := self._keys.pop(client, None)) is not None:
                self._channels.forget(former)
        try:
            self._channels.check_key(bytes(key))
        except ChannelError as error:  # an invalid key would make `prepare` fail later
            raise PeerError(f"{error} of {client}") from error
        with self._lock:
            self._keys[client] = bytes(key)

    def prepare(self, dispatch: int) -> Iterator[tuple[str, bytes]]:
        """Make the mask of the update that will answer `dispatch`; yield each known client and the
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
        """Time to make the mask and to send its shares."""
        self._masks[dispatch].took = took

    def masked(self, dispatch: int, vector: Vector, rng: np.random.Generator) -> Masked:
        """`vector`: shape (d,). `rng`: for the random rounding."""
        mask = self._masks.pop(dispatch)
        try:
            words, outside = self.grid.round(vector, rng)
        except ValueError:
            words, outside = np.zeros(vector.size, np.uint32), DIVERGED
        return Masked(FIELD.sum(words, mask.words), mask.holders, outside, mask.took)

    def receive_share(self, sender: str, payload: bytes | bytearray) -> None:
        """Raises PeerError."""
        try:
            dispatch, sealed = secure_messages.decode_share(payload, self.code.length)
            with self._lock:
                key = self._keys.get(sender)
            if key is None:
                raise PeerError(f"share from {sender}: its public key is not known")
            about = self._about(sender, self.name, dispatch)
            content = self._channels.open(sealed, key, about)
            share = secure_messages.elements(np.frombuffer(content, "<u4"))
        except (secure_messages.SecureWireError, ChannelError) as error:
            raise PeerError(f"share from {sender}: {error}") from error
        self._hold(sender, dispatch, share)

    def answer(self, number: int, wanted: Wanted) -> bytes:
        """Sum of shares for request `number`; the shares in it are deleted. Raises PeerError for a
        request that no honest server sends."""
        keys = [(client, dispatch) for client, dispatch, _ in wanted]
        least, largest = self._settings.updates, self._settings.largest_weight
        if (found := len(set(keys))) < max(least, len(keys)):
            raise PeerError(
                f"sum of {found} updates requested, expected at least {least} different ones"
            )
        if not all(1 <= weight <= largest for _, _, weight in wanted):
            raise PeerError(f"weight out of range, expected from 1 to {largest}")
        weights = [weight for _, _, weight in wanted]
        if dominates(weights):
            raise PeerError("one update has more weight than the other updates of the sum together")
        with self._lock:
            if not all(dispatch in self._held.get(client, ()) for client, dispatch in keys):
                return secure_messages.encode_sum(number, None)
            shares = [self._held[client].pop(dispatch) for client, dispatch in keys]
        summed = FIELD.product(np.array([weights], np.uint64), np.stack(shares))
        return secure_messages.encode_sum(number, summed[0])

    def _hold(self, client: str, dispatch: int, share: Words) -> None:
        """If too many shares are stored, delete the oldest of the client that has sent the most. So a
        client that sends too many loses its own, and no client can fill the memory."""
        with self._lock:
            own = self._held.setdefault(client, {})
            own.pop(dispatch, None)
            own[dispatch] = share
            if sum(map(len, self._held.values())) > self._settings.most_shares:
                most = max(self._held.values(), key=len)
                del most[next(iter(most))]

    def _about(self, sender: str, recipient: str, dispatch: int) -> dict[str, str]:
        return {"run": self._run, "from": sender, "to": recipient, "dispatch": str(dispatch)}
