"""Connections between hosts: both ends prove that they share a secret, and every message carries a proof of its own.

Knows sockets and keys; refuses to know what is said. Nothing is encrypted: whoever can listen can read.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_bytes
from time import monotonic, sleep

SECRET, SECRET_FILE = "SHARDWISE_SECRET", "SHARDWISE_SECRET_FILE"
"""Environment variables: the secret that all hosts share, or a file that holds it."""
SHORTEST = 32
"""Characters of a secret: a peer that hasn't proved itself sees proofs, and could try short ones at leisure."""
REMEDY = (
    'make one with python3 -c "import secrets; print(secrets.token_hex(32))" > secret && chmod 600 secret, copy it to '
    f"every host, and set {SECRET_FILE} to its path"
)
PROOF = 0.75
"""Seconds that a peer gets to prove itself."""
PATIENT = 10.0
"""Seconds that we wait for a busy host to do so."""
LULL = 0.1
"""Seconds without a look at who comes, where this process has no room for them."""
CROWD = 64
"""Peers that may be about to prove themselves; more are turned away."""
MAGIC = b"shardwise 1\n"
NONCE = 32
HEAD = struct.Struct("<I32s")
"""Before each message: its length in bytes, and its proof."""
COUNT = struct.Struct("<Q")
LONGEST = 16 << 20
"""Bytes of a message: what is longer travels in pieces."""
SMALL = 1 << 16
SIOCGIFADDR = 0x8915


class Sealed:
    """One end of a proved connection, which blocks. Used by one thread for each direction.

    Each message is proved by HMAC-SHA256 over its number, its length and its bytes, with a key for each direction that
    comes of the secret and both ends' nonces: what is changed, left out, repeated, or of another connection is noticed.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.connection = connection
        self._sending = hmac.new(sending, digestmod=sha256)
        self._receiving = hmac.new(receiving, digestmod=sha256)
        self._sent = self._received = 0

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        """Send one message. Raises OSError, TimeoutError among them."""
        proof = self._prove(self._sending, self._sent, payload)
        self._sent += 1
        head = HEAD.pack(len(payload), proof)
        if len(payload) <= SMALL:
            self.connection.sendall(head + payload)
        else:
            self.connection.sendall(head)
            self.connection.sendall(payload)

    def receive(self) -> bytearray:
        """The next message. Raises OSError, of which ConnectionError: the end of the stream, or a false message."""
        length, proof = HEAD.unpack(_read(self.connection, HEAD.size))
        if length > LONGEST:
            raise ConnectionError("a message of impossible length came")
        payload = _read(self.connection, length)
        if not hmac.compare_digest(proof, self._prove(self._receiving, self._received, payload)):
            raise ConnectionError("a message came that the peer did not send")
        self._received += 1
        return payload

    def close(self) -> None:
        """End both directions, whoever waits in them; harmless when repeated."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    @staticmethod
    def _prove(key: hmac.HMAC, number: int, payload: bytes | bytearray | memoryview) -> bytes:
        proof = key.copy()
        proof.update(COUNT.pack(number) + struct.pack("<I", len(payload)))
        proof.update(payload)
        return proof.digest()


class Door:
    """Listens at one address and lets in who proves the secret, for the same ``purpose``.

    Everybody else is dropped within `PROOF` seconds: what they send is compared and never read.
    """

    def __init__(self, address: str, secret: bytes, purpose: bytes, port: int = 0) -> None:
        """Raises OSError where it can't listen."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=CROWD)
        self.address = join_address(address, self._listener.getsockname()[1])
        self.refused = ""
        """Who came last with a false proof."""
        self._secret, self._purpose = secret, purpose
        self._proved: SimpleQueue[Sealed | None] = SimpleQueue()
        self._crowd = threading.BoundedSemaphore(CROWD)
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def take(self, timeout: float) -> Sealed | None:
        """The next peer that has proved itself; None when the time is up, or the door closed."""
        try:
            return self._proved.get(timeout=max(timeout, 0.0))
        except Empty:
            return None

    def close(self) -> None:
        """Listen no more; harmless when repeated."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        while (unwanted := self.take(0.0)) is not None:
            unwanted.close()

    def _run(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (22, 9):  # EINVAL, EBADF: closed
                    self._proved.put(None)
                    return
                sleep(LULL)
                continue
            if self._crowd.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection, peer[0]), name="a peer", daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket, peer: str) -> None:
        try:
            deadline = monotonic() + PROOF
            mine = token_bytes(NONCE)
            connection.settimeout(PROOF)
            connection.sendall(MAGIC + mine)
            answer = _read(connection, NONCE + sha256().digest_size, deadline)
            nonces = mine + answer[:NONCE]
            if not hmac.compare_digest(answer[NONCE:], self._mac(b"guest", nonces)):
                self.refused = peer
                connection.sendall(bytes(sha256().digest_size))  # no proof: whoever ends without a word may be busy
                raise ConnectionError("a wrong secret")
            connection.sendall(self._mac(b"host", nonces))
            _prepare(connection)
            self._proved.put(Sealed(connection, self._mac(b"to guest", nonces), self._mac(b"to host", nonces)))
        except OSError:
            connection.close()
        finally:
            self._crowd.release()

    def _mac(self, role: bytes, nonces: bytes) -> bytes:
        return _mac(self._secret, self._purpose, role, nonces)


