"""Which cluster a kubeconfig leads to, and credentials that expire while a job is followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.kubernetes import login
from fsdp_jobs.run.processes import free_port
from fsdp_jobs.run.state import State
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.submitted import describe
from tests.launchers.kubernetes.simulated_api import TOKEN, Object, SimulatedApi
from tests.launchers.kubernetes.test_refusals import JOB, refused


def kubeconfig(change: Object | None = None, **more: Object) -> None:
    """Change the kubeconfig that the environment names: its keys, and those of its only cluster, user, context."""
    file = Path(os.environ["KUBECONFIG"])
    content = yaml.safe_load(file.read_text())
    for kind, fields in more.items():
        content[f"{kind}s"][0][kind].update(fields)
    file.write_text(yaml.safe_dump({**content, **(change or {})}))


def submit() -> str:
    (handle,) = submission.submit(submission.prepare([compose_job(JOB)]), [JOB])
    return handle


@pytest.fixture
def plugin(api: SimulatedApi, tmp_path: Path) -> Path:
    """A login plugin, as of every cloud: it prints the token of a file, without the time when it expires."""
    credential = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1"}
    said = json.dumps({**credential, "status": {"token": "$(cat token)"}}).replace('"', '\\"')
    file = tmp_path / "login"
    file.write_text(f'#!/bin/sh\ncd {tmp_path}\necho >> logins\necho "{said}"\n')
    file.chmod(0o755)
    (tmp_path / "token").write_text(TOKEN)
    called = {"apiVersion": credential["apiVersion"], "command": str(file), "interactiveMode": "Never"}
    kubeconfig({"users": [{"name": "test", "user": {"exec": called}}]})
    return file


def test_a_token_of_a_plugin_that_expires_is_renewed_once(api: SimulatedApi, plugin: Path, tmp_path: Path) -> None:
    handle = submit()
    api.token = "another"
    (tmp_path / "token").write_text(api.token)
    for _ in range(3):
        assert describe([handle])[handle].state is State.QUEUED
    assert len((tmp_path / "logins").read_text().splitlines()) == 2


def test_a_list_of_kubeconfigs_that_ends_in_a_colon_logs_in_once(
    api: SimulatedApi, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `KUBECONFIG=~/.kube/config:$KUBECONFIG`. The empty name stood for the current folder, which changes."""
    monkeypatch.setenv("KUBECONFIG", f"{os.environ['KUBECONFIG']}:")
    handle = submit()
    for number in range(3):
        (tmp_path / f"new-{number}").touch()
        assert describe([handle])[handle].state is State.QUEUED
    assert len((tmp_path / "logins").read_text().splitlines()) == 1


def test_a_plugin_whose_user_is_logged_out_is_not_called_for_each_request(
    api: SimulatedApi, plugin: Path, tmp_path: Path
) -> None:
    handle = submit()
    api.token = "another"
    for _ in range(3):
        assert "has expired" in describe([handle])[handle].message
    assert "log in again" in refused("name=y")
    assert len((tmp_path / "logins").read_text().splitlines()) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_who_logs_in_again_in_another_terminal_is_heard_in_this_one(
    api: SimulatedApi, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A plugin that fails leaves the client without a token: to the server an anonymous user."""
    handle = submit()
    api.token = "another"
    works = plugin.read_text()
    plugin.write_text("#!/bin/sh\nexit 1\n" if fails else works)
    assert "log in again" in describe([handle])[handle].message
    plugin.write_text(works)
    (tmp_path / "token").write_text(api.token)
    assert "log in again" in describe([handle])[handle].message  # not asked for each request
    monkeypatch.setattr(login, "_LOG_IN_EVERY_S", 0)
    assert describe([handle])[handle].state is State.QUEUED


def submitted_to(*overrides: str) -> str:
    """Submit a job; return the namespace in its handle."""
    (handle,) = submission.submit(submission.prepare([compose_job([*JOB, *overrides])]), [[]])
    return handle.rpartition("/")[2].partition(":")[0]


def test_a_kubeconfig_without_a_current_context_is_enough_for_who_names_one(api: SimulatedApi) -> None:
    """`kubectl config unset current-context` keeps people from the wrong cluster."""
    kubeconfig({"current-context": ""})
    assert "the kubeconfig has only test" in refused()
    assert submitted_to("cluster.context=test") == "team"


def test_an_api_behind_the_proxy_that_the_kubeconfig_names(api: SimulatedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy gets whole URLs; the simulated server takes their paths. Without it nobody answers.

    NO_PROXY is for the environment's proxies: kubectl does not apply it to this one.
    """
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    kubeconfig(cluster={"server": f"http://10.255.255.1:{free_port()}", "proxy-url": api.url})
    assert submitted_to() == "team"


def test_a_proxy_of_a_kind_that_is_not_supported_is_named(api: SimulatedApi) -> None:
    """As `ssh -D` makes; kubectl takes it."""
    kubeconfig(cluster={"proxy-url": "socks5://localhost:1080"})
    assert "Proxy URL had unsupported scheme socks5" in refused()


def test_in_a_pod_its_users_kubeconfig_comes_first(
    api: SimulatedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook in one cluster that submits to another one."""
    (tmp_path / ".kube").mkdir()
    Path(os.environ["KUBECONFIG"]).rename(tmp_path / ".kube" / "config")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert submitted_to() == "team"
    (tmp_path / ".kube" / "config").unlink()
    with pytest.raises(BadInput, match="no usable kubeconfig"):
        submission.prepare([compose_job(JOB)])
