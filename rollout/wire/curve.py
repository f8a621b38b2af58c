"""CURVE: who may connect from elsewhere. Key files are those that `zmq.auth.create_certificates` writes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from rollout.wire.keys import is_key


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The worker's key pair. clients: directory of `*.key` files of clients let in; None lets in whoever knows the
    worker's public key."""

    public: bytes
    secret: bytes
    clients: Path | None = None

    @staticmethod
    def load(secret_file: Path, clients: Path | None = None) -> CurveKeys:
        """Raises ValueError, saying what is wrong with which file."""
        public, secret = _keys("--curve-secret", secret_file)
        if secret is None:
            raise ValueError(f"--curve-secret {secret_file} holds no secret key: give the .key_secret file")
        if clients is not None:
            files = sorted(clients.glob("*.key"))
            if not files:
                raise ValueError(f"--curve-clients {clients} holds no *.key file of a client")
            for file in files:  # of which one that cannot be read would keep all clients out
                _keys("--curve-clients", file)
        return CurveKeys(public, secret, clients)

    def guard(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start checking client keys for the context's sockets; the caller stops it."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(
            domain="*", location=str(self.clients) if self.clients else zmq.auth.CURVE_ALLOW_ANY
        )
        return authenticator

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind: encrypt, and prove to clients who this worker is."""
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def _keys(option: str, file: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key of a file, the latter where it holds one. Raises ValueError."""
    try:
        public, secret = zmq.auth.load_certificate(file)
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror or 'there is no such file'}") from None
    except (ValueError, IndexError):
        raise ValueError(f"{option} {file} is no CURVE key file: zmq.auth.create_certificates makes one") from None
    if not all(is_key(key) for key in (public, secret) if key is not None):
        raise ValueError(f"{option} {file} holds a key that is not 40 characters of Z85 text")
    return public, secret


def is_local(address: str) -> bool:
    """Can only processes of this machine reach the address?"""
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