def knock(address: str, secret: bytes, purpose: bytes) -> Sealed:
    """Connect to a `Door`. Raises OSError, of which PermissionError: the other end has not the same secret."""
    connection = socket.create_connection(split_address(address), timeout=PATIENT)
    try:
        deadline = monotonic() + PATIENT
        greeting = _read(connection, len(MAGIC) + NONCE, deadline)
        if greeting[: len(MAGIC)] != MAGIC:
            raise ConnectionError(f"{address} is no shardwise of this version")
        mine = token_bytes(NONCE)
        nonces = bytes(greeting[len(MAGIC) :]) + mine
        connection.sendall(mine + _mac(secret, purpose, b"guest", nonces))
        proof = _read(connection, sha256().digest_size, deadline)
        if not hmac.compare_digest(proof, _mac(secret, purpose, b"host", nonces)):
            raise PermissionError(f"{address} has not our secret: is it the same on every host?")
        _prepare(connection)
        return Sealed(connection, _mac(secret, purpose, b"to host", nonces), _mac(secret, purpose, b"to guest", nonces))
    except BaseException:
        connection.close()
        raise


def read_secret(environ: Mapping[str, str]) -> bytes:
    """What all hosts share; ValueError, with the remedy, where it is missing, open to others, or too short."""
    text, path = environ.get(SECRET), environ.get(SECRET_FILE)
    if (text is None) == (path is None):
        count = "both are set" if text is not None else "neither is set"
        raise ValueError(f"several hosts need one secret, in {SECRET_FILE} or {SECRET}, and {count}: {REMEDY}")
    if path is not None:
        try:
            if Path(path).stat().st_mode & 0o077:
                raise ValueError(f"{SECRET_FILE} {path}: others may read it; chmod 600 {path}")
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{SECRET_FILE} {path}: can't be read ({error}); {REMEDY}") from None
    assert text is not None
    if len(text.strip()) < SHORTEST:
        raise ValueError(f"the secret of {SECRET_FILE} or {SECRET} has less than {SHORTEST} characters: {REMEDY}")
    return text.strip().encode()


def own_address(towards: str, environ: Mapping[str, str] = os.environ) -> str:
    """This host's address on the way to another host; that of GLOO_SOCKET_IFNAME's interface where it is set."""
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise ValueError(f"GLOO_SOCKET_IFNAME={interface}: no address there ({error.strerror})") from None
            return socket.inet_ntoa(found[20:24])
    try:
        family, _, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # nothing is sent: the kernel only looks for the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"there is no way to {towards} ({error}): give torchrun --master-addr or --local-addr, the address of the "
            "first host"
        ) from None


def is_loopback(host: str) -> bool:
    """Is it said to be this host alone? (A name may only resolve to it.)"""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_address(host: str, port: int) -> str:
    """As `split_address` reads it."""
    return f"{host} {port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = address.rpartition(" ")
    return host, int(port)


def _mac(secret: bytes, purpose: bytes, role: bytes, nonces: bytes) -> bytes:
    told = COUNT.pack(len(purpose)) + purpose + COUNT.pack(len(role)) + role + nonces
    return hmac.digest(secret, told, "sha256")


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """So many bytes, by then; ConnectionError at the end of the stream."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        if deadline is not None:
            connection.settimeout(max(deadline - monotonic(), 0.001))
        try:
            count = connection.recv_into(view[at:])
        except ConnectionResetError:  # it ended before it had read all that we sent
            count = 0
        if not count:
            raise ConnectionError("the peer has ended the connection")
        at += count
    return data
