"""The schema of a job: dataclasses that Hydra composes and closes. No torch, no I/O.

Every number carries its unit in its name or its comment. The folder `conf/` holds the values;
`checks.py` says which combinations make sense.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from fsdp_jobs.config.clusters import CLUSTERS, ClusterConfig

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
DTYPES = ("fp32", "bf16", "fp16")
AUTO = "auto"


@dataclass
class HardwareConfig:
    """What the planner assumes about a GPU and its links. Peaks are dense, without sparsity."""

    name: str = "???"
    accelerator: str = "cuda"  # what a device is: cpu | cuda
    memory_gib: float = 0.0  # usable device memory, GiB
    bf16_tflops: float = 0.0  # dense peak, TFLOP/s
    fp32_tflops: float = 0.0  # peak for fp32 matmuls as PyTorch runs them by default, TFLOP/s
    matmul_efficiency: float = 1.0  # of the peak that large matmuls were measured to reach
    memory_gb_s: float = 0.0  # device memory bandwidth, GB/s; 0: elementwise work is not counted
    host_memory_gib: float = 0.0  # host memory of a node, GiB; 0: offload is not checked against it
    host_gb_s: float = 0.0  # GB/s a GPU to host memory, one direction; 0: offload's traffic is not counted
    gpus_per_node: int = 8
    nvlink_domain: int = 8  # GPUs that reach each other over NVLink or its like (may span nodes)
    intra_node_gb_s: float = 0.0  # GB/s a GPU, one direction, inside the domain
    inter_node_gb_s: float = 0.0  # GB/s a GPU, one direction, between nodes
    intra_node_latency_us: float = 5.0  # one ring step
    inter_node_latency_us: float = 15.0
    source: str = ""  # where the numbers come from


@dataclass
class ModelConfig:
    """Common to every model: how it is cut into FSDP blocks."""

    kind: str = "???"  # llama | custom | hf
    wrap_classes: list[str] = field(default_factory=list)  # class names that become FSDP blocks


@dataclass
class LlamaConfig(ModelConfig):
    """A decoder-only transformer of the Llama family."""

    kind: str = "llama"
    wrap_classes: list[str] = field(default_factory=lambda: ["TransformerBlock"])
    vocab_size: int = 256
    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 8  # fewer than n_heads: grouped-query attention
    ffn_dim: int = 704  # inner width of the SwiGLU feed-forward
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling_factor: float = 1.0  # 8.0 for Llama 3.1's long context; 1.0 is off
    tie_embeddings: bool = False  # the head uses the embedding's weight


@dataclass
class CustomModelConfig(ModelConfig):
    """Any factory of yours that returns an nn.Module mapping tokens [batch, seq] to logits [batch, seq, vocab]."""

    kind: str = "custom"
    _target_: str = "???"  # dotted path of the factory: my_package.my_module.build
    kwargs: dict[str, Any] = field(default_factory=dict)  # its keyword arguments
    vocab_size: int = 0  # rows of its output; 0: not checked against the data


@dataclass
class HfConfig(ModelConfig):
    """A causal language model of Hugging Face's transformers. Without wrap_classes, its own layers are the blocks."""

    kind: str = "hf"
    name_or_path: str = "???"  # a folder with config.json, or a name on the hub
    pretrained: bool = True  # begin with its weights; false: with random ones
    vocab_size: int = 0  # rows of its output; 0: what its configuration says


@dataclass
class NoModelConfig(ModelConfig):
    """The model is the user's program's, and nothing is known of it."""

    kind: str = "none"


@dataclass
class FsdpConfig:
    """How parameters, gradients and optimizer state are spread over ranks (FSDP2, `fully_shard`)."""

    strategy: str = AUTO  # auto or one of STRATEGIES
    shard_group: Any = AUTO  # ranks that hold one full copy together: auto or an int (hybrid strategies)
    wrap: str = "layer"  # layer: model.wrap_classes | size: modules of at least min_num_params | none: the root only
    min_num_params: int = 100_000_000  # with wrap=size
    param_dtype: str = AUTO  # gathered parameters and compute: auto is bf16 on CUDA, fp32 on CPU
    reduce_dtype: str = "fp32"  # gradient reduction
    output_dtype: str = AUTO  # the model's output: auto leaves it as computed
    cpu_offload: bool = False  # parameters, gradients and optimizer state live in host memory
    forward_prefetch: int = 0  # blocks gathered ahead in forward; 0 is FSDP2's implicit prefetch
    backward_prefetch: int = 0  # likewise in backward
    accumulate_unsharded: Any = AUTO  # true: nothing is sent before a step's last microbatch, at 4 bytes a parameter
    activation_checkpointing: str = "none"  # none | full | every_n | selective
    activation_checkpointing_every: int = 2  # with every_n: recompute each n-th block
    activation_offload: bool = False  # keep what is checkpointed in host memory
    meta_init: bool = True  # build on the meta device and fill shards: no rank holds the whole model
    compile: bool = False  # torch.compile each block


