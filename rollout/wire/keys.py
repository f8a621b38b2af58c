"""CURVE keys as text: Z85, 40 characters for 32 bytes."""

from __future__ import annotations

import struct

from zmq.utils import z85


def is_key(text: bytes) -> bool:
    """Would libzmq take it for a key?"""
    try:
        return len(z85.decode(text)) == 32
    except (ValueError, KeyError, struct.error):  # of another length, with other characters, of too large a number
        return False
