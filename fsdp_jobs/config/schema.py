"""Define a job's configuration: dataclasses that Hydra composes, and the file that stores them. No torch.

Only the functions that need YAML import it, so that help is fast.

Every number has its unit in its name or its meaning. The folder `conf/` holds values; `validate.py` checks which
combinations make sense; docs/keys.py generates the tables of docs/reference/configuration.md from the meanings.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from fsdp_jobs.config.clusters import CLUSTERS, ClusterConfig
from fsdp_jobs.config.errors import BadInput, Damaged
from fsdp_jobs.config.keys import AUTO, dotted, key

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
DTYPES = ("fp32", "bf16", "fp16")
MASTER_DTYPES = ("fp32", "bf16", "bf16_stochastic")  # bf16 rounded to nearest, or stochastically after each step
RECOMPUTED = ("none", "selective", "every_n", "full")  # the mildest first
VERDICTS = ("done", "preempted", "infrastructure", "stalled", "user_error")
NOTIFY_ON = (*VERDICTS, "requeue", "corruption")


@dataclass
class HardwareConfig:
    """The planner's assumptions on a GPU and its links. Peaks are dense, without sparsity."""

    name: str = key("???", "what the plan and the report call it")
    accelerator: str = key("cuda", "what its devices are; `cpu` has no MFU", choices=("cpu", "cuda"))
    memory_gib: float = key(0.0, "usable memory of a device, GiB")
    bf16_tflops: float = key(0.0, "dense peak, also of fp16, TFLOP/s")
    fp32_tflops: float = key(0.0, "peak of fp32 matmuls as PyTorch runs them by default, TFLOP/s")
    matmul_efficiency: float = key(1.0, "part of the peak that large matmuls reach", at_least=0.01, below=1.01)
    attention_tflops: float = key(0.0, "causal flash attention, heads of 128; 0: 45% of the matmul rate")
    memory_gb_s: float = key(0.0, "device memory bandwidth, GB/s; 0: elementwise work is not counted")
    host_memory_gib: float = key(0.0, "host memory per node, GiB; 0: offload is not checked against it")
    host_gb_s: float = key(0.0, "GB/s per GPU to host memory, one direction; 0: offload takes no time")
    failures_per_1000_node_days: float = key(4.0, "node failures that stop a job; for its goodput", at_least=0.01)
    gpus_per_node: int = key(8, "devices per node; `nproc_per_node=auto` starts as many ranks", at_least=1)
    nvlink_domain: int = key(0, "GPUs connected by NVLink or its like; may span nodes; 0: those of a node")
    intra_node_gb_s: float = key(0.0, "GB/s per GPU, one direction, inside the domain")
    nvls_gb_s: float = key(0.0, "the same for all-reduce by NVLink switches (NVLS), as a ring's; 0: none")
    inter_node_gb_s: float = key(0.0, "GB/s per GPU, one direction, between nodes")
    intra_node_latency_us: float = key(5.0, "one step of a ring inside the domain, microseconds")
    inter_node_latency_us: float = key(15.0, "one step of a ring between nodes, microseconds")
    source: str = key("", "where the numbers come from")


@dataclass
class ModelConfig:
    """The keys of every model: how it is cut into FSDP units."""

    kind: str = key("???", "llama, custom, hf or none; set by the option")
    wrap_classes: list[str] = key([], "class names whose modules become FSDP units (`fsdp.wrap=layer`)")


@dataclass
class LlamaConfig(ModelConfig):
    """A decoder-only transformer of the Llama family."""

    kind: str = "llama"
    wrap_classes: list[str] = field(default_factory=lambda: ["TransformerBlock"])
    vocab_size: int = key(256, "rows of the output, at least `data.vocab_size`", at_least=1)
    dim: int = key(256, "width; a multiple of twice `n_heads`", at_least=1)
    n_layers: int = key(4, "blocks", at_least=1)
    n_heads: int = key(8, "query heads", at_least=1)
    n_kv_heads: int = key(8, "key and value heads; fewer than `n_heads` is grouped-query attention", at_least=1)
    ffn_dim: int = key(704, "inner width of the SwiGLU feed-forward", at_least=1)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm")
    rope_theta: float = key(10000.0, "base of the rotary embedding")
    rope_scaling_factor: float = key(1.0, "Llama 3.1's stretch of long wavelengths; 1.0 is off")
    tie_embeddings: bool = key(False, "the head uses the embedding's weight")


