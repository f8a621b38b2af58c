"""CURVE: who may connect from elsewhere. Key files are those that `zmq.auth.create_certificates` writes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The worker's key pair. clients: directory of `*.key` files of clients let in; None lets in whoever knows the
    worker's public key."""

    public: bytes
    secret: bytes
    clients: Path | None = None

    @staticmethod
    def load(secret_file: Path, clients: Path | None = None) -> CurveKeys:
        """Raises ValueError, saying what is wrong with the files."""
        try:
            public, secret = zmq.auth.load_certificate(secret_file)
        except OSError as error:
            raise ValueError(f"--curve-secret {secret_file}: {error.strerror or 'there is no such file'}") from None
        except ValueError:
            raise ValueError(
                f"--curve-secret {secret_file} is no CURVE key file: zmq.auth.create_certificates makes one"
            ) from None
        if secret is None:
            raise ValueError(f"--curve-secret {secret_file} holds no secret key: give the .key_secret file")
        if clients is not None and not any(clients.glob("*.key")):
            raise ValueError(f"--curve-clients {clients} holds no *.key file of a client")
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
