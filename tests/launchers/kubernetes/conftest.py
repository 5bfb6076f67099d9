"""Settings for the tests with the client library, and a simulated cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.kubernetes.simulated_api import SimulatedApi
from tests.launchers.kubernetes.simulated_cluster import SimulatedCluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:HTTPResponse.getheader:DeprecationWarning:kubernetes")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCluster]:
    with SimulatedCluster(tmp_path / "cluster") as made:
        monkeypatch.setenv("KUBECONFIG", str(made.api.write_kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
        yield made


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedApi]:
    simulated = SimulatedApi()
    modes = {"spec": {"accessModes": ["ReadWriteMany"]}, "metadata": {"name": "runs"}}
    simulated.put("", "persistentvolumeclaims", {"kind": "PersistentVolumeClaim", **modes})
    monkeypatch.setenv("KUBECONFIG", str(simulated.write_kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield simulated
    simulated.close()