@dataclass
class CustomModelConfig(ModelConfig):
    """Any factory of an nn.Module that maps tokens [batch, seq] to logits [batch, seq, vocab]."""

    kind: str = "custom"
    _target_: str = key("???", "dotted path of your factory: my_package.my_module.build")
    kwargs: dict[str, Any] = key({}, "its keyword arguments")
    vocab_size: int = key(0, "rows of its output; 0: not checked against the data")


@dataclass
class HfConfig(ModelConfig):
    """A causal language model of Hugging Face's transformers. Without wrap_classes, its own layers are the units."""

    kind: str = "hf"
    name_or_path: str = key("???", "a folder with `config.json`, or a name on the hub")
    pretrained: bool = key(True, "start from its weights; false: from random ones")
    vocab_size: int = key(0, "rows of its output; 0: what its configuration says")


@dataclass
class NoModelConfig(ModelConfig):
    """The user's program has its own model, which the plan does not know."""

    kind: str = "none"


@dataclass
class FsdpConfig:
    """How parameters, gradients and optimizer state are spread over ranks (FSDP2, `fully_shard`)."""

    strategy: str = key(AUTO, "auto is the plan's choice", choices=(AUTO, *STRATEGIES))
    shard_group: Any = key(AUTO, "ranks that together hold one full copy: auto or a number")
    objective: str = key("speed", "what auto prefers among options that fit", choices=("speed", "memory"))
    wrap: str = key("layer", "units: `wrap_classes`, large modules, or the root", choices=("layer", "size", "none"))
    min_num_params: int = key(100_000_000, "`wrap=size`: parameters of a module that becomes a unit", at_least=1)
    master_dtype: str = key("fp32", "stored parameters, gradients and moments", choices=MASTER_DTYPES)
    param_dtype: str = key(AUTO, "gathered parameters, compute; auto: bf16 on CUDA, else fp32", choices=(AUTO, *DTYPES))
    reduce_dtype: str = key("fp32", "gradients on the wire", choices=DTYPES)
    output_dtype: str = key(AUTO, "the model's output; auto leaves it as computed", choices=(AUTO, *DTYPES))
    cpu_offload: bool = key(False, "parameters, gradients and optimizer state live in host memory")
    forward_prefetch: int = key(0, "blocks gathered ahead in forward; 0 is FSDP2's own prefetch")
    backward_prefetch: int = key(0, "blocks gathered ahead in backward; 0 is FSDP2's own prefetch")
    accumulate_unsharded: Any = key(AUTO, "reduce gradients once per step only", choices=(AUTO, True, False))
    activation_checkpointing: str = key("none", "which activations are recomputed", choices=RECOMPUTED)
    activation_checkpointing_every: int = key(2, "the n of every_n", at_least=1)
    activation_offload: bool = key(False, "move the activations that checkpointing keeps to host memory")
    meta_init: bool = key(True, "build on the meta device and fill shards: no rank holds the whole model")
    compile: bool = key(False, "torch.compile each block")
    chunked_loss: Any = key(
        AUTO, "loss in chunks, never all logits at once; auto: where the plan needs it", choices=(AUTO, True, False)
    )


@dataclass
class DataConfig:
    """Where tokens come from and how many of them make one optimizer step."""

    kind: str = key("???", "set by the option", choices=("python_stdlib", "tokens", "synthetic", "text", "hf_dataset"))
    path: str | None = key(None, "`tokens`, `text`, `hf_dataset`: file, folder, glob or name on the hub; see below")
    token_dtype: str = key("uint16", "`tokens`: type of the ids, without a header", choices=("uint16", "uint32"))
    vocab_size: int = key(256, "token ids are below this", at_least=1)
    tokens: int = key(10_000_000, "`synthetic`: number of tokens", at_least=1)
    tokenizer: str = key("bytes", "`text`, `hf_dataset`: bytes, a folder with a tokenizer, or a name on the hub")
    tokenize: str | None = key(None, "`text`, `hf_dataset`: instead, dotted path of your function that returns ids")
    subset: str | None = key(None, "`hf_dataset`: which of its configurations")
    split: str = key("train", "`hf_dataset`")
    text_column: str = key("text", "`hf_dataset`: what the tokenizer gets")
    streaming: bool = key(False, "`hf_dataset`: read in its own order, and tokenize in every rank")
    cache_dir: str | None = key(None, "`text`, `hf_dataset`: where tokens are kept; null: `~/.cache/fsdp_jobs/tokens`")
    seq_len: int = key(128, "tokens per sample", at_least=1)
    global_batch: int = key(16, "samples per optimizer step over all ranks, however many there are", at_least=1)
    micro_batch: int = key(4, "samples per rank at once; the rest is gradient accumulation", at_least=1)
    workers: int = key(1, "processes per rank that read ahead; 0 reads within the step")
    prefetch: int = key(4, "microbatches that each of these processes keeps ready", at_least=1)