@dataclass
class DataConfig:
    """Where tokens come from and how many of them make one optimizer step."""

    kind: str = "???"  # python_stdlib | tokens | synthetic | text | hf_dataset
    path: str | None = None  # tokens: a flat file of ids; text: files; hf_dataset: a folder, a file, a name on the hub
    token_dtype: str = "uint16"  # kind=tokens: uint16 | uint32
    vocab_size: int = 256  # token ids are below this
    tokens: int = 10_000_000  # kind=synthetic: how many there are
    tokenizer: str = "bytes"  # text, hf_dataset: bytes, a folder, or a name on the hub
    tokenize: str | None = None  # ... or your function: from a text, or from a row of a data set, to a list of ids
    subset: str | None = None  # hf_dataset: which of its configurations
    split: str = "train"  # hf_dataset
    text_column: str = "text"  # hf_dataset: what the tokenizer gets
    streaming: bool = False  # hf_dataset: read as it comes, in its own order, and tokenize in every rank
    cache_dir: str | None = None  # text, hf_dataset: where tokens are kept; null: ~/.cache/fsdp_jobs/tokens
    seq_len: int = 128  # tokens a sample
    global_batch: int = 16  # samples an optimizer step, over all ranks; held constant when nodes come and go
    micro_batch: int = 4  # samples a rank puts through the model at once
    workers: int = 1  # processes a rank that read ahead; 0 reads in the step
    prefetch: int = 4  # microbatches each of them keeps ready


@dataclass
class OptimConfig:
    """AdamW with linear warmup and a cosine (or constant) tail."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only; norms and biases are not decayed
    grad_clip_norm: float = 1.0  # global 2-norm; 0 is off
    schedule: str = "cosine"  # cosine | constant
    warmup_steps: int = 20
    decay_steps: int | None = None  # step at which the cosine ends; null: the job's steps
    min_lr_ratio: float = 0.1  # of lr, at the end of the cosine


@dataclass
class CheckpointConfig:
    """When the job is saved, and what is kept."""

    every_steps: int = 20  # 0 is off
    every_minutes: float = 0.0  # 0 is off; whichever of the two comes first
    keep: int = 3  # newest complete checkpoints that stay; 0 keeps all
    dir: str | None = None  # null: in the run directory; or a folder or URL (s3://, gs://) to make one a run in
    local_dir: str | None = None  # a folder on each node's own disk: shards go there first, then to the place above
    async_mode: str = AUTO  # auto | off | thread | process; auto is thread on CPU, process on CUDA
    read_back: bool = True  # each rank reads its shard again and compares checksums before the commit


@dataclass
class ElasticConfig:
    """How the job lives through failures."""

    max_failures_without_progress: int = 3  # failures in a row with no new checkpoint before the job stops
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0  # a node silent for this long is lost
    join_window_s: float = 20.0  # once the minimum of nodes is here, wait this long for the rest
    wait_for_nodes_s: float = 600.0  # below the minimum for this long: leave, to be requeued
    init_timeout_s: float = 600.0  # process-group timeout until the first step has finished
    step_timeout_s: float = 300.0  # process-group timeout afterwards
    stall_timeout_s: float = 0.0  # no step for so long is a stall; 0: 20 measured step times, at least 60 s
    exclude_after: int = 3  # failures of one machine before it is left out; 0 is off
    exclude_for_s: float = 3600.0  # ... for so long; older failures do not count either
    stop_on_nan_loss: bool = False  # a loss that is not a number ends the job
    stop_grace_s: float = 60.0  # after a request to stop: finish the step and save within this


@dataclass
class TrackingConfig:
    """An experiment tracker that gets the lines of metrics.jsonl, too. Its keys come from the environment."""

    kind: str = "none"  # none | mlflow | wandb
    project: str = "fsdp_jobs"  # MLflow's experiment, W&B's project
    uri: str | None = None  # of the server; null: what MLFLOW_TRACKING_URI or WANDB_BASE_URL says


@dataclass
class NotifyConfig:
    """Who is told that an attempt has ended, and how."""

    command: str | None = None  # shell command on the machine that judged; FSDP_JOBS_* say what happened
    webhook: str | None = None  # env:NAME: the variable that holds a URL, to which JSON is posted
    on: list[str] = field(default_factory=lambda: ["done", "preempted", "infrastructure", "stalled", "user_error"])


@dataclass
class SweepConfig:
    """What --multirun makes of its jobs."""

    name: str | None = None  # of the sweep and, with a number, of its runs; null: `name`, or one from what is swept
    dir: str = "sweeps"  # where sweeps keep their lists of jobs
    wait: bool = False  # stay until all jobs have ended, and hand their objectives to Hydra's sweeper
    objective: str = "loss"  # a key of metrics.jsonl: its last value is what jobs are compared by
    direction: str = "minimize"  # minimize | maximize
    parallelism: int = 0  # jobs at once; 0: no limit on a cluster, 1 on this machine


@dataclass
class JobConfig:
    """One job, whole."""

    name: str | None = None  # run directory under runs_dir; null makes one from model and time
    runs_dir: str = "runs"
    nodes: Any = 2  # an int, or "min:max" for an elastic job
    nproc_per_node: Any = AUTO  # ranks a node: auto is one a GPU, or two on a CPU
    seed: int = 0
    steps: int = 120  # optimizer steps in all
    script: str | None = None  # your own torchrun program instead of the trainer: train.py, or an executable
    module: str | None = None  # likewise, as python -m runs it: pkg.train
    script_args: str = ""  # its arguments, as in a shell
    log_every_steps: int = 1
    attach: bool = True  # stay and show progress; false returns the handle at once
    dry_run: bool = False  # show what would be submitted, submit nothing
    allow_config_change: bool = False  # let an existing run go on with another training configuration
    init_from: str | None = None  # weights that a new run begins with: a file, or a folder of them or of DCP
    init_key_map: list[str] = field(default_factory=list)  # "REGEX=>REPLACEMENT" for names in init_from, in order
    init_rope: str = "halves"  # rotary pairs in init_from: halves (transformers) | interleaved (torchtitan, Meta)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    @property
    def is_program(self) -> bool:
        """Whether ranks run the user's own program and not the trainer."""
        return self.script is not None or self.module is not None


