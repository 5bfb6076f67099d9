"""Steps and losses from what programs print."""

from __future__ import annotations

import itertools
import math
import re
import time
from pathlib import Path

import pytest

from fsdp_jobs.node import output as output_module
from fsdp_jobs.node.lines import Reader, Reading
from fsdp_jobs.node.output import OutputMetrics
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import lock
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.rank_state import RankState
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.submit.overview import RunSummary

ALONE = Round(0, 1, size=1, shard_group=1, rank=0, layout="", last=0, partner=None)  # a round of one node

# As they print them to a file; \x1b[31m is a colour.
TORCHTITAN = (
    "[titan] 2025-05-01 10:00:00,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1234  \x1b[33mgrad_norm: 1.5"
)
DIFFUSERS = "Steps:  10%|█         | 50/500 [00:10<01:30,  4.91it/s, lr=1e-5, step_loss=0.12]"
LITGPT = "Epoch 2 | iter 110 step 55 | loss train: 2.340, val: n/a | iter time: 100.00 ms (step)"
DETECTRON = "[11/28 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 1.5  loss_cls: 0.3  time: 0.5"
LINGUA = "0: INFO    25-05-01 10:00:00.0 - 0:00:10 - step: 20  acc: 0  loss:  9.87  grad: 1.2e+00  wps: 1.2e+04"
MEGATRON = " iteration       30/     500 | consumed samples: 960 | lm loss: 1.094782E+01 | loss scale: 1.0 |"
DINOV2 = "I20260101 dinov2 helpers.py:103] Training  [   10/12500]  eta: 1:00:00  lr: 0.0  total_loss: 11.5 (12)"
FAIRSEQ = '2026-01-01 10:00:00 | INFO | train_inner | {"epoch": 1, "loss": "15.2", "ppl": "3", "num_updates": "100"}'
MMENGINE = "01/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][  50/1000]  lr: 1.0e-03  eta: 1:02:03  loss: 2.3456"
NANOTRON = "01/01 [INFO|DP=0|PP=0|TP=0]: iteration: 10 / 1500 | consumed_tokens: 10K | lm_loss: 10.5 | lr: 0.0003"
NEMO = "Training epoch 0, iteration 9/99 | lr: 1e-05 | global_step: 9 | reduced_train_loss: 9.8 | val_loss: 4.0"
WENET = "2024-01-01 10:00:00,000 DEBUG TRAIN | steps/sec 3.2| Batch 2/1100 loss 5.1 loss_att 5.0 lr 0.0001 rank 0"
ESPNET = "[gpu01:0/2] 2026-01-01 (trainer:464) INFO: 1epoch:train:683-1364batch: iter_time=5.862e-05, loss=68.7"
LIGHTNING = "Epoch 1:  50%|█████     | 50/100 [00:05<00:05, 9.80it/s, v_num=0, train_loss=2.310, val_loss=4.0]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (TORCHTITAN, Reading(10, None, 8.1234)),
        (LINGUA, Reading(20, None, 9.87)),
        (MEGATRON, Reading(30, 500, 10.94782)),
        (FAIRSEQ, Reading(100, None, 15.2, epoch=1)),
        (MMENGINE, Reading(50, 1000, 2.3456, epoch=1)),
        (
            "INFO - Iter(train) [   50/160000]  lr: 9.9e-03  loss: 2.3456  decode.loss_ce: 2.1",
            Reading(50, 160000, 2.3456),
        ),
        (NANOTRON, Reading(10, 1500, 10.5)),
        (NEMO, Reading(9, 99, 9.8, epoch=0)),
        ("1|10|Loss: 1.23: 10%|█         | 10/100 [00:30<04:30,  3.00s/it]", Reading(10, None, 1.23)),  # torchtune
        (WENET, Reading(1100, None, 5.1, epoch=2)),
        (WENET.replace(" | steps/sec 3.2|", ""), Reading(1100, None, 5.1, epoch=2)),  # of older versions
        (ESPNET, Reading(1364, None, 68.7, epoch=1)),
        ("Epoch 0: :   5%|▌         | 5/100 [00:10<03:10, reduced_train_loss=10.9]", Reading(5, 100, 10.9, epoch=0)),
        (LIGHTNING, Reading(50, 100, 2.31, epoch=1)),
        ("Epoch 0: |          | 31/? [00:06<00:00,  4.84it/s, train_loss=0.469]", Reading(31, 31, 0.469, epoch=0)),
        ("Epoch 3: 31it [00:06,  4.84it/s, loss=0.469]", Reading(31, 31, 0.469, epoch=3)),
        ("Training: |          | 31/? [00:06<00:00,  4.84it/s, train_loss=0.469]", Reading(31, None, 0.469, epoch=-1)),
        ("Training: |          | 0/? [00:00<?, ?it/s, train_loss=0.258, val_loss=0.153]", None),
        (DIFFUSERS, Reading(50, 500, 0.12)),
        (LITGPT, Reading(110, None, 2.34, epoch=2)),
        (DETECTRON, Reading(19, None, 1.5)),
        (DINOV2, Reading(10, 12500, 11.5)),
        ("Training steps:  10%|█         | 50/500 [00:10<01:30,  4.91it/s, loss=0.12]", Reading(50, 500, 0.12)),
        ("Epoch [1/5], Step [100/600], Loss: 0.2345", Reading(100, 600, 0.2345, epoch=1)),  # as many tutorials print
        ("[2,  4000] loss: 2.197", Reading(4000, None, 2.197, epoch=2)),  # PyTorch's first one
        ("[ 2,  4000] loss: 2.197", Reading(4000, None, 2.197, epoch=2)),  # DeepSpeed's of it
        ("Epoch 1 | Batch 20/100 | Loss 2.5", Reading(20, 100, 2.5, epoch=1)),
        ("Epoch: 1, Batch: [20/100], Loss: 2.5", Reading(20, 100, 2.5, epoch=1)),
        ("batch size 8/16, step 10, loss 2.3", Reading(10, None, 2.3)),
        ("Epoch 1/3 [Train]:  50%|█████     | 50/100 [00:05<00:05, loss=2.3]", Reading(50, 100, 2.3, epoch=1)),
        ("Epoch 1/3 [Val]:  50%|█████     | 50/100 [00:05<00:05, loss=2.3]", None),
        ("[eval] step 100 loss 2.3", None),
        ("12:00:00 - INFO - Evaluation at step 100: loss 2.3", None),
        ("Validation | step 100 | loss 2.3", None),
        ("step = 1,000, tokens = 4,096,000, train-lm_loss = 2.1, train-loss = 2.3", Reading(1000, None, 2.3)),
        ("Val Epoch 1 | Batch 20/100 | Loss 2.5", None),
        ("run-eval: step 100 | loss 2.3 | val: 2.4", Reading(100, None, 2.3)),
        ("step 100 | val: 2.4 | aux loss 0.1 | z-loss 0.01 | ce-loss 2.3", Reading(100, None, 2.3)),
        ("batch: 8, loss 2.3", None),
        ('{"steps": 1000, "step": 10, "loss": 2.3}', Reading(10, None, 2.3)),
        ("ms/step: 120 | step: 10 | loss: 2.3", Reading(10, None, 2.3)),
        ("micro-batch 3/8 | step 10/100 | loss 2.3", Reading(10, 100, 2.3)),
        ("micro step 3/8 loss 2.3", None),
        ("step 10, loss 2.3", Reading(10, None, 2.3)),
        ("Step 10. Loss 2.3.", Reading(10, None, 2.3)),
        ("10% of steps 10% loss 2.3", None),
        ("step 0.52s, loss 2.3", None),
        ("step 300ms loss 2.3", None),
        ("Validation steps:  10%|█         | 5/50 [00:10<01:30,  4.91it/s, loss=0.12]", None),
        ("Epoch 0:  10%|█         | 10/100 [00:01<00:09, 9.80it/s, v_num=0]", Reading(10, 100, epoch=0)),
        ("iter 40: loss 3.2100, time 123.45ms, mfu 12.34%", Reading(40, None, 3.21)),  # nanoGPT
        ("step 250: train loss 2.1000, val loss 2.5000", Reading(250, None, 2.1)),  # its evaluation
        ("step 00019/05000 | loss 10.98 | lr 3.0e-04", Reading(19, 5000, 10.98)),  # llm.c and its like
        ("{'step': 3, 'loss': 1.5}", Reading(3, None, 1.5)),
        ("step=1,000 loss=1e-3", Reading(1000, None, 0.001)),
        ("steps=1000 batch=8 loss=1", None),  # what a program is to do
        ("Namespace(lr=0.1, steps=1000, loss=1.0)", None),
        ("Steps: 10 loss: 1.2", Reading(10, None, 1.2)),
        ("steps=10/100 loss=1", Reading(10, 100, 1.0)),
        ("step 2 loss 1,234.5", Reading(2, None, 1234.5)),
        ("Saving checkpoint at step 100", None),
        (f"step {'9' * 400} loss 1", None),
        (f" 5%|▌| {'9' * 5000}/{'9' * 5000} [00:01<00:00]", None),
        ("step 3 loss tensor(2.3450, grad_fn=<MeanBackward0>)", Reading(3, None, 2.345)),  # of print(..., loss)
        ("{'loss': np.float64(2.3), 'step': 10}", Reading(10, None, 2.3)),
        ("step 3 loss -inf", Reading(3, None, -math.inf)),
        ("step 3 loss information: 2.3", None),
        ("step 3: forward 10ms, loss 2ms, backward 20ms", None),
        ("step 3 loss 2,31", None),  # a decimal comma, or a list
        ("step 3 loss 1,234", None),
        ("step 3 loss 2.1,2.2", Reading(3, None, 2.1)),
        ("loss 2.3 tokens/step: 4096", None),
        ("INFO | train.py:step:42 - step 10, loss 2.3", Reading(10, None, 2.3)),  # Loguru's, of a function `step`
        ("step 100 val loss 2.5", None),
        (TORCHTITAN.replace("step:", "validate step:"), None),
        ("Validation step 500/800: loss 2.9", None),
        ("training for 1000 steps with loss scale 128", None),
        ("Map: 100%|██████████| 1000/20000 [00:01<00:00, 9000 examples/s]", None),
        ("  5%|▌         | 5/100 [00:01<00:19,  5.0it/s]", None),  # a bar of no one knows what
        ("Epoch 1/10:  50%|█████     | 50/100 [00:05<00:05, 9.80it/s, loss=2.31]", Reading(50, 100, 2.31, epoch=1)),
        ("Epoch: [0][ 6/20]\tTime  0.22 ( 0.45)\tLoss 1.0642e+01 (8.4406e+00)", Reading(6, 20, 10.642, epoch=0)),
        ("Epoch: [0]  [  10/1251]  eta: 0:10:00  lr: 0.1  loss: 6.9 (7.0)", Reading(10, 1251, 6.9, epoch=0)),
        ("Train: 1 [   2/5 ( 60%)]  Loss: 0.734 (0.694)  Time: 0.051s,  156.18/s", Reading(2, 5, 0.734, epoch=1)),
        ("INFO Train: [0/300][10/1251]\teta 0:10:00 lr 0.1\tloss 6.9 (6.9)", Reading(10, 1251, 6.9, epoch=0)),
        ("| epoch   1 |   200/ 2983 batches | lr 20.00 | loss  7.62 | ppl  2047.00", Reading(200, 2983, 7.62, epoch=1)),
        ("Test: [ 1/4]\tTime  0.293 ( 0.293)\tLoss 5.8262e+03 (5.8262e+03)", None),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3", None),  # samples
        (  # a bar, and what is logged beside it
            " 24%|██▍       | 48/199 [00:02<00:07, 21.25it/s][rank=0] INFO:{'global_step': 10, 'running_loss': 6.22}",
            Reading(10, None, 6.22),
        ),
        ("Resumed=True | {'epoch': 1, 'global_step': 200, 'running_loss': 0}", None),  # a sum that has not begun
        ("step 1 loss 0.0", Reading(1, None, 0.0)),
        ("steps:  10%|█         | 50/500 [00:10<01:30,  4.91it/s, avr_loss=0.12]", Reading(50, 500, 0.12)),  # kohya's
        ("Loaded checkpoint: step 5000, loss 2.1", None),
        ("  Resumed from out/last.pt  (step 100, loss 2.3)", None),
        ("[Resume] Resuming from step 100, loss=2.3", None),
        ("=> loaded checkpoint 'last.pt' (epoch 3, step 100, loss 2.3)", None),
        ("Resumed epoch 1:  10%|█         | 10/100 [00:01<00:09, loss=2.3]", Reading(10, 100, 2.3, epoch=1)),
        ("[resumed] step 10 loss 2.3", Reading(10, None, 2.3)),
        ("data loaded: 0.1s | step 10 | loss 2.3", Reading(10, None, 2.3)),
        ("step 10 | loss 2.3 | checkpoint loaded", Reading(10, None, 2.3)),
        (
            "Epoch 1/9 | Loss: 2.3 | Acc: 0.5:  10%|█         | 10/100 [00:01<00:09,  9.8it/s]",
            Reading(10, 100, 2.3, epoch=1),
        ),
        ("epoch 1 training loss = 2.3:  10%|█         | 10/100 [00:01<00:09]", Reading(10, 100, 2.3, epoch=1)),
        (
            "epoch 1 iter 9: train loss 2.3. lr 6e-04:  10%|█         | 10/100 [00:01<00:09]",
            Reading(9, None, 2.3, epoch=1),
        ),
        ("Epoch 1 | Val Loss: 2.3:  10%|█         | 10/100 [00:01<00:09,  9.8it/s]", None),
        ("Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 90.0it/s]", None),
    ],
)
def test_what_well_known_programs_print_is_understood(line: str, said: Reading | None) -> None:
    assert Reader(None).read(line) == said


