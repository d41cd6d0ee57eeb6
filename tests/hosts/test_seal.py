"""Who gets in at a door, and what may pass through a connection; over loopback, without processes."""

from __future__ import annotations

import errno
import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.parallel import seal, tcp
from shardwise.parallel.axis import Axis
from shardwise.parallel.seal import HEAD, MAGIC, NONCE, Door, Sealed, knock, own_address, read_secret, split_address
from shardwise.parallel.tcp import TcpTransport, connect
from tests.parallel import scenarios

SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"
PATIENCE = 20.0


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1", SECRET, b"test")
    yield door
    door.close()


def visit(door: Door) -> tuple[socket.socket, bytes]:
    """A bare connection, and the door's nonce."""
    connection = socket.create_connection(split_address(door.address), timeout=PATIENCE)
    greeting = connection.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)
    assert greeting.startswith(MAGIC)
    return connection, greeting[len(MAGIC) :]


def mac(role: bytes, nonces: bytes, purpose: bytes = b"test", secret: bytes = SECRET) -> bytes:
    return seal._mac(secret, purpose, role, nonces)


MINE = bytes(range(NONCE))
FALSE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda nonce: b"\xff" * 4096,
    "a web request": lambda nonce: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(200),
    "a frame": lambda nonce: (5).to_bytes(4, "little") + b"\x03hello" + bytes(200),
    "another secret": lambda nonce: MINE + mac(b"guest", nonce + MINE, secret=OTHER),
    "another purpose": lambda nonce: MINE + mac(b"guest", nonce + MINE, purpose=b"else"),
    "the door's own part": lambda nonce: MINE + mac(b"host", nonce + MINE),
    "an old proof": lambda nonce: MINE + mac(b"guest", bytes(NONCE) + MINE),
    "its own nonce back": lambda nonce: nonce + bytes(32),
    "nothing": lambda nonce: b"",
    "half a proof": lambda nonce: (MINE + mac(b"guest", nonce + MINE))[:-1],
}