# What the trained weights depend on. Everything else (where, on how many nodes, sharded how,
# saved when) may change between two lives of a run; these may not without the user's word.
TRAINING_KEYS = (
    *("model", "data", "optim", "seed", "init_from"),
    *("fsdp.param_dtype", "fsdp.reduce_dtype", "fsdp.output_dtype"),
)
# ... except these, which change how fast data is read and nothing that is computed.
NOT_TRAINING_KEYS = ("data.workers", "data.prefetch", "data.micro_batch", "data.cache_dir", "model.wrap_classes")
# Of a user's program no more is known than what is run.
PROGRAM_KEYS = ("script", "module", "script_args")

# Schemas that the files in conf/ build on: (group, name, node).
SCHEMAS: tuple[tuple[str | None, str, type], ...] = (
    (None, "job_schema", JobConfig),
    *(("cluster", f"{name}_schema", node) for name, node in CLUSTERS.items()),
    ("model", "llama_schema", LlamaConfig),
    ("model", "custom_schema", CustomModelConfig),
    ("model", "hf_schema", HfConfig),
    ("model", "none_schema", NoModelConfig),
    ("fsdp", "fsdp_schema", FsdpConfig),
    ("data", "data_schema", DataConfig),
    ("optim", "optim_schema", OptimConfig),
    ("checkpoint", "checkpoint_schema", CheckpointConfig),
    ("elastic", "elastic_schema", ElasticConfig),
    ("hardware", "hardware_schema", HardwareConfig),
    ("tracking", "tracking_schema", TrackingConfig),
)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every string that OmegaConf, or any other reader of YAML, could take for a number."""


def _quoted_if_number(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'" if re.match(r"[-+.]?\d|[-+]?\.", text) else None
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


_Dumper.add_representer(str, _quoted_if_number)


def dump_config(config: JobConfig) -> str:
    """The configuration as the YAML that `config.yaml` holds; 15 times as fast as OmegaConf does it."""
    text: str = yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def load_config(path: Path) -> JobConfig:
    """The configuration that `dump_config` wrote, with the types its groups had."""
    content = cast(DictConfig, OmegaConf.load(path))
    typed = OmegaConf.structured(JobConfig)
    for group, discriminator in (("model", "kind"), ("cluster", "launcher")):
        chosen = content[group][discriminator]
        for schema_group, _, node in SCHEMAS:
            if schema_group == group and getattr(node, discriminator) == chosen:
                typed[group] = OmegaConf.structured(node)
    return cast(JobConfig, OmegaConf.to_object(OmegaConf.merge(typed, content)))


def plain_values(path: Path) -> dict[str, Any]:
    """What `dump_config` wrote, unchecked and 40 times as fast: for a few values of many runs."""
    values: dict[str, Any] = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return values


def training_values(config: JobConfig) -> dict[str, Any]:
    """Dotted key -> value of everything the trained weights depend on."""
    tree = OmegaConf.structured(config)

    def leaves(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {k: v for key in value for k, v in leaves(f"{prefix}.{key}", value[key]).items()}
        return {prefix: value}

    found: dict[str, Any] = {}
    for key in PROGRAM_KEYS if config.is_program else TRAINING_KEYS:
        value = OmegaConf.select(tree, key)
        found |= leaves(key, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
    return {k: v for k, v in found.items() if k not in NOT_TRAINING_KEYS}