def test_the_trainer_tells_its_loss_and_its_bar_the_step() -> None:
    reader = Reader(None)
    lines = [
        " 10%|█         | 9/100 [00:02<00:20,  4.5it/s]",
        "{'loss': '2.3404', 'grad_norm': '1.2', 'learning_rate': '1e-05', 'epoch': '0.1'}",
        " 10%|█         | 10/100 [00:02<00:20,  4.5it/s]",
        "{'eval_loss': 2.5, 'eval_runtime': 1.2, 'epoch': 0.1}",
        " 11%|█         | 11/100 [00:02<00:20,  4.5it/s]",
        "{'train_runtime': 9.9, 'train_loss': 2.2, 'epoch': 1.0}",  # of the whole run
        "100%|██████████| 100/100 [00:20<00:00,  4.5it/s]",
    ]
    assert [r for line in lines if (r := reader.read(line))] == [Reading(10, 100, 2.3404), Reading(100, 100)]


def test_an_evaluation_yields_to_another_line_of_its_step() -> None:
    """As nanoGPT, whose `iter` was never read if it evaluates as often as it prints."""
    reader = Reader(None)
    lines = [
        line
        for step in (0, 10, 20)
        for line in (f"step {step}: train loss 3.0, val loss 4.0", f"iter {step}: loss 2.{step}, time 12ms")
    ]
    said = [r for line in lines if (r := reader.read(line))]
    assert said == [
        Reading(0, None, 3.0),
        *(Reading(step, None, float(f"2.{step}")) for step in (0, 10, 20)),
    ]
    reader = Reader(None)
    evaluated = [f"step {step}: train loss 3.0, val loss 4.0" for step in range(4)]
    lines = [evaluated[0], "saved step 0, loss 4.0", *evaluated[1:]]  # no line of training
    assert [reading.step for reading in map(reader.read, lines) if reading] == [0, 0, 2, 3]


