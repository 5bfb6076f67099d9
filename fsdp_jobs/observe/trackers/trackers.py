"""MLflow and Weights & Biases, as far as a job needs them. Each is one line of its tracker a job, through all lives."""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from fsdp_jobs.run.directory import RunDir

_NO_METRICS = ("step", "time")
_PLACES = ("cluster", "notify", "tracking")  # groups of the configuration that say where and who, not what


class Tracker(Protocol):
    """What a run's records are handed to. Every method may raise whatever the tracker's client does."""

    def open(self, run: RunDir, config: dict[str, Any], known_id: str | None) -> str:
        """Go on with the entry `known_id`, or make one with the configuration as parameters. Returns its id."""

    def log(self, records: Sequence[dict[str, Any]]) -> None:
        """Hand on lines of metrics.jsonl."""

    def end(self, state: str, reason: str) -> None:
        """`state`: done | stopped | failed, or waiting for a job that goes on in another life."""


def make_tracker(kind: str) -> Tracker:
    return Mlflow() if kind == "mlflow" else Wandb()


def parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of what is trained, and how."""

    def leaves(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {k: v for key in value for k, v in leaves(f"{prefix}{key}.", value[key]).items()}
        return {prefix[:-1]: value}

    known = leaves("", {k: v for k, v in config.items() if k not in _PLACES})
    return {**known, "cluster.launcher": config["cluster"]["launcher"]}


def measured(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl."""
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if k not in _NO_METRICS}


_MLFLOWS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "waiting": "SCHEDULED"}
_MOST_PARAMS, _MOST_METRICS, _LONGEST = 100, 1000, 500  # that one request, one value may have


class Mlflow:
    """An MLflow run, through the client alone: nothing is global, nothing is imported that skinny has not."""

    def open(self, run: RunDir, config: dict[str, Any], known_id: str | None) -> str:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # we try again ourselves
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        settings = config["tracking"]
        self.client = MlflowClient(tracking_uri=settings["uri"])
        if known_id is not None:
            self.id = known_id
            self.client.update_run(known_id, status="RUNNING")
            return known_id
        experiment = self.client.get_experiment_by_name(settings["project"])
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(settings["project"])
        tags = {"fsdp_jobs.run.directory": str(run.path)}
        with suppress(KeyError, OSError):  # in a container the user may have no name
            tags["mlflow.user"] = getpass.getuser()
        self.id = str(self.client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id)
        params = [Param(k, str(v)[:_LONGEST]) for k, v in parameters(config).items()]
        for i in range(0, len(params), _MOST_PARAMS):
            self.client.log_batch(self.id, params=params[i : i + _MOST_PARAMS])
        return self.id

    def log(self, records: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(record.get("time", 0) * 1000), int(record.get("step", 0)))
            for record in records
            for name, value in measured(record).items()
        ]
        for i in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.id, metrics=metrics[i : i + _MOST_METRICS])

    def end(self, state: str, reason: str) -> None:
        self.client.set_tag(self.id, "fsdp_jobs.reason", reason)
        if state == "waiting":
            self.client.update_run(self.id, status=_MLFLOWS[state])
        else:
            self.client.set_terminated(self.id, _MLFLOWS[state])


class Wandb:
    """A W&B run; its files are in the run directory, under wandb/."""

    def open(self, run: RunDir, config: dict[str, Any], known_id: str | None) -> str:
        import wandb

        settings = config["tracking"]
        if settings["uri"]:
            os.environ["WANDB_BASE_URL"] = settings["uri"]
        self.id = known_id or secrets.token_hex(4)
        self.run = wandb.init(
            project=settings["project"],
            name=run.name,
            id=self.id,
            resume="allow",
            config=parameters(config),
            allow_val_change=True,
            dir=str(run.path),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self.run.define_metric("*", step_metric="step")  # W&B's own step cannot go back, as ours does after a failure
        return self.id

    def log(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            values: dict[str, Any] = {**measured(record), "step": record.get("step", 0)}
            self.run.log({**values, "_timestamp": record["time"]} if "time" in record else values)

    def end(self, state: str, reason: str) -> None:
        self.run.summary["verdict"] = reason
        if state == "waiting":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if state == "done" else 1)
