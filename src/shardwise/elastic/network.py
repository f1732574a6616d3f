"""How the hosts of a job reach each other: addresses and listening sockets, of IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

_HOST = re.compile(r"[\w.:%-]+")  # a name, or an address with its zone


def parse_endpoint(where: str) -> tuple[str, int] | None:
    """Read ``HOST:PORT`` or ``[ADDRESS]:PORT``; None if it is neither.

    An IPv6 address needs its brackets: without them its end would be ambiguous.
    """
    host, _, port = where.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            return None
    elif ":" in host:
        return None
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        return None
    if not _HOST.fullmatch(host):
        return None
    try:
        host.encode("idna")
    except UnicodeError:  # a part of the name is empty or too long
        return None
    return str(_number(host) or host), int(port)  # an address in its usual spelling


def format_endpoint(host: str, port: int) -> str:
    """Write what :func:`parse_endpoint` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that ``host`` is; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_address(host: str) -> bool:
    """Whether ``host`` is an address of either kind, and not a name to be looked up."""
    return _number(host) is not None


def scope_of(address: str) -> str:
    """Return from where an address can be reached, in a word.

    ``host`` is only this host, ``link`` the hosts on the same link, ``group`` a multicast group and
    ``all`` any host.
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback or found.is_unspecified:
        return "host"
    if found.is_multicast:
        return "group"
    return "link" if found.is_link_local else "all"


def address_towards(towards: str) -> str:
    """Return the address from which this host sends to another one; nothing is sent.

    Raises:
        OSError: the other host has no address, or no route leads to it.
    """
    reason: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        towards, 9, type=socket.SOCK_DGRAM
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own, _, *more = probe.getsockname()
                # The link is part of an IPv6 address that is valid on one link only.
                return f"{own}%{socket.if_indextoname(more[1])}" if any(more[1:]) else str(own)
        except OSError as error:
            reason = reason or error
    assert reason is not None
    raise reason


def addresses() -> dict[str, list[str]]:
    """Return the addresses of this host's network interfaces that have any, by name; IPv4 first.

    IPv6 addresses that are valid on one link only (``fe80::``) are left out.
    """
    import psutil  # here: every command imports this file, and few ask

    found: dict[str, list[str]] = {}
    for name, own in psutil.net_if_addrs().items():
        for each in sorted(own, key=lambda one: one.family):
            if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address:
                found.setdefault(name, []).append(each.address)
    return found


def interface_of(address: str) -> str | None:
    """Return the network interface with the given address of this host."""
    _, _, zone = address.partition("%")
    if zone:
        return zone
    return next((name for name, own in addresses().items() if address in own), None)


def interface_towards(towards: str) -> str | None:
    """Return the network interface that leads to another host, or that has this address."""
    try:
        return interface_of(address_towards(towards))
    except OSError:
        return None


def listening(address: str, port: int = 0) -> socket.socket:
    """Open a listening socket.

    Args:
        address: of this host, a name or a number. If a name has several addresses, the first that
            belongs to this host is used.
        port: 0 lets the kernel choose one.

    Raises:
        OSError: the address does not belong to this host, or the port is taken.
    """
    reason: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as unused:
            try:
                listener = unused.enter_context(socket.socket(family))
                if port:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
                listener.listen(4096)
            except OSError as error:
                reason = reason or error
                continue
            unused.pop_all()
            return listener
    assert reason is not None
    raise reason


def listening_everywhere() -> socket.socket:
    """Open a socket that listens at all addresses of this host; the kernel chooses the port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:  # IPv6 is disabled here
            pass
    return socket.create_server(("", 0))