def test_of_ranks_in_one_log_the_lowest_counts() -> None:
    """As in those of a program that calls `mp.spawn`, whose losses took turns."""
    reader = Reader(None)
    lines = [f"[rank{rank}]: step {step} loss {rank}.5" for step in (1, 2) for rank in (1, 0)]
    assert [*map(reader.read, lines)] == [Reading(1, None, 1.5), Reading(1, None, 0.5), None, Reading(2, None, 0.5)]


def test_a_bar_that_begins_anew_in_each_epoch_is_not_the_trainers() -> None:
    reader = Reader(None)
    lines = [
        "100%|██████████| 20/20 [00:02<00:00,  4.5it/s]",
        "{'loss': 2.3, 'epoch': 0}",
        "  0%|          | 0/20 [00:00<?, ?it/s]",
        "  5%|▌         | 1/20 [00:00<00:04,  4.5it/s]",
    ]
    assert [*map(reader.read, lines)] == [None] * 4


def test_a_loss_of_zero_is_one_as_in_reinforcement_learning() -> None:
    reader = Reader(None)
    lines = ["{'loss': '0', 'grad_norm': '0.1', 'epoch': '0.1'}", " 10%|█         | 10/100 [00:02<00:20,  4.5it/s]"]
    assert [r for line in lines if (r := reader.read(line))] == [Reading(10, 100, 0.0)]


