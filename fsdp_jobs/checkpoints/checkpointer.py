"""Saving and resuming the state of a run, together on all ranks."""

from __future__ import annotations

import hashlib
import io
import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.catalog import SHARDS, Manifest
from fsdp_jobs.checkpoints.local_disks import LocalDisks
from fsdp_jobs.checkpoints.storage import CommittingWriter, SafeReader, SaveRequest
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.keys import AUTO
from fsdp_jobs.config.schema import CheckpointConfig
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_OTHERS = "others."


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, samples seen."""

    step: int = 0
    samples: int = 0


def training_digest(training: dict[str, Any]) -> str:
    """A short digest of the keys that the weights depend on."""
    return hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest()[:16]


class Checkpointer:
    """Saves and resumes one run. Every method is called by every rank, in the same order."""

    def __init__(
        self,
        run: RunDir,
        config: CheckpointConfig,
        layout: Layout,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        attempt: int,
        life: str,
        digest: str,
        others: Mapping[str, Stateful] | None = None,
    ):
        """`others`: what else is saved, by name: plain values and tensors that are the same on every rank."""
        self.run, self.config, self.layout = run, config, layout
        self.model, self.optimizer, self.scaler, self.device = model, optimizer, scaler, device
        self.attempt, self.life, self.digest = attempt, life, digest
        self.others = dict(others or {})
        self.home = catalog.home_of(config, run)
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo")  # the save's collectives must not meet the trainer's
        local = Path(config.local_dir) / run.name if config.local_dir is not None else None
        self.disks = LocalDisks(local, self.group) if local is not None else None
        self.mode = (
            ("process" if device.type == "cuda" else "thread") if config.async_mode == AUTO else config.async_mode
        )
        on_cuda = device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(on_cuda, self.mode == "process", True, on_cuda))
        self.planner = DefaultSavePlanner(enable_plan_caching=True)
        self.committed_step = -1
        self.stall_s = 0.0  # time the trainer has waited for checkpoints since this was last set to 0
        self._staged: Future[None] | None = None
        self._written: Future[Any] | None = None
        self._request: SaveRequest | None = None
        self._may_upload = True
        self.loaded_from = ""  # where the state was read that this life began with
        self.failure: str | None = None  # of the newest save
        self._live: dict[str, Tensor] = {}  # the live state: steps change the tensors in place, never the names

    def live_state(self) -> dict[str, Tensor]:
        """Model and optimizer by name. Hyperparameters are left out: the configuration has them."""
        state: dict[str, Tensor] = {}
        seen: set[int] = set()  # tied weights have two names and are saved once
        for name, value in get_model_state_dict(self.model).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                state[f"model.{name}"] = value
        optimizer_state = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        state |= {f"optim.{k}": v for k, v in cast(dict[str, Any], optimizer_state).items() if isinstance(v, Tensor)}
        return state

    def _small_state(self) -> dict[str, Tensor]:
        """What is made anew for each save: this rank's random state, the scale of fp16 gradients, the others."""
        state = _rng_state(self.rank, self.device)
        state |= {f"{_OTHERS}{name}": _packed(other.state_dict()) for name, other in self.others.items()}
        if self.scaler is not None:
            held = self.scaler.state_dict()
            state["scaler"] = torch.tensor([held["scale"], held["_growth_tracker"]], dtype=torch.float64)
        return state

    def save(self, progress: Progress, block: bool = False) -> None:
        """Begin a checkpoint of the state as it is now; with `block`, or without async, also finish it.

        Waits for the previous save first. A save that fails leaves nothing behind but an event, and the
        text in `failure`.
        """
        self.finish()
        begin = time.perf_counter()
        request = SaveRequest(
            checkpoints=self.home,
            life=self.life,
            step=progress.step,
            samples=progress.samples,
            world_size=self.layout.world_size,
            mesh=self.layout.mesh_shape,
            config_digest=self.digest,
            keep=self.config.keep,
            read_back=self.config.read_back,
            began=time.time(),
            local=self.disks.folder if self.disks is not None else None,
        )
        if self.disks is not None:
            self._may_upload = self.disks.may_upload(must=block)
            self._note_upload(wait=False)
        self._request = request
        self._live = self._live or self.live_state()
        state = self._live | self._small_state()
        writer = CommittingWriter(request)
        if self.mode == "off":
            self._written = Future()
            try:
                dcp.save(state, storage_writer=writer, planner=self.planner, process_group=self.group)
                self._written.set_result(None)
            except Exception as e:
                self._written.set_exception(e)
        else:
            kind = AsyncCheckpointerType.PROCESS if self.mode == "process" else AsyncCheckpointerType.THREAD
            response = dcp.async_save(
                state,
                storage_writer=writer,
                planner=self.planner,
                process_group=self.group,
                async_checkpointer_type=kind,
                async_stager=self.stager,
            )
            assert isinstance(response, AsyncSaveResponse)
            self._staged, self._written = response.staging_completion, response.upload_completion
        self.stall_s += time.perf_counter() - begin
        if block or self.mode == "off":
            self.before_update()
            self.finish()
        if block:
            self._note_upload(wait=True)

    def before_update(self) -> None:
        """Wait until a save has its copy of the state. To be called before anything changes the state."""
        if self._staged is not None:
            begin = time.perf_counter()
            self._staged.result()
            self._staged = None
            self.stall_s += time.perf_counter() - begin

    def poll(self) -> None:
        """Take note of a save that has ended, without waiting."""
        if self._written is not None and self._written.done():
            self.finish()
        self._note_upload(wait=False)

    def finish(self) -> None:
        """Wait for the save under way, and record what became of it."""
        if self._written is None or self._request is None:
            return
        begin = time.perf_counter()
        written, self._written = self._written, None
        error = written.exception()
        request = self._request
        if error is not None:
            self._failed(request, error)
        elif self.disks is None:
            self._committed(request)
        else:
            self.failure = None
            if self.rank == 0:
                self._record(events.CheckpointOnNodes, request, Manifest.read(request.temporary, SHARDS))
            if self._may_upload:
                self.disks.upload(request)
            self.disks.tidy()
        self.stall_s += time.perf_counter() - begin

    def _note_upload(self, wait: bool) -> None:
        """Take note of a copy to shared storage that has ended; with `wait`, when it has."""
        ended = self.disks.uploaded(wait) if self.disks is not None else None
        if ended is None:
            return
        request, error = ended
        if error is None:
            self._committed(request)
        else:
            self._failed(request, error)

    def _committed(self, request: SaveRequest) -> None:
        self.failure, self.committed_step = None, request.step
        if self.rank == 0:
            self._record(events.Checkpoint, request, Manifest.read(request.final))

    def _record(
        self,
        kind: type[events.Checkpoint | events.CheckpointOnNodes],
        request: SaveRequest,
        manifest: Manifest,
    ) -> None:
        size, seconds = sum(f["bytes"] for f in manifest.files.values()), time.time() - request.began
        events.record(self.run, self.attempt, kind(request.step, size, round(seconds, 3)))

    def _failed(self, request: SaveRequest, error: BaseException) -> None:
        self.failure = f"checkpoint of step {request.step} failed: {_root_cause(error)}"
        if self.rank == 0:
            events.record(self.run, self.attempt, events.CheckpointFailed(request.step, self.failure))
            catalog.remove_unfinished(request.checkpoints, max(0, self.committed_step))
            print(f"WARNING {self.failure}", flush=True)

    def resume(self) -> Progress | None:
        """Load the newest checkpoint that is whole, verified by all ranks together; None when there is none.

        Rank 0 chooses; damaged ones are set aside and named in an event. What the nodes have on their own disks
        is not read from shared storage.

        Raises:
            JobFailed: the checkpoint is of another model.
        """
        if self.rank == 0:
            self.home.mkdir(parents=True, exist_ok=True)
            catalog.remove_unfinished(self.home)
        while True:
            choice: list[Any] = self._newest() if self.rank == 0 else [None] * 4
            dist.broadcast_object_list(choice, src=0, group=self.group)
            name, faults, manifest, is_shared = choice
            if name is None:
                return None
            folder = self.home / name
            if manifest is not None:
                shards = self.disks.holding(manifest) if self.disks is not None else None
                if shards is not None:
                    faults = catalog.damaged_files(folder, manifest, [".metadata"], patience_s=30.0)
                elif is_shared:
                    faults = self._damage(folder, manifest)
                else:
                    faults = ["these nodes' disks have not all of its shards"]
                if not faults:
                    return self._load(folder, manifest, shards)
            if self.rank == 0:
                catalog.set_aside(folder) if is_shared else catalog.remove(folder)
                events.record(self.run, self.attempt, events.CheckpointSkipped(folder.name, faults))
                print(f"WARNING {folder.name} cannot be used, going back one: {'; '.join(faults)}", flush=True)

    def _newest(self) -> list[Any]:
        """Name, faults as far as names and sizes tell, manifest, and whether its shards are on shared storage."""
        shared = next(iter(catalog.find_checkpoints(self.home)), None)
        on_nodes = next(iter(catalog.find_on_nodes(self.home)), None) if self.disks is not None else None
        if on_nodes is not None and (shared is None or catalog.step_of(on_nodes) > catalog.step_of(shared)):
            return [on_nodes.name, [], Manifest.read(on_nodes, SHARDS), False]
        if shared is None:
            return [None, [], None, True]
        faults = catalog.missing_or_short(shared)
        return [shared.name, faults, None if faults else Manifest.read(shared), True]

    def _damage(self, folder: Path, manifest: Manifest) -> list[str]:
        """Files that are not what was written; each rank reads its part of them."""
        names = sorted(manifest.files)[self.rank :: self.layout.world_size]
        mine = catalog.damaged_files(folder, manifest, names, patience_s=30.0)
        found: list[list[str]] = [[] for _ in range(self.layout.world_size)]
        dist.all_gather_object(found, mine, group=self.group)
        return sorted({fault for faults in found for fault in faults})

    def _load(self, folder: Path, manifest: Manifest, shards: Path | None) -> Progress:
        """Load a verified checkpoint; `shards` is this node's folder when the nodes have it on their own disks."""
        same_world = manifest.world_size == self.layout.world_size
        small = {k: v for k, v in self._small_state().items() if same_world or not k.startswith("rng.")}
        state = self.live_state() | small
        reader = SafeReader(folder, shards)
        metadata = reader.read_metadata()
        for name in self.others:
            saved = metadata.state_dict_metadata.get(f"{_OTHERS}{name}")
            if isinstance(saved, TensorStorageMetadata):
                state[f"{_OTHERS}{name}"] = torch.empty(saved.size, dtype=torch.uint8)
        _check_same_model(state, metadata.state_dict_metadata, folder.name)
        self.loaded_from = "shared storage" if shards is None else "the nodes' disks"
        if self.disks is not None and shards is not None:
            self.disks.fetch(shards, state, metadata)
        dcp.load(state, storage_reader=reader, process_group=self.group)
        flat: dict[str, Any] = dict(get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT))
        flat |= {k.removeprefix("optim."): v for k, v in state.items() if k.startswith("optim.")}
        set_optimizer_state_dict(self.model, self.optimizer, flat, options=_FLAT)
        if self.scaler is not None:
            scale, tracker = state["scaler"].tolist()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(tracker)})
        for name, other in self.others.items():
            other.load_state_dict(_unpacked(state[f"{_OTHERS}{name}"]))
        if same_world:
            _set_rng_state(state, self.rank)
        self.committed_step = manifest.step
        return Progress(manifest.step, manifest.samples)

    def close(self) -> None:
        self.finish()
        self.stager.close()
        if self.disks is not None:
            self.disks.close()


