"""The one socket that listens, taken before anything that takes time. Knows nothing of what is said over it."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from contextlib import suppress

BACKLOG = 1024
SEND_BUFFER = 2**16
"""Bytes that the kernel may keep for a slow client; it would by itself go up to megabytes for each."""
SO_ATTACH_FILTER = 26
"""Of Linux; Python has no name for it."""


class PortTaken(OSError):
    """Somebody else listens there, or we may not."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on one address and port; raises PortTaken, whose text names both."""
    place = f"can't listen on {host} port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise PortTaken(f"{place}: {getattr(error, 'strerror', None) or error}; choose another --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # right after a restart, too
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # at once: two sockets that are only bound may have the same port
    except OSError as error:
        sock.close()
        raise PortTaken(f"{place}: {error.strerror}; end what listens there, or choose another --port") from None
    sock.setblocking(False)
    return sock


def ignore_newcomers(sock: socket.socket) -> None:
    """Have the kernel drop what would begin a connection to a listening socket, where it can; others are completed.

    So its queue can be emptied for good, whereas a connection that comes between that and ``sock.close()`` would be
    reset. The client's system asks again a second later, and is refused, or finds a successor.
    """
    if sys.platform != "linux":
        return
    # of the TCP header: load the byte of flags; is SYN among them? then keep 0 bytes of the packet, else all
    code = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(code), ctypes.addressof(program)))


def url_of(sock: socket.socket) -> str:
    """Where clients find it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that is meant, unless it is a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Can only this machine reach what listens there?"""
    address = address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)