def test_what_ms_swift_adds_to_the_trainers_lines_tells_the_step() -> None:
    reader = Reader(None)
    lines = [
        "{'loss': '2.3404', 'epoch': '0.1', 'global_step/max_steps': '10/100', 'percentage': '10.00%'}",
        "Train:  10%|█         | 10/100 [00:02<00:20,  4.5it/s]",
        " 20%|██        | 2/10 [00:02<00:20,  4.5it/s]",
        "{'eval_loss': 2.5, 'epoch': 0.1, 'global_step/max_steps': '15/100', 'percentage': '10.00%'}",
        "{'train_runtime': 9.9, 'train_loss': 2.2, 'epoch': 1.0, 'global_step/max_steps': '100/100'}",
    ]
    assert [r for line in lines if (r := reader.read(line))] == [Reading(10, 100, 2.3404), Reading(100, 100)]


@pytest.mark.parametrize(
    ("title", "epoch"),
    [
        ("Epoch 2/10", 2),
        ("Epoch [2/10]:", 2),
        ("----- epoch: 2 -----", 2),
        ("2026-01-01 10:00:00 - INFO - Starting epoch 2 of 10", 2),
        ("[train] Epoch 2", 2),
        ("Begin training epoch 2 ...", 2),
        ("Epoch 2/10 started", 2),
        ("Saved the snapshot at epoch 2", None),
        ("Epoch 2 took 5 s", None),
        ("best epoch 2", None),
        ("Epoch 1/1", None),
    ],
)
def test_a_title_tells_the_epoch_of_the_steps_below_it(title: str, epoch: int | None) -> None:
    reader = Reader(None)
    assert [reader.read(line) for line in (title, "", "step 5/100 loss 2.3")][-1] == Reading(5, 100, 2.3, epoch)


def test_a_bar_without_a_name_is_read_below_a_title() -> None:
    reader = Reader(None)
    lines = [
        "Epoch 2/10",
        "  0%|          | 0/100 [00:00<?, ?it/s]",
        " 50%|█████     | 50/100 [00:05<00:05, 9.80it/s, loss=2.3]",
        "Train: 60%|██████    | 60/100 [00:05<00:05, 9.80it/s, loss=2.2]",
        "Val: 50%|█████     | 90/100 [00:05<00:05, 9.80it/s, loss=2.5]",
        " 50%|█████     | 5/10 [00:05<00:05, 9.80it/s, val_loss=2.5]",
        "\x1b[1m70/100\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m1s\x1b[0m 12ms/step - accuracy: 0.5 - loss: 2.1",  # Keras
        " 80/100 [====>.....] - ETA: 1s - loss: 2.0 - accuracy: 0.5",  # its earlier versions
    ]
    said = [Reading(step, 100, loss, epoch=2) for step, loss in ((50, 2.3), (60, 2.2), (70, 2.1), (80, 2.0))]
    assert [r for line in lines if (r := reader.read(line))] == said


@pytest.mark.parametrize("name", ["", "Training: ", "loss: 2.3: ", "train loss 2.3: "])
def test_a_bar_without_an_epoch_counts_from_the_programs_start(name: str) -> None:
    reader, bar = Reader(None), name + " 50%|█████     | {} [00:05<00:05, 9.80it/s, loss={}]"
    epochs = [bar.format(f"{step}/100", 2.3) for step in (1, 90, 1, 100, 2)]
    evaluation = [bar.format(f"{step}/10", 2.3) for step in (1, 9, 1)]
    said = [r for line in (*epochs, *evaluation, epochs[1]) if (r := reader.read(line))]
    assert said == [
        Reading(step, 100, 2.3, epoch) for step, epoch in ((1, -1), (90, -1), (1, -2), (100, -2), (2, -3), (90, -3))
    ]


def test_a_step_and_its_loss_may_have_a_line_each() -> None:
    reader = Reader(None)
    lines = ["step: 5", "loss: 6.5", "LR: 0.1", "loss: 0.5", "step: 10", "step: 15 loss: 5.5", "loss: 9"]
    assert [r for line in lines if (r := reader.read(line))] == [Reading(5, None, 6.5), Reading(15, None, 5.5)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["[batch=10/48]:", "\t Train time/batch: 9", "\t Train loss/train/total: 9.87"], Reading(10, 48, 9.87)),
        (["INFO\t[step=10/48,epoch=1,eta=5d]", "    train/CE loss=9.87"], Reading(10, 48, 9.87, epoch=1)),
        (["[step=10/48]", "    optim/grad_norm=1.2", "    train/CrossEntropyLoss=9.87"], Reading(10, 48, 9.87)),
        (["[step=10/48]", "    eval/c4/CrossEntropyLoss=9.87"], None),
        (["INFO\t[step=10/48,epoch=1,eta=5d]", "Saving", "    train/CE loss=9.87"], None),
        (["[10:00:00] INFO     step 10/48 lr 0.1        train.py:3", " " * 20 + "loss 9.87"], Reading(10, 48, 9.87)),
        (["{", '  "step": 10,', '  "lr": 0.1,', '  "loss": 9.87', "}"][:4], Reading(10, None, 9.87)),
        (["step 10/48 lr 0.1", "Validation:", "    loss=9.87"], None),
        (["[step=10/48]", "  eval:", "    loss=9.87"], None),
        (["[step=10/48]", "    eval/accuracy=0.3", "    loss=9.87"], Reading(10, 48, 9.87)),
        (["Validation at step 10", "    loss=9.87"], None),
        (["Resumed from step 10", "    loss=9.87"], None),
        (["Total optimization steps = 10", "    initial loss=9.87"], None),
        (["step 10/48 lr 0.1", "loss=9.87"], None),
    ],
    ids=[
        *("Composer", "OLMo-core", "OLMo", "evaluation", "no heading"),
        *("Rich", "JSON", "evaluation below", "evaluation in it", "evaluation beside it", "evaluation of a step"),
        *("checkpoint", "total", "not indented"),
    ],
)
def test_what_is_indented_below_a_step_belongs_to_it(lines: list[str], said: Reading | None) -> None:
    reader = Reader(None)
    assert [reader.read(line) for line in lines][-1] == said


