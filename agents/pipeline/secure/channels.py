"""Encrypted channels between two clients by X25519, HKDF and AES-256-GCM. The server forwards the
messages but cannot read them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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