def _packed(values: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(values, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    """Raises: pickle.UnpicklingError for what is neither a plain value nor a tensor."""
    values: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    return values


def _check_same_model(state: dict[str, Tensor], saved: dict[str, Any], checkpoint: str) -> None:
    """Raises: JobFailed naming up to five tensors that the checkpoint has not, or has in another shape."""
    wrong = []
    for name, tensor in state.items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata):
            wrong.append(f"{name} is not in it")
        elif tuple(there.size) != tuple(tensor.shape):
            wrong.append(f"{name} is {tuple(there.size)} there and {tuple(tensor.shape)} here")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise JobFailed(
            f"{checkpoint} is of another model: {'; '.join(wrong[:5])}{more}. "
            "Use the model it was saved with, or another run name."
        )


def _rng_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The random state of this rank as tensors: torch CPU, torch CUDA, NumPy, Python."""
    _, keys, pos, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), pos, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words, gauss_next is not None], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss_next or 0.0], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{k}": v for k, v in state.items()}


def _set_rng_state(state: dict[str, Tensor], rank: int) -> None:
    mine = {k.removeprefix(f"rng.{rank}."): v for k, v in state.items() if k.startswith(f"rng.{rank}.")}
    torch.set_rng_state(mine["torch"])
    keys, (pos, has_gauss) = mine["numpy"][:-2].tolist(), mine["numpy"][-2:].tolist()
    gauss = mine["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), pos, has_gauss, gauss))
    version, *words, has_next = mine["python"].tolist()
    random.setstate((version, tuple(words), mine["python_gauss"].item() if has_next else None))
    if "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])


def _root_cause(error: BaseException) -> str:
    """The failure behind DCP's wrapping, with the rank it happened on."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
