"""Who the worker serves: sessions, the connection each is reached by, and when one counts as gone.

A session outlives its connection: a client that comes back within `client_timeout` with the session's token finds
its work going on and gets everything again that it has not acknowledged. A connection is gone when libzmq has none
of that name (a closed or killed peer at once, an unreachable one after the heartbeat timeout); a client that is
connected and silent is never given up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocols.fields import Limits
from rollout.wire.outbox import Event, Key, Outbox
from rollout.wire.sender import Sender

if TYPE_CHECKING:
    from rollout.batches.submitted import Batch, Member


class Connection:
    """One `hello` on one ROUTER identity. calls: under way, with the request's id; of no use without a connection."""

    def __init__(self, peer: bytes, session: Session, sender: Sender) -> None:
        self.peer = peer
        self.session = session
        self.sender = sender
        self.calls: dict[asyncio.Task[None], str] = {}


class Session:
    """trajectories: by id, until acknowledged. gone_since: when its peer was first found to be unreachable.

    peer: identity of the newest connection, kept after that broke so that its return is noticed.
    """

    def __init__(self, token: str, client: str) -> None:
        self.token = token
        self.client = client
        self.gone_since: float | None = None
        self.peer: bytes | None = None
        self.connection: Connection | None = None
        self.outbox = Outbox()
        self.trajectories: dict[str, Member] = {}
        self.batches: dict[str, Batch] = {}

    def post(self, event: Event) -> None:
        """Owe the client an event, and send it when there is a connection."""
        self.outbox.add(event)
        if self.connection is not None:
            self.connection.sender.put(event)

    def repeat(self, key: Key) -> None:
        """Send an event once more that was sent already: the client asked again for what it stands for."""
        event = self.outbox.get(key)
        if event is not None and event.end is not None and self.connection is not None:
            self.connection.sender.put(event)

    def settle(self, key: Key) -> None:
        """The client has said itself that it has taken the event over."""
        event = self.outbox.drop(key)
        if event is not None and self.connection is not None:
            self.connection.sender.taken(event)


class Sessions:
    """send: hands frames over to a peer, False when it is gone. on_expired: called with a session given up."""

    def __init__(
        self,
        send: Callable[[bytes, list[bytes | memoryview]], bool],
        *,
        limits: Limits,
        client_timeout: float,
        on_expired: Callable[[Session], None],
    ) -> None:
        self._send = send
        self._limits = limits
        self._client_timeout = client_timeout
        self._on_expired = on_expired
        self._sessions: dict[str, Session] = {}
        self._connections: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def all(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    @property
    def connections(self) -> tuple[Connection, ...]:
        return tuple(self._connections.values())

    def connection(self, peer: bytes) -> Connection | None:
        return self._connections.get(peer)

    def last_of(self, peer: bytes) -> Session | None:
        """The session that was served on this identity, though its connection may be gone."""
        return next((session for session in self._sessions.values() if session.peer == peer), None)

    def greet(self, peer: bytes, client: str, token: str | None) -> tuple[Connection, bool]:
        """A `hello`: the connection, and whether the session asked for was found. Nothing is sent yet."""
        session = self._sessions.get(token or "")
        resumed = session is not None
        if session is None:
            session = Session(secrets.token_hex(16), client)
            self._sessions[session.token] = session
        self._leave(peer)
        if session.connection is not None:
            self._close(session.connection)
        sender = Sender(
            lambda frames: self._send(peer, frames),
            window_bytes=self._limits.window_bytes,
            chunk_bytes=self._limits.chunk_bytes,
            on_received=lambda event: session.outbox.sweep(event.key),
        )
        connection = session.connection = self._connections[peer] = Connection(peer, session, sender)
        session.peer, session.gone_since = peer, None
        return connection, resumed

    def redeliver(self, connection: Connection) -> None:
        """Put everything that the session is owed on its new connection, in the order it happened."""
        for event in connection.session.outbox:
            connection.sender.put(event)

    def gone(self, peer: bytes) -> None:
        """Nobody of this name is connected: what was on its way is lost, a later `hello` brings it again."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._close(connection)

    def check(self, now: float, probe: Callable[[bytes], bool]) -> None:
        """Give up sessions whose peer has been unreachable for too long. probe: is the peer connected?"""
        for session in self.all:
            if session.peer is not None and probe(session.peer):
                session.gone_since = None
                continue
            if session.connection is not None:
                self._close(session.connection)
            if session.gone_since is None:
                session.gone_since = now
            if now - session.gone_since >= self._client_timeout:
                del self._sessions[session.token]
                self._on_expired(session)

    def _leave(self, peer: bytes) -> None:
        """Another `hello` came on this identity: whoever used it before cannot be reached by it any more."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.session.peer = None
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.sender.close()
        for task in connection.calls:
            task.cancel()
        del self._connections[connection.peer]
        connection.session.connection = None