@dataclass
class OptimConfig:
    """AdamW with linear warmup and a cosine (or constant) tail."""

    lr: float = key(1e-3, "rate after warmup")
    beta1: float = key(0.9, "decay of the mean of gradients", below=1)
    beta2: float = key(0.95, "decay of the mean of squared gradients", below=1)
    eps: float = key(1e-8, "added to the root of that mean")
    weight_decay: float = key(0.1, "on matrices only; norms and biases are not decayed")
    grad_clip_norm: float = key(1.0, "global 2-norm; 0 is off")
    schedule: str = key("cosine", "after warmup", choices=("cosine", "constant"))
    warmup_steps: int = key(20, "steps of linear warmup")
    decay_steps: int | None = key(None, "step at which the cosine ends; null: `steps`", at_least=0)
    min_lr_ratio: float = key(0.1, "part of `lr` that is left at the end of the cosine")


@dataclass
class MemoryConfig:
    """Snapshots in the nodes' memory; they survive the ranks, and with a copy on another node also the node."""

    every_steps: Any = key(0, "steps between two snapshots; 0 is off, auto takes 1% of the time")
    dir: str = key("/dev/shm", "where each node keeps them: a folder in a file system in memory")


@dataclass
class CheckpointConfig:
    """When the job saves checkpoints, and which are kept."""

    every_steps: int = key(20, "steps between two saves; 0 is off")
    every_minutes: Any = key(0.0, "minutes since the last save; 0 is off, auto the plan's best interval")
    keep: int = key(3, "newest complete checkpoints that stay; 0 keeps all")
    dir: str | None = key(None, "folder or URL (`s3://`, `gs://`) with a folder per run; null: in the run directory")
    local_dir: str | None = key(None, "a folder on each node's own disk: shards are written there first, then copied")
    async_mode: str = key(AUTO, "auto is thread on CPU and process on CUDA", choices=(AUTO, "off", "thread", "process"))
    read_back: bool = key(True, "each rank reads its file again and compares checksums before the commit")
    restart_from_zero: bool = key(False, "a run that had checkpoints may begin at step 0 when none can be used")
    memory: MemoryConfig = field(default_factory=MemoryConfig)


@dataclass
class IntegrityConfig:
    """Checks that replicas hold the same bits, and the reaction if they differ."""

    every_steps: int = key(0, "steps between two comparisons; 0: only snapshots are compared")
    probe_every_steps: Any = key(
        AUTO,
        "the trainer's steps between two probes whether all ranks compute the same; 0 is off, "
        "auto 1000 for Llamas and Hugging Face's models and off for your own",
        at_least=0,
    )
    action: str = key(
        "report",
        "on a difference: report it; restart from where they agreed; exclude the node, too",
        choices=("report", "restart", "exclude"),
    )


@dataclass
class ElasticConfig:
    """How the job survives failures."""

    max_failures_without_progress: int = key(3, "failures tolerated without a new checkpoint in between")
    heartbeat_interval_s: float = key(1.0, "seconds between an agent's heartbeats", at_least=0.1)
    heartbeat_timeout_s: float = key(10.0, "seconds of silence after which a node is lost", at_least=1)
    lease_s: float = key(
        0.0, "seconds without the coordinator after which a node stops its ranks; 0: twice the timeout"
    )
    join_window_s: float = key(20.0, "seconds that the first round waits for nodes above the minimum")
    wait_for_nodes_s: float = key(600.0, "seconds with too few nodes until the attempt requeues", at_least=1)
    init_timeout_s: float = key(600.0, "process-group timeout until the first step is done, seconds", at_least=1)
    step_timeout_s: float = key(300.0, "the trainer's process-group timeout afterwards, seconds", at_least=1)
    stall_timeout_s: float = key(
        0.0,
        "seconds without a step that count as a stall; 0: 20 measured steps, at least 60 s (a program: 1,800 s). For "
        "programs that report no steps: seconds of silence; 0: 1,800. A huge number: never",
    )
    exclude_after: int = key(3, "failures of one machine after which it is excluded; 0 is off")
    exclude_for_s: float = key(3600.0, "seconds for which it is excluded; older failures do not count", at_least=1)
    exclude_slow: bool = key(False, "exclude a machine that slows the others down, if the job ends sooner without it")
    max_skipped_updates: int = key(20, "steps in a row without a finite gradient norm that end the job")
    loss_spike: float = key(6.0, "standard deviations above the last 100 losses that make an event; 0: off")
    stop_on_nan_loss: bool = key(False, "a logged loss that is not finite ends the job")
    stop_grace_s: float = key(60.0, "seconds that a stopped job has to save and exit; then it is killed", at_least=1)


