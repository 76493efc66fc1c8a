"""Access to a broker from elsewhere: its TLS identity, and a port for real devices."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import subprocess
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from testbed.broker import BROKER, TlsIdentity
from testbed.errors import HostError
from testbed.host import programs


def new_identity(*names: str) -> TlsIdentity:
    """`names`: host names and IP addresses of the broker.

    The identity is valid for a month from now. Its validity begins one day ago, because the clocks of
    machines differ.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, BROKER)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 30 * day)
        .add_extension(x509.SubjectAlternativeName(map(_general_name, names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return TlsIdentity(
        certificate.public_bytes(pem).decode(), key.private_bytes(pem, form, plain).decode()
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def listening(server: tuple[str, int]) -> socket.socket:
    """Raises HostError if the broker could not listen at the address and port `server`."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    try:
        return socket.create_server(server, family=family)
    except OSError as error:
        raise HostError(
            f"the broker cannot listen at server.address {server[0]}, server.port {server[1]}: "
            f"{error.strerror}. Write an address of this host (`ip address` lists them), and a free port"
        ) from error


class PublicPort:
    """Process that listens at an address of this host for a broker that cannot, and forwards all
    connections to the broker's Unix socket. TLS is between real devices and the broker."""

    def __init__(self, server: tuple[str, int], path: Path, config: Path, cpus: str) -> None:
        """`server`: address and port to listen at. `path`: the broker's Unix socket. `config`: file to
        write the process's configuration to. `cpus`: cpuset. Raises HostError if nobody can listen at
        `server` on this host."""
        # Through a descriptor, because the path of a Unix socket may have at most 107 characters.
        folder = os.open(path.parent, os.O_PATH)
        try:
            with listening(server) as listener:
                inherited = (listener.fileno(), folder)
                to = {"path": f"/proc/self/fd/{folder}/{path.name}"}
                proxy = {"listen": {"descriptor": listener.fileno()}, "to": to}
                config.write_text(json.dumps({"proxies": [proxy]}), encoding="utf-8")
                module = programs.command("agents.node.node_agent", str(config))
                self._process = subprocess.Popen(
                    [*programs.tied_prefix(cpus), *module],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=inherited,
                    start_new_session=True,
                )
        finally:
            os.close(folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises HostError if the process has ended: real devices can no longer reach the broker."""
        if (code := self._process.poll()) is not None:
            raise HostError(f"the process that listens for real devices has ended with exit code {code}")

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
