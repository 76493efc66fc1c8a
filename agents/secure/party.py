"""A client's side of secure aggregation: its masks, its encrypted channels to other clients, and their
cost."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from agents.models.vectors import Vector
from agents.pipeline.interface import ExchangeCost, PeerError, Wanted
from agents.secure import secure_messages
from agents.secure.arithmetic import FIELD, Field, Grid, SecureRun, Words, code_of, dominates
from agents.secure.secure_messages import DIVERGED, Masked
from agents.timing.nanoseconds import Nanoseconds

SEED_BYTES = 16
_ZEROS = bytes(1 << 16)


def new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def expand_seed(secret: bytes, count: int, field: Field = FIELD) -> Words:
    """Elements that the same `secret` always gives. Each is the lowest bits, as many as p has, of a
    32-bit word of the key stream. If they equal p, another word is drawn, so that all elements are
    equally likely."""
    stream = Cipher(algorithms.AES128(secret), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(4 * count + 15)
    at = 0
    while at < 4 * count:
        part = _ZEROS[: min(len(_ZEROS), 4 * count - at)]
        at += stream.update_into(part, memoryview(buffer)[at:])
    words = np.frombuffer(buffer, "<u4", count)
    words &= np.uint32(field.p)
    again = np.flatnonzero(words == field.p)
    while again.size:
        words[again] = np.frombuffer(stream.update(bytes(4 * again.size)), "<u4") & np.uint32(field.p)
        again = again[words[again] == field.p]
    return words


KEY_BYTES = 32
_NONCE_BYTES = 12


class ChannelError(Exception):
    """The text says what is invalid in a key or message."""


class Channels:
    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self._ciphers: dict[bytes, AESGCM] = {}

    @property
    def public(self) -> bytes:
        """Public key of this process."""
        return self._private.public_key().public_bytes_raw()

    def check_key(self, peer: bytes) -> None:
        """Raise ChannelError if no secret can be agreed with the owner of the public key `peer`."""
        self._cipher(peer)

    def forget(self, peer: bytes) -> None:
        """Delete the shared secret, which is computed again when needed."""
        self._ciphers.pop(peer, None)

    def seal(self, content: bytes, peer: bytes, about: Mapping[str, str]) -> bytes:
        """`content` for the owner of the public key `peer`. `about` is authenticated but not sent:
        `open` needs the same values. Raises ChannelError."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher(peer).encrypt(nonce, content, _flat(about))

    def open(self, message: bytes, peer: bytes, about: Mapping[str, str]) -> bytes:
        """Raises ChannelError unless the owner of the public key `peer` sealed the message for this
        client, with the same `about`."""
        nonce, rest = message[:_NONCE_BYTES], message[_NONCE_BYTES:]
        try:
            return self._cipher(peer).decrypt(nonce, rest, _flat(about))
        except (InvalidTag, ValueError) as error:
            raise ChannelError("not sealed for this client by this sender") from error

    def _cipher(self, peer: bytes) -> AESGCM:
        if (cipher := self._ciphers.get(peer)) is None:
            try:
                shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
            except ValueError as error:
                raise ChannelError("invalid public key") from error
            both = b"".join(sorted((peer, self.public)))
            key = HKDF(SHA256(), 32, salt=None, info=b"testbed share" + both).derive(shared)
            cipher = self._ciphers[peer] = AESGCM(key)
        return cipher


def _flat(about: Mapping[str, str]) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in about.items()).encode()


# A client's side of secure aggregation. The client makes masks, sends shares of its masks to the other
# clients, and sums the shares that it holds.
#
#     when a model arrives:   make a mask z and its shares, and send one sealed share to each known
#     client when an update is sent: round the update and add z when the server asks:   send Σ a_i (share
#     of z_i) over the updates of one buffer
#
# A client answers only for sums of at least K updates in which no update has more weight than the others
# together, and it uses each share only once. Otherwise two sums that differ by one update would reveal
# that update.

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
        seed: Callable[[], bytes] = new_seed,
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
        mask = expand_seed(self._seed(), code.size)
        noise = expand_seed(self._seed(), code.colluding * code.length)
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
        least, largest = self._settings.updates, self._settings.weights
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


_MESSAGE_TIME = 0.0014
"""CPU seconds on a whole core to send or receive a small message (waking up, MQTT, TCP), without its
content. Fitted to a run in docker (docs/evidence/privacy.md)."""
_TRIES = 5


def measure_cost(secure: SecureRun, parameters: int) -> ExchangeCost:
    """Per update, share and answer, for a model of `parameters` parameters."""
    # Not the process's time: that goes in steps of 4 ms while the process has a timer of CPU time.
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
            began = time.thread_time()
            sealed = dict(party.prepare(dispatch))
            party.masked(dispatch, update, rng)
            masks.append(time.thread_time() - began)
            if peer.name in sealed:
                began = time.thread_time()
                peer.receive_share(party.name, sealed[peer.name])
                shares.append(time.thread_time() - began)
        began = time.thread_time()
        party.answer(turn, [(party.name, dispatch, 1) for dispatch in dispatches])
        answers.append(time.thread_time() - began)
    share = min(shares, default=0.0) + _MESSAGE_TIME
    return ExchangeCost(min(masks), share, min(answers) + 2 * _MESSAGE_TIME)