@dataclass
class ProgramConfig:
    """Facts about the user's own program."""

    metrics: str | None = key(None, "pattern of lines with groups `step`, `steps`, `loss`, `epoch`; null: known ones")


@dataclass
class TrackingConfig:
    """An experiment tracker that also gets the lines of metrics.jsonl. Its credentials come from the environment."""

    kind: str = key("none", "set by the option", choices=("none", "mlflow", "wandb"))
    project: str = key("fsdp_jobs", "MLflow's experiment, W&B's project")
    uri: str | None = key(None, "the server; null: `MLFLOW_TRACKING_URI` or `WANDB_BASE_URL` where the job runs")


@dataclass
class NotifyConfig:
    """Notifications that an attempt has ended or that replicas differ."""

    command: str | None = key(None, "a shell command, run where the verdict is written")
    webhook: str | None = key(None, "`env:NAME`: the variable that holds the URL to which JSON is posted")
    on: list[str] = key([*VERDICTS, "corruption"], "what to notify of; `requeue`: restarts, too", choices=NOTIFY_ON)


@dataclass
class SweepConfig:
    """How --multirun submits and compares its jobs."""

    name: str | None = key(None, "the sweep's and, numbered, its runs'; null: `name`, or one from the swept keys")
    dir: str = key("sweeps", "the folder that has a folder for each sweep")
    wait: bool = key(False, "stay until all jobs have ended, and hand their objectives to Hydra's sweeper")
    objective: str = key("loss", "a key of `metrics.jsonl`; jobs are compared by its last value")
    direction: str = key("minimize", "what is better: a lower or a higher objective", choices=("minimize", "maximize"))
    parallelism: int = key(0, "jobs at once; 0: no limit on a cluster, 1 on this machine")


@dataclass
class JobConfig:
    """The whole configuration of a job."""

    name: str | None = key(None, "the run's folder in `runs_dir`; an existing run continues; null makes a new one")
    runs_dir: str = key("runs", "where run directories are, relative to the current folder")
    nodes: Any = key(
        2, "a number, or `min:max` for a job that trains with what it can get between the two", at_least=None
    )
    nproc_per_node: Any = key(AUTO, "ranks per node; auto is `hardware.gpus_per_node`")
    seed: int = key(0, "seed of the initial weights and of the order of samples")
    steps: int = key(120, "optimizer steps in all, earlier attempts included", at_least=1)
    script: str | None = key(None, "your own program instead of the trainer: a `.py` or an executable")
    module: str | None = key(None, "your own program as a module, as for `python -m`")
    script_args: str = key("", 'its arguments, as in a shell: `script_args="--lr 3e-4"`')
    log_every_steps: int = key(1, "steps between two lines of `metrics.jsonl`", at_least=1)
    attach: bool = key(True, "stay and show progress; false returns the handle at once")
    dry_run: bool = key(False, "show the plan and what would be submitted, submit nothing")
    allow_config_change: bool = key(False, "let an existing run continue with another training configuration")
    init_from: str | None = key(None, "weights that a new run starts from: a file, a folder of files, or one of DCP")
    init_key_map: list[str] = key([], "`REGEX=>REPLACEMENT` for names in `init_from`, one after the other")
    init_rope: str = key("halves", "order of rotary pairs in `init_from`", choices=("halves", "interleaved"))
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    @property
    def is_program(self) -> bool:
        """Return whether ranks run the user's own program instead of the trainer."""
        return self.script is not None or self.module is not None