@pytest.mark.parametrize("what", FALSE)
def test_strangers_are_dropped_unheard(door: Door, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """R5: guards against a peer without the secret that is heard, or may stay for a second: not a byte is decoded.

    And against a wrong secret, that is one for good, being told from a connection that has only ended.
    """
    heard: list[int] = []
    monkeypatch.setattr(Sealed, "receive", lambda self: heard.append(1))
    connection, nonce = visit(door)
    connection.sendall(FALSE[what](nonce))
    left = b""
    try:
        while came := connection.recv(64):
            left += came
    except ConnectionResetError:  # dropped with bytes of ours unread
        pass
    whole = len(FALSE[what](nonce)) >= NONCE + 32
    assert left in ((b"", bytes(32)) if whole else (b"",)), "a proof came"
    assert bool(door.refused) == whole
    connection.close()
    assert door.take(0.0) is None
    assert not heard
    assert seal.PROOF < 1, "how long a stranger may stay"


def test_many_strangers_keep_nobody_out(door: Door) -> None:
    """R5: guards against silent peers that hold up those who can prove themselves."""
    silent = [visit(door)[0] for _ in range(seal.CROWD // 2)]
    ours, theirs = pair(door)
    ours.send(b"hello")
    assert theirs.receive() == b"hello"
    for connection in (*silent, ours, theirs):
        connection.close()


def test_the_door_proves_itself_too() -> None:
    """R5: guards against a false front that agents would fork processes for."""
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(MAGIC + bytes(NONCE))
            connection.recv(NONCE + 32, socket.MSG_WAITALL)
            connection.sendall(bytes(32))

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(PermissionError, match="has not our secret"):
        knock(f"127.0.0.1 {listener.getsockname()[1]}", SECRET, b"test")
    listener.close()


def test_a_wrong_secret_is_told(door: Door) -> None:
    """Guards operators from silence when the secrets of two hosts differ."""
    with pytest.raises(PermissionError, match="same on every host"):
        knock(door.address, OTHER, b"test")
    assert door.refused == "127.0.0.1"


def test_an_end_without_a_word_is_no_wrong_secret() -> None:
    """Guards agents from giving up for good over a front that dies, or is too busy, while they prove themselves."""
    listener = socket.create_server(("127.0.0.1", 0))

    def dies() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(MAGIC + bytes(NONCE))
            connection.recv(NONCE + 32, socket.MSG_WAITALL)

    threading.Thread(target=dies, daemon=True).start()
    with pytest.raises(ConnectionError, match="has ended"):
        knock(f"127.0.0.1 {listener.getsockname()[1]}", SECRET, b"test")
    listener.close()


def test_a_process_without_room_waits(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a core against a door that can't accept, and whoever knocks against one that gives up then."""
    accept, tries, pauses = socket.socket.accept, [], []

    def full(listener: socket.socket) -> tuple[socket.socket, Any]:
        tries.append(1)
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(seal, "sleep", pauses.append)
    monkeypatch.setattr(socket.socket, "accept", full)
    for _ in range(2):  # it may be in an accept of before
        for sealed in pair(door):
            sealed.close()
    assert pauses == [seal.LULL] * 2


def pair(door: Door) -> tuple[Sealed, Sealed]:
    found: list[Sealed] = []
    thread = threading.Thread(target=lambda: found.append(knock(door.address, SECRET, b"test")))
    thread.start()
    theirs = door.take(PATIENCE)
    thread.join(PATIENCE)
    assert theirs is not None
    return found[0], theirs


def test_messages_of_any_size(door: Door) -> None:
    """Guards what passes both ways, at the sizes where it is sent in another manner."""
    ours, theirs = pair(door)
    for size in (0, 1, seal.SMALL, seal.SMALL + 1, 3 << 20):
        payload = bytes(size)
        thread = threading.Thread(target=ours.send, args=(payload,))
        thread.start()
        assert theirs.receive() == payload
        thread.join(PATIENCE)
        theirs.send(b"got it")
        assert ours.receive() == b"got it"
    ours.close()
    with pytest.raises(ConnectionError, match="ended"):
        theirs.receive()
    theirs.close()


@pytest.mark.parametrize("how", ["changed", "repeated", "forged", "reflected", "endless"])
def test_what_was_not_sent_is_noticed(door: Door, how: str) -> None:
    """R5: guards against a host on the way that adds to a proved connection."""
    ours, theirs = pair(door)
    ours.connection.settimeout(PATIENCE)
    first = HEAD.pack(5, Sealed._prove(ours._sending, 0, b"first")) + b"first"
    if how == "changed":
        ours.connection.sendall(first[:-1] + b"!")
    elif how == "repeated":
        ours.connection.sendall(first)
        assert theirs.receive() == b"first"
        ours.connection.sendall(first)
    elif how == "forged":
        ours.connection.sendall(HEAD.pack(5, hmac.digest(OTHER, b"first", "sha256")) + b"first")
    elif how == "reflected":
        theirs.send(b"first")
        ours.connection.sendall(ours.connection.recv(HEAD.size + 5, socket.MSG_WAITALL))
    else:
        ours.connection.sendall(HEAD.pack(2**32 - 1, bytes(32)))
    with pytest.raises(ConnectionError, match="a message"):
        theirs.receive()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("name", scenarios.ALL)
@pytest.mark.parametrize("size", [2, 3])
def test_an_axis_over_connections(name: str, size: int) -> None:
    """Guards the transport between hosts by what every transport has to get right."""
    axes: list[Axis | None] = [None] * size
    doors = [Door("127.0.0.1", SECRET, b"run") for _ in range(size)]
    addresses = [door.address for door in doors]
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            peers = connect({"tp": range(size)}, number, doors[number], addresses, SECRET, b"run", PATIENCE)
            axis = Axis(number, size, TcpTransport("tp", number, peers["tp"], torch.device("cpu"), PATIENCE))
            axes[number] = axis
            scenarios.ALL[name](axis)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    for door in doors:
        door.close()
    assert not errors
    for axis in axes:
        assert axis is not None
        axis.close()


def test_tensors_longer_than_a_message(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long prompts of large models: what is longer than the longest message arrives in pieces."""
    for module in (seal, tcp):
        monkeypatch.setattr(module, "LONGEST", 1 << 12)
    ours, theirs = pair(door)
    first = TcpTransport("pp", 0, {1: ours}, torch.device("cpu"), PATIENCE)
    second = TcpTransport("pp", 1, {0: theirs}, torch.device("cpu"), PATIENCE)
    for count in (1 << 10, (1 << 10) + 1, 5000):
        sent = torch.arange(count, dtype=torch.float32)
        first.send(sent)
        assert torch.equal(second.recv((count,), torch.float32), sent)
    first.close()
    second.close()


def test_whoever_does_not_come_is_named() -> None:
    """Guards operators from a start that hangs: the axis and the rank that is missing are told."""
    door = Door("127.0.0.1", SECRET, b"run")
    with pytest.raises(TimeoutError, match="pp axis: waited in vain for rank 1"):
        connect({"pp": (0, 2)}, 0, door, [door.address] * 3, SECRET, b"run", 0.2)
    door.close()


def test_a_lost_peer_is_named(door: Door) -> None:
    """Guards the cause of a failure: the axis and the rank whose connection broke, and not an errno."""
    ours, theirs = pair(door)
    transport = TcpTransport("pp", 0, {1: ours}, torch.device("cpu"), PATIENCE)
    theirs.close()
    with pytest.raises(ConnectionError, match="pp axis: lost rank 1"):
        transport.exchange(torch.zeros(3), [(3,), (3,)])
    transport.close()


def test_secrets_are_asked_for(tmp_path: Path) -> None:
    """R5: guards against hosts that start without a secret, or with one that others can read or guess."""
    file = tmp_path / "secret"
    file.write_text("x" * 40 + "\n")
    file.chmod(0o600)
    assert read_secret({"SHARDWISE_SECRET_FILE": str(file)}) == b"x" * 40
    assert read_secret({"SHARDWISE_SECRET": "y" * 32}) == b"y" * 32
    file.chmod(0o640)
    wrong = [
        ({}, "neither is set.*token_hex"),
        ({"SHARDWISE_SECRET": "y" * 32, "SHARDWISE_SECRET_FILE": str(file)}, "both are set"),
        ({"SHARDWISE_SECRET_FILE": str(file)}, "chmod 600"),
        ({"SHARDWISE_SECRET_FILE": str(tmp_path / "none")}, "can't be read"),
        ({"SHARDWISE_SECRET": "short"}, "less than 32"),
    ]
    for environ, told in wrong:
        with pytest.raises(ValueError, match=told):
            read_secret(environ)


def test_addresses() -> None:
    """Guards what is listened on: the way to the first host, or the interface that is named."""
    assert own_address("127.0.0.1", {}) == "127.0.0.1"
    assert own_address("192.0.2.1", {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    with pytest.raises(ValueError, match="no address there"):
        own_address("127.0.0.1", {"GLOO_SOCKET_IFNAME": "nosuch0"})
    with pytest.raises(ValueError, match="--local-addr"):
        own_address("no-such-host.invalid", {})