def test_lines_that_rich_breaks_and_indents_are_read() -> None:
    """It leaves out a time that is the same as in the line above."""
    reader = Reader(None)
    lines = [
        line
        for step in (1, 2)
        for line in (f"{'[10:00:00]' if step == 1 else ' ' * 10} INFO     step {step}/9", " " * 20 + f"loss {step}.5")
    ]
    assert [*map(reader.read, lines)] == [None, Reading(1, 9, 1.5), None, Reading(2, 9, 2.5)]
    lines = [  # fairseq2's, from step 100 on
        line
        for kind in ("Train", "Validation")
        for line in (
            f"           INFO     fairseq2 - {kind} Metrics (step 100) - NLL Loss:  ",
            "                    5.632 | Gradient Norm: 1.2 | Wall Time: 3.1s",
        )
    ]
    assert [*map(reader.read, lines)] == [None, Reading(100, None, 5.632), None, None]
    for _ in range(3):
        reader.read("  Loss:")
    assert reader._broken == "  Loss:", "else each line of such an output is longer than the one before"


def test_a_pattern_of_the_users_own() -> None:
    assert Reader(r"u(?P<step>\d+) of (?P<steps>\d+)").read("u7 of 9") == Reading(7, 9)
    assert Reader(r"update (\d+).*nll ([\d.]+)").read("update 12: nll 0.5 bits") == Reading(12, None, 0.5)
    assert Reader(r"(?P<step>\w+)").read("none") is None


@pytest.mark.parametrize(
    ("program", "line", "said"),
    [
        (
            "open_clip",
            "INFO | Train Epoch: 2 [  640/60000 (1%)] LR: 0.1 Contrastive_loss: 4.1 (4.2) Loss: 5.1 (5.2)",
            Reading(640, 60000, 5.1, epoch=2),
        ),
        ("open_clip", "Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.300000", Reading(640, 60000, 2.3, epoch=2)),
        (
            "YOLO",
            "\x1b[K        1/3         0G      1.2      2.3         12        640: 50% ━━━─── 2/4 1.2s/it 2.3s<2.4s",
            Reading(2, 4, epoch=1),
        ),
        (
            "YOLO",
            "        1/3      5.1G    0.04     0.06       100       640:  50%|█████     | 2/4 [00:02<00:02,  1.5it/s]",
            Reading(2, 4, epoch=1),
        ),
        ("a script", "Epoch 1/10, Loss: 2.3", Reading(1, 10, 2.3)),
        ("modded-nanogpt", "step:5/1750 train_time:120ms step_avg:24.00ms", Reading(5, 1750)),
    ],
)
def test_the_guides_patterns_fit_what_their_programs_print(program: str, line: str, said: Reading) -> None:
    guide = Path(__file__, "../../../docs/guides/torchrun.md").resolve().read_text()
    pattern = re.search(rf"^\| {program}.*\| `([^|]+)` \|", guide, re.MULTILINE)
    assert pattern and Reader(pattern[1]).read(line) == said


def test_lines_become_metrics_as_long_as_no_rank_reports_steps(tmp_path: Path) -> None:
    run, states = RunDir(tmp_path), [RankState(tmp_path, 0)]
    states[0].clear()
    log = run.rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 90 loss 9.0\n")  # of a round before
    output = OutputMetrics(None, run, 0, 0, states)
    output.begin_round(ALONE)
    with log.open("a") as f:
        f.write("x" * 3_000_000 + "\nstep 10 loss 3.0\nstep 20 loss 2.0\rstep 30 lo")
    for _ in range(5):
        output._look()
    with log.open("a") as f:
        f.write("ss 1.0\nstep 5 loss 7.0\n")
    output.close()
    lines = list(read_json_lines(run.metrics))
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 3.0), (20, 2.0), (30, 1.0)]
    assert all(line["step_s"] >= 0 for line in lines)
    output = OutputMetrics(None, run, 0, 0, states)
    output.begin_round(ALONE)
    states[0].report(1, 0, states[0].read().phase)  # type: ignore[arg-type]
    with log.open("a") as f:
        f.write("step 40 loss 1.0\n")
    output._look()
    states[0].clear()  # it has failed
    output.close()
    assert len(list(read_json_lines(run.metrics))) == 3


@pytest.mark.parametrize(
    ("form", "steps"),
    [
        ("Epoch {epoch} | Iter {step} | Train Loss {loss}", [0, 100, 200, 201, 301, 401, 402, 502, 602]),  # at least
        ("Epoch: [{epoch}][{step}/250]\tLoss {loss}", [0, 100, 200, 250, 350, 450, 500, 600, 700]),
        ("epoch {epoch} step {step}/250 loss {loss}", [0, 100, 200, 250, 350, 450, 500, 600, 700]),
        ("=== Epoch {epoch}/9 ===\nstep {step}/250 loss {loss}", [0, 100, 200, 250, 350, 450, 500, 600, 700]),
    ],
)
def test_steps_that_begin_anew_in_each_epoch_are_counted_over_all_also_after_a_restart(
    tmp_path: Path, form: str, steps: list[int]
) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    for round_, epochs in enumerate([(1, 2), (2, 3)]):  # the first one ends after its save of epoch 1
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            for epoch, step in itertools.product(epochs, (0, 100, 200)):
                f.write(form.format(epoch=epoch, step=step, loss=9 - round_ - epoch) + "\n")
        output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [*steps[:6], *steps[3:]]
    assert [line["loss"] for line in lines] == [8, 8, 8, 7, 7, 7, 6, 6, 6, 5, 5, 5]
    status = RunStatus(run)
    status.update()
    assert (status.step, status.steps, status.eta_s) == (steps[-1], None, None)  # how many epochs is not known


