"""Send to MLflow and Weights & Biases: a job is one run there, through all restarts.

Both classes have the same methods; each may raise any exception of the tracker's client.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from fsdp_jobs.config.keys import dotted
from fsdp_jobs.run.directory import RunDir, user_name
from fsdp_jobs.run.record import JsonObject

_NO_METRICS = ("step", "time")
_NO_PARAMETERS = ("cluster", "notify", "tracking")  # groups of the configuration that do not affect training


def parameters(config: JsonObject) -> JsonObject:
    """Return dotted key -> value of the configuration, without `_NO_PARAMETERS` but with the launcher."""
    trained = {k: v for k, v in config.items() if k not in _NO_PARAMETERS}
    values = {key: value for key, value in dotted(trained) if not isinstance(value, dict)}
    return {**values, "cluster.launcher": config["cluster"]["launcher"]}


def measured(record: JsonObject) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl."""
    values = ((k, v) for k, v in record.items() if k not in _NO_METRICS and not isinstance(v, bool))
    return {k: float(v) for k, v in values if isinstance(v, int | float)}


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


_MLFLOW_STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "waiting": "SCHEDULED"}
_MAX_PARAMS, _MAX_METRICS, _MAX_LETTERS = 100, 1000, 500  # of a request, of a request, of a value
_REFUSED = re.compile(r"[^\w.\- /]")  # characters in names of metrics: MLflow refuses the whole request
_MAX_NAME = 250


def _name_of(metric: str) -> str:
    """Return the nearest name that MLflow accepts: it may contain slashes if it is a normal relative path."""
    return posixpath.normpath("/" + _REFUSED.sub("_", metric)).strip("/")[:_MAX_NAME].rstrip("/") or "_"


class Mlflow:
    """An MLflow run, only through the client: that has no global state, and mlflow-skinny suffices."""

    unwritten = 0  # at most so many bytes of metrics.jsonl are in the client, and lost if it is killed

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # metric -> its name there

    def open(self, run: RunDir, config: JsonObject, known_id: str | None) -> str:
        """Continue the tracker's run `known_id`, or start one; return its id."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the sender retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow.tracking import MlflowClient

        settings = config["tracking"]
        self.client = MlflowClient(tracking_uri=settings["uri"])
        if known_id is not None:
            self.id = known_id
            self.client.update_run(known_id, status="RUNNING")
            return known_id
        experiment = self.client.get_experiment_by_name(settings["project"])
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(settings["project"])
        tags = {"fsdp_jobs.run.directory": str(run.path), "mlflow.user": user_name()}
        self.id = str(self.client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id)
        return self.id

    def describe(self, config: JsonObject) -> None:
        """Send the configuration's values that the tracker's run lacks; MLflow refuses changes of the others."""
        from mlflow.entities import Param

        known = self.client.get_run(self.id).data.params
        params = [Param(k, str(v)[:_MAX_LETTERS]) for k, v in parameters(config).items() if k not in known]
        for batch in _batches(params, _MAX_PARAMS):
            self.client.log_batch(self.id, params=batch)

    def log(self, records: Sequence[JsonObject]) -> None:
        """Send lines of metrics.jsonl."""
        from mlflow.entities import Metric

        metrics = [
            Metric(self._name_of(name), value, int(record.get("time", 0) * 1000), int(record.get("step", 0)))
            for record in records
            for name, value in measured(record).items()
        ]
        for batch in _batches(metrics, _MAX_METRICS):
            self.client.log_batch(self.id, metrics=batch)

    def _name_of(self, metric: str) -> str:
        """Return the nearest name that MLflow accepts, with a checksum of the metric if another one has it."""
        if metric not in self._names:
            name = _name_of(metric)
            if name in self._names.values():
                name = f"{name[: _MAX_NAME - 9]}_{crc32(metric.encode()):08x}"
            self._names[metric] = name
        return self._names[metric]

    def end(self, state: str, reason: str) -> None:
        """End the tracker's run as done | stopped | failed, or as waiting if the job will be restarted."""
        self.client.set_tag(self.id, "fsdp_jobs.reason", reason)
        end = self.client.update_run if state == "waiting" else self.client.set_terminated
        end(self.id, _MLFLOW_STATES[state])


class Wandb:
    """A W&B run; its files are in the run directory, under wandb/."""

    unwritten = 1 << 16  # the client writes blocks of 32 KiB

    def open(self, run: RunDir, config: JsonObject, known_id: str | None) -> str:
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
        self.run.define_metric("*", step_metric="step")  # W&B's own step cannot go back, a job's does after a failure
        return self.id

    def describe(self, config: JsonObject) -> None:
        """Do nothing: `open` has sent the configuration's values."""

    def log(self, records: Sequence[JsonObject]) -> None:
        for record in records:
            values: JsonObject = {**measured(record), "step": record.get("step", 0)}
            self.run.log({**values, "_timestamp": record["time"]} if "time" in record else values)

    def end(self, state: str, reason: str) -> None:
        self.run.summary["verdict"] = reason
        if state == "waiting":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if state == "done" else 1)


TRACKERS: dict[str, type[Mlflow | Wandb]] = {"mlflow": Mlflow, "wandb": Wandb}
