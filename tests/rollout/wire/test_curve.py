"""Key files: what is wrong with them is said at start, and not by clients that are kept out."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
import zmq.auth

from rollout.wire.curve import CurveKeys
from rollout.wire.keys import is_key


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    _, file = zmq.auth.create_certificates(tmp_path, "worker")
    return Path(file)


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    (tmp_path / "clients").mkdir()
    zmq.auth.create_certificates(tmp_path / "clients", "trainer")
    return tmp_path / "clients"


def test_sound_files(secret: Path, clients: Path) -> None:
    keys = CurveKeys.load(secret, clients)
    assert (keys.public, keys.secret) == zmq.auth.load_certificate(secret)
    assert keys.clients == clients
    assert CurveKeys.load(secret).clients is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is no CURVE key file"),
        (b"\xff\x00", "is no CURVE key file"),
        (b"public-key", "is no CURVE key file"),
        (b'public-key = "short"', "holds a key that is not 40 characters of Z85 text"),
        (b'public-key = "' + b"a" * 40 + b'"\nsecret-key = "short"', "holds a key that is not 40 characters"),
    ],
)
def test_one_bad_file_is_named(secret: Path, clients: Path, text: bytes, said: str) -> None:
    """Of the directory too: libzmq's guard would let nobody in, and say so in the log alone."""
    other = clients / "other.key"
    other.write_bytes(text)
    with pytest.raises(ValueError, match=rf"--curve-clients {other} {said}"):
        CurveKeys.load(secret, clients)
    secret.write_bytes(text)
    with pytest.raises(ValueError, match=rf"--curve-secret {secret} {said}"):
        CurveKeys.load(secret)


def test_a_directory_in_the_place_of_a_key(secret: Path, clients: Path) -> None:
    (clients / "other.key").mkdir()
    with pytest.raises(ValueError, match=r"other\.key: Is a directory"):
        CurveKeys.load(secret, clients)
    with pytest.raises(ValueError, match=r"holds no \*\.key file"):
        CurveKeys.load(secret, clients / "nowhere")
    with pytest.raises(ValueError, match="holds no secret key"):
        CurveKeys.load(secret.with_suffix(".key"))


def test_what_libzmq_takes_for_a_key() -> None:
    public, secret = zmq.curve_keypair()
    assert is_key(public)
    assert is_key(secret)
    for text in (b"", public[1:], public + b"aaaaa", b'"' * 40, b"#" * 40, b"\xff" * 40):
        assert not is_key(text)