def test_steps_over_all_epochs_stay_as_they_are(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    for first in (0, 10):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines(f"epoch {step // 8} step {step}/20 loss 1.0\n" for step in range(first, 20, 5))
        output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [0, 5, 10, 15, 10, 15]
    assert [line.get("steps") for line in lines] == [None, None, 20, 20, 20, 20]  # known at the second epoch


def begun(run: RunDir) -> tuple[Path, OutputMetrics]:
    """The log of a job's only rank, and what reads it in the first round."""
    log, output = run.rank_log(0, 0, 0), OutputMetrics(None, run, 0, 0, [])
    log.parent.mkdir(parents=True)
    output.begin_round(ALONE)
    return log, output


def test_what_a_program_prints_last_is_read_however_much_it_is_and_without_an_end_of_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log, output = begun(run)
    log.write_text("step 1 loss 3.0\n" + "x" * 5_000_000 + "\nstep 2 loss 2.0\rstep 3 loss 1.0")
    output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3]


def test_an_agent_ends_while_the_storage_of_metrics_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_PATIENCE_S", 0.1)
    run = RunDir(tmp_path)
    log, output = begun(run)
    with run.metrics.open("a") as held:
        lock(held.fileno())  # the thread's writes wait for it
        log.write_text("step 1 loss 3.0\n")
        output.settle()
        output.close()
        assert not run.metrics.read_text()
    assert wait_until(lambda: bool(run.metrics.read_text()), 60)


def test_a_loss_of_one_rank_is_not_recorded_with_a_step_of_another(tmp_path: Path) -> None:
    run, state = RunDir(tmp_path), RankState(tmp_path, 0)
    state.clear()
    first, last = run.rank_log(0, 0, 0), run.rank_log(0, 1, 1)
    for log in (first, last):
        log.parent.mkdir(parents=True)
    output = OutputMetrics(None, run, 0, 0, [state])
    output.begin_round(Round(0, 1, size=2, shard_group=2, rank=0, layout="", last=1, partner=None))
    last.write_text("{'loss': 9.0}\n")
    output._look()
    first.write_text("50%|#####     | 5/10 [\n")
    output.close()
    assert not run.metrics.exists()


def test_steps_that_the_last_rank_prints_are_read_from_its_node_as_long_as_rank_0_prints_none(tmp_path: Path) -> None:
    run, states = RunDir(tmp_path), [RankState(tmp_path, local_rank) for local_rank in (0, 1)]
    for state in states:
        state.clear()
    first, last = run.rank_log(0, 3, 0), run.rank_log(0, 7, 3)
    for log in (first, last):
        log.parent.mkdir(parents=True)
    last.write_text(MEGATRON + "\n")  # of a round before
    output = OutputMetrics(None, run, 0, 3, states)
    output.begin_round(Round(1, 2, size=2, shard_group=4, rank=0, layout="", last=7, partner=None))
    first.write_text("> building the dataset\n")
    with last.open("a") as f:
        f.write(MEGATRON.replace(" 30/", " 40/") + "\n")
    output._look()
    first.write_text("step 50 loss 1.0\n")  # of something else
    with last.open("a") as f:
        f.write(MEGATRON.replace(" 30/", " 50/") + "\n")
    output.close()
    assert [(line["step"], line["loss"]) for line in read_json_lines(run.metrics)] == [(40, 10.94782), (50, 10.94782)]


def test_a_resume_within_an_epoch_counts_from_that_epochs_beginning(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    rounds = [[(0, 0), (0, 200), (1, 0), (1, 220)], [(1, 210), (1, 240), (2, 230)], [(1, 220), (2, 240)]]
    for prints in rounds:  # the last goes back to an epoch before
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines(f"epoch {epoch} step {step}/250 loss 1.0\n" for epoch, step in prints)
        output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [0, 200, 250, 470, 460, 490, 730, 470, 740]


@pytest.mark.parametrize(
    ("epochs", "after"), [(1, [(31, 50), (32, 50), (51, 100)]), (2, [(51, 100)])], ids=["first", "unknown"]
)
def test_lightnings_bar_after_a_resume_is_read_if_its_epoch_is_certain(
    tmp_path: Path, epochs: int, after: list[tuple[int, int]]
) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    bar = LIGHTNING.partition("|")[2].replace("50/100", "{}/{}")
    killed = [f"Epoch {epoch}: 2%|" + bar.format(step, 50) for epoch in range(epochs) for step in (1, 40)]
    resumed = ["Training: |" + bar.format(step, "?") for step in (0, 31, 32)]
    for bars in (killed, [*resumed, "Epoch 1: 2%|" + bar.format(1, 50)]):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.write("\r".join(bars))
        output.close()
    lines = list(read_json_lines(run.metrics))[len(killed) :]
    assert [(line["step"], line["epoch_end"]) for line in lines] == after
    assert lines[0]["resumed"] == after[0][0] - 1


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 10, "val": {"loss": 2.5}}',
        '{"eval": true, "step": 10, "loss": 2.5}',
        '{"type": "eval", "step": 10, "loss": 2.5}',
        "step=10, eval=True, loss=2.5",
        "*** Eval *** step 10 loss 2.5",
        "--- Validation @ step 10: loss 2.5",
        "Step 10 | validation set | loss 2.5",
        "Step 10 on eval split: loss 2.5",
        "step 10 | val avg loss: 2.5",
        "step 100 | val | loss 2.5",
        "[step 100] val: loss=2.5 acc=0.5",
        "Step 100 Eval: loss 2.3",
        "2025-01-01 10:00:00,123 INFO Validation: step 10 loss 2.3",
        "2025-01-01 10:00:00,123 - INFO - step 10 - validation - loss 2.3",
        "Epoch 3 | val | step 10/100 | loss 2.5",
        "Testing: step 5 loss 2.3",
        "step=5 loss=2.3 split=eval",
        '{"step": 5, "loss": 2.3, "split": "val"}',
        "{'epoch': 1, 'step': 5, 'mode': 'eval', 'loss': 2.3}",
        "step 10 val-loss=2.4",
        "step 10 loss/val 2.4",
        "step 10 dev loss 2.4",
        "step 10 best loss 2.4",
        "2024-01-01 10:00:00,000 DEBUG CV | steps/sec 3.2| Batch 2/100 loss 5.1 loss_att 5.1 acc 0.2",  # WeNet
        "2021-01-01 10:00:00,000 DEBUG CV Batch 2/100 loss 5.1 loss_att 5.1 history loss 5.2 rank 0",
        "CV | Epoch 0 | Step 100 loss 5.1",
        "step 100 held-out loss 2.5",
        "step 100 | heldout loss: 2.5",
        "Held-out | step 100 | loss 2.5",
        "Inference step 5 loss 2.5",
        "step 100 [test] loss 2.5",
        "step 100 | test | loss 2.5",
        "[Test] Epoch 1/3 | Batch 20/100 | running loss=2.5",
        "[TEST] epoch: 1, step: 10, loss: 2.5",
        "Test: step 100, loss: 2.5",
    ],
)
def test_an_evaluation_is_told_wherever_the_line_says_so(line: str) -> None:
    assert Reader(None).read(line) is None


