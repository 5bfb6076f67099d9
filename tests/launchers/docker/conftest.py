"""One daemon and one image for all tests of Docker; afterwards nothing of ours is left in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.launchers.docker import daemon


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whoever is first the time to build the image, on a machine that runs other tests too."""
    for item in items:
        if "image" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1500))


def _ours() -> dict[str, set[str]]:
    """Containers, networks and volumes there are."""
    return {
        "containers": set(daemon.docker("ps", "--all", "--format", "{{.Names}}").split()),
        "networks": set(daemon.docker("network", "ls", "--format", "{{.Name}}").split()),
        "volumes": set(daemon.docker("volume", "ls", "--quiet").split()),
    }


@pytest.fixture(scope="package")
def docker_daemon() -> Iterator[None]:
    """A daemon that answers; at the end it has the containers, networks and volumes that it had."""
    if missing := daemon.why_not():
        pytest.skip(missing)
    os.environ |= daemon.SECRET
    with daemon.daemon():
        before = _ours()
        yield
        assert _ours() == before


@pytest.fixture(scope="package")
def image(docker_daemon: None, request: pytest.FixtureRequest) -> str:
    """The name of our image, built now; programs of Accelerate and transformers are for the soak."""
    is_soak = any(item.get_closest_marker("soak") for item in request.session.items)
    daemon.build_image(*(["accelerate"] if is_soak else []))
    return daemon.IMAGE
