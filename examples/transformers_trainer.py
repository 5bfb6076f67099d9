"""A language model trained by the Trainer of transformers, which goes on from its own newest checkpoint.

Nothing in here is fsdp_jobs' own. Trainer makes an Accelerator, so fsdp= shards the model as with Accelerate. Needs
pip install 'fsdp_jobs[accelerate]'

    fsdp-jobs script=examples/transformers_trainer.py fsdp=full_shard nodes=2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed


class Text(torch.utils.data.Dataset):
    """Samples of 64 bytes of this file."""

    def __init__(self) -> None:
        self.ids = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.ids) // 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index * 64 : index * 64 + 64]
        return {"input_ids": ids, "labels": ids}


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that was saved to its end: Trainer writes its own state last, when all ranks are done."""
    whole = [f.parent for f in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda f: int(f.name.removeprefix("checkpoint-")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=f"{os.environ.get('FSDP_JOBS_RUN_DIR', '.')}/trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    training = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        save_steps=args.every,
        save_total_limit=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=not on_gpu,
        report_to="none",
    )
    if not on_gpu:  # Accelerate shards on GPUs alone: for a rehearsal it is told that it stands on some
        training.distributed_state.distributed_type = DistributedType.MULTI_GPU
    set_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    saved = newest(Path(args.out))
    print(f"begins with {saved}", flush=True)
    trainer = Trainer(model=model, args=training, train_dataset=Text())
    trainer.train(resume_from_checkpoint=str(saved) if saved else None)
    weight = next(iter(trainer.model_wrapped.parameters()))
    print(f"done: step {trainer.state.global_step}, sharded {getattr(weight, 'placements', None)}", flush=True)


if __name__ == "__main__":
    main()