@pytest.mark.parametrize("begin", ["", "epoch 1", "epoch 1 loss ", "train loss/", "loss_step "])
def test_long_lines_are_parsed_at_once(begin: str) -> None:
    """The agent's other threads wait meanwhile, its heartbeats too."""
    for fill in (
        " ",
        "*",
        "|",
        "/",
        ".",
        "1",
        "] ",
        "step_",
        "val ",
        "loaded = ",
        "step ",
        "loss 1 ",
        "epoch 1 batch ",
    ):
        for end in (" val step 1 loss 2 type", "x"):
            began = time.thread_time()
            Reader(None).read((begin + fill * 4096)[:4000] + end)
            assert time.thread_time() - began < 0.4, fill


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("step 5 | kl loss 0.1 | policy loss 0.2 | loss 2.3", Reading(5, None, 2.3)),
        ("step 5 | CTC Loss: 5.1", Reading(5, None, 5.1)),
        ("step 5 | actor loss 0.1 | critic loss 0.2", Reading(5)),
        ("[Epoch 0/9] [Batch 5/100] [D loss: 0.69] [G loss: 0.71]", Reading(5, 100, epoch=0)),
        ('{"step": 5, "loss/policy": 0.1, "loss/value": 0.2, "loss/total": 2.3}', Reading(5, None, 2.3)),
        ("max steps 1000 | step 5 | loss 2.3", Reading(5, None, 2.3)),
        ("step 10 Loss/test: 2.4 Loss/train: 2.3", Reading(10, None, 2.3)),
        ('{"step": 5, "loss": 2.3, "split": "train", "val": null}', Reading(5, None, 2.3)),
        ("step 5 | val: n/a | loss 2.3", Reading(5, None, 2.3)),
        ("epoch 0.05 | step 10/100 | loss 2.3", Reading(10, 100, 2.3)),
        ("Epoch: 0 | Batch: 100 | Loss: 2.3", Reading(100, None, 2.3, epoch=0)),
        ("Epoch: 1, Batch: 32, Step: 100, Loss: 2.3", Reading(100, None, 2.3, epoch=1)),
        ("Epoch 1, batch size 32, loss: 2.3", None),
        ("[test] step 5 loss 2.3", Reading(5, None, 2.3)),  # the name of a run
        ("CV | fold 3 | step 5 | loss 2.3", Reading(5, None, 2.3)),
        ("step 5 | test: 0.91 | loss 2.3", Reading(5, None, 2.3)),
        ("DEBUG TRAIN Epoch: 1 | Batch 5/100 | loss 2.3", Reading(5, 100, 2.3, epoch=1)),
        ("Test run: step 5 | rollout loss 0.1 | loss 2.3", Reading(5, None, 2.3)),
        ("Epoch [1/10]: [5/100]   5%|▌    , loss=2.3 [00:01<00:20]", Reading(5, 100, 2.3, epoch=1)),  # ignite
        ("Epoch 1 train:  50%|█████     | 5/10 [00:01<00:00, loss=2.3]", Reading(5, 10, 2.3, epoch=1)),
        ("Train: 100%|██████████| 10/10 [00:01<00:00, loss=2.3]", Reading(10, 10, 2.3, epoch=-1)),  # not epoch 100
    ],
)
def test_of_several_losses_and_steps_the_plain_one_is_read(line: str, said: Reading | None) -> None:
    assert Reader(None).read(line) == said


