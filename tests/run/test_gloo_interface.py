"""Which network interface gloo takes on a machine whose own name is no address for others."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from fsdp_jobs.run.processes import gloo_interface


def _outward() -> tuple[str, str]:
    """Return an interface of this machine and its address, by which others reach it."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family == socket.AF_INET and not ipaddress.ip_address(found.address).is_loopback:
                return name, found.address
    pytest.skip("this machine has no network")


def test_gloo_is_told_the_interface_to_others_only_where_its_own_choice_reaches_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, address = _outward()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for own, others, told in (
        ("localhost", ["localhost", "no.such.name.invalid", address], {"GLOO_SOCKET_IFNAME": name}),
        ("no.such.name.invalid", ["localhost", address], {"GLOO_SOCKET_IFNAME": name}),
        ("localhost", ["localhost"], {}),
        (address, [address], {}),
    ):
        monkeypatch.setattr(socket, "gethostname", lambda own=own: own)
        assert gloo_interface(others) == told, own
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert gloo_interface([address]) == {}