# Keys that the trained weights depend on. Submissions of a run may change these only with allow_config_change=true,
# and everything else freely: cluster, number of nodes, sharding, checkpoints.
TRAINING_KEYS = (
    *("model", "data", "optim", "seed", "init_from"),
    *("fsdp.master_dtype", "fsdp.param_dtype", "fsdp.reduce_dtype", "fsdp.output_dtype"),
)
# Keys of these groups that affect only speed, not results.
NOT_TRAINING_KEYS = ("data.workers", "data.prefetch", "data.micro_batch", "data.cache_dir", "model.wrap_classes")
# Keys that the result of a user's program depends on, as far as known.
PROGRAM_KEYS = ("script", "module", "script_args")
# Keys and groups that only the trainer reads.
TRAINERS_KEYS = ("steps", "seed", "data", "optim", "init_from", "init_key_map", "init_rope")

# Schemas that the files in conf/ build on: (group, name, node).
SCHEMAS: tuple[tuple[str | None, str, type], ...] = (
    (None, "job_schema", JobConfig),
    *(("cluster", f"{name}_schema", node) for name, node in CLUSTERS.items()),
    *(("model", f"{node.kind}_schema", node) for node in (LlamaConfig, CustomModelConfig, HfConfig, NoModelConfig)),
    *(
        (group.name, f"{group.name}_schema", cast(type, group.default_factory))
        for group in fields(JobConfig)
        if group.name in ("fsdp", "data", "optim", "checkpoint", "elastic", "hardware", "tracking")
    ),
)


def dump_config(config: JobConfig) -> str:
    """Return the YAML for `config.yaml`, 15 times as fast as OmegaConf."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Quotes every string that OmegaConf or another reader of YAML could read as a number."""

    def quoted_if_number(dumper: Dumper, text: str) -> Any:
        style = "'" if re.match(r"[-+.]?\d|[-+]?\.", text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, quoted_if_number)
    return str(yaml.dump(asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def load_config(path: Path) -> JobConfig:
    """Read what `dump_config` wrote, with the types of its groups.

    Only values that do not have their key's type, for example after an edit by hand, need OmegaConf, which is slow to
    import.

    Raises:
        BadInput: a value cannot be converted to its key's type, or there is no such key.
        Damaged: it does not say the kind of model or cluster.
    """
    values, config = plain_values(path), JobConfig()
    given = dict(dotted(values))
    for group, discriminator in (("model", "kind"), ("cluster", "launcher")):
        nodes = {getattr(node, discriminator): node for schema_group, _, node in SCHEMAS if schema_group == group}
        if (key := f"{group}.{discriminator}") not in given:
            raise Damaged(path, f"{key} is not in it")
        if (chosen := given[key]) in nodes:
            setattr(config, group, nodes[chosen]())
    _fill(config, values, f"{path}: ")
    return config


def _fill(config: Any, values: dict[str, Any], where: str) -> None:
    declared = get_type_hints(type(config))
    for name, value in values.items():
        if is_dataclass(held := getattr(config, name, None)) and isinstance(value, dict):
            _fill(held, value, f"{where}{name}.")
            continue
        try:
            setattr(config, name, msgspec.convert(value, declared[name]))
        except (KeyError, msgspec.ValidationError):
            setattr(config, name, _converted(type(config), name, value, f"{where}{name}={value}"))


def _converted(group: type, name: str, value: Any, where: str) -> Any:
    """Raises: BadInput for a value that cannot be converted to the type of the group's key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(group), {name: value})
        return OmegaConf.to_object(merged[name]) if OmegaConf.is_config(merged[name]) else merged[name]
    except OmegaConfBaseException as e:
        raise BadInput.at(where, str(e).partition("\n")[0]) from e


def plain_values(path: Path) -> dict[str, Any]:
    """Read what `dump_config` wrote as unchecked plain values, 40 times as fast: for a few values of many runs.

    Raises:
        Damaged: it is not what `dump_config` wrote.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Reads 3e-4 as a number, as OmegaConf and people do, but YAML 1.1 does not."""

    exponent = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    try:
        return dict(yaml.load(path.read_text(), Loader))
    except (FileNotFoundError, yaml.YAMLError, ValueError, TypeError) as e:
        raise Damaged(path, e) from e


def training_values(config: JobConfig) -> dict[str, Any]:
    """Return dotted key -> value for every key that the trained weights depend on."""
    names = tuple(f"{name}." for name in (PROGRAM_KEYS if config.is_program else TRAINING_KEYS))
    values = ((key, value) for key, value in dotted(asdict(config)) if not isinstance(value, dict))
    return {k: v for k, v in values if f"{k}.".startswith(names) and k not in NOT_TRAINING_KEYS}