def test_a_restart_from_an_epochs_beginning_repeats_nothing_of_the_epoch_before(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    for epochs in ((1, 2), (2,)):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines(f"Epoch: [{epoch}][{step}/250] Loss 1.0\n" for epoch in epochs for step in (0, 100, 200))
        output.close()
    assert [line["resumed"] for line in read_json_lines(run.metrics) if "resumed" in line] == [0, 249]


def test_a_bar_that_begins_at_0_after_a_resume_repeats_no_steps(tmp_path: Path) -> None:
    """As Composer's, which shows 0/50 with the loss of its checkpoint, and then 20/50."""
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    for steps in ((0, 1, 20, 21), (0, 20, 21)):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines(f"train  Epoch   1:   4%|▌   | {step:4}/50 [00:00, loss/train=2.3]\r" for step in steps)
        output.close()
    assert [line["resumed"] for line in read_json_lines(run.metrics) if "resumed" in line] == [0, 19]


@pytest.mark.parametrize(
    ("epochs", "after"), [(1, [31, 32, 51, 82]), (2, [])], ids=["in the first epoch", "in one that is unknown"]
)
def test_a_bar_of_no_epoch_is_read_after_a_resume_if_only_one_was_recorded(
    tmp_path: Path, epochs: int, after: list[int]
) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    bar = "  2%|▌         | {}/50 [00:00<00:05, 9.80it/s, loss=2.3]"
    killed = [step for _ in range(epochs) for step in (1, 40)]
    for steps in (killed, [31, 32, 1, 32]):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines("\r" + bar.format(step) for step in steps)
        output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [1, 40, 51, 90][: 2 * epochs] + after


@pytest.mark.parametrize("name", ["Steps: ", "", "Epoch 2: "])
def test_a_bar_of_the_rest_counts_from_where_the_program_resumed(tmp_path: Path, name: str) -> None:
    """As `tqdm(range(20, 50))`, whose steps seemed to be lost."""
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    bar = name + " 10%|█         | {}/{} [00:10<01:30,  4.91it/s, loss=2.3]"
    for ranks, bars in (
        (2, [(1, 50), (39, 50), (40, 50)]),
        (2, [(1, 30), (29, 30), (30, 30)]),
        (4, []),
        (4, [(1, 25), (2, 25)]),
    ):
        events.record(run, 0, events.RoundStarted([0], ["a"], "full_shard", 1, world_size=ranks))
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines("\r" + bar.format(step, last) for step, last in bars)
        output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [1, 39, 40, 21, 49, 50, 1, 2]  # an epoch of four ranks is shorter
    assert [line.get("steps", line.get("epoch_end")) for line in lines] == [*[50] * 6, 25, 25]
    assert [line["resumed"] for line in lines if "resumed" in line] == [0, 20, 0]


def test_a_bar_without_an_end_leaves_no_steps_out(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    for steps in ((1, 39, 40), (1, 2)):  # from the epoch's beginning
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines(f"\rEpoch 1: {step}it [00:10,  4.91it/s, loss=2.3]" for step in steps)
        output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 39, 40, 1, 2]


def test_a_bar_that_passes_steps_over_repeats_none_of_them(tmp_path: Path) -> None:
    """As those of diffusers, which have a loss once the program trains."""
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    bar = "Epoch 1:  10%|█         | {}/50 [00:10<01:30,  4.91it/s{}]"
    for passed, trained in (((1,), (1, 39, 40)), ((5, 30), (31, 32))):
        output = OutputMetrics(None, run, 0, 0, [])
        output.begin_round(ALONE)
        with log.open("a") as f:
            f.writelines("\r" + bar.format(step, "") for step in passed)
            f.writelines("\r" + bar.format(step, ", loss=2.3") for step in trained)
        output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [1, 39, 40, 31, 32]
    assert [line["resumed"] for line in lines if "resumed" in line] == [0, 30]


def test_an_epochs_length_is_no_total_of_steps_over_all_epochs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log, output = begun(run)
    with log.open("a") as f:  # as Ignite's examples print
        f.writelines(f"Epoch[{1 + (i - 1) // 100}] Iteration[{i}/100] Loss: 2.30\n" for i in range(50, 301, 50))
    output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines] == [50, 100, 150, 200, 250, 300]
    assert all(line.get("steps") is None for line in lines)


def test_a_fine_tuning_counts_its_own_steps_not_those_of_the_checkpoint_it_begins_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log, output = begun(run)
    log.write_text("loaded checkpoint: step=50000  train_loss=2.1\nstep 1 loss 1.9\nstep 2 loss 1.8\n")
    output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2]


def test_an_evaluation_that_looks_like_training_changes_no_count_of_epochs(tmp_path: Path) -> None:
    """As Keras's `evaluate` between two of its `fit`."""
    run = RunDir(tmp_path)
    log, output = begun(run)
    for epoch, steps in enumerate([("50/100", "100/100", "1/2"), ("9/100", "60/100", "2/2"), ("3/100",)], 1):
        with log.open("a") as f:
            f.writelines([f"Epoch {epoch}/3\n", *(f" {step} [====>...] - loss: 2.3\n" for step in steps)])
    output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [50, 100, 109, 160, 203]


def test_the_first_steps_after_a_silence_take_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(output_module, "_EVERY_S", 3600)
    monkeypatch.setattr(output_module, "job_time", lambda: now)
    run = RunDir(tmp_path)
    log, output = begun(run)
    log.write_text("downloading\n")
    output._look()
    now = 1099.5
    output._look()
    log.write_text("downloading\n" + "".join(f"step {step} loss 1.0\n" for step in range(1, 6)))
    now = 1100.0
    output._look()
    output.close()
    lines = list(read_json_lines(run.metrics))
    assert [line["time"] for line in lines] == pytest.approx([1099.6, 1099.7, 1099.8, 1099.9, 1100], abs=0.09)
    assert lines[-1]["useful_s"] == pytest.approx(0.4, abs=0.01)


def test_a_loss_of_any_size_is_recorded_and_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    losses = {"2.5e-08": "2.5000e-08", "0.693147": "0.69315", "2.5": "2.5000", "1234567.5": "1.2346e+06", "nan": "nan"}
    log, output = begun(run)
    log.write_text("".join(f"step {i} loss {loss}\n" for i, loss in enumerate(losses)))
    output.close()
    assert [str(line["loss"]) for line in read_json_lines(run.metrics)] == [*map(str, map(float, losses))]
    assert [RunSummary("", "", "", loss=float(loss)).cells()["loss"] for loss in losses] == [*losses.values()]


def test_much_output_is_read_as_fast_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_EVERY_S", 1.0)
    run = RunDir(tmp_path)
    log, output = begun(run)
    log.write_text(("x" * 120 + "\n") * 100_000 + "step 1 loss 3.0\n")
    is_read = wait_until(run.metrics.exists, 6)
    output.close()
    assert is_read
