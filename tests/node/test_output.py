"""Steps and losses from what programs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_jobs.node.output import OutputMetrics, Reader, Reading
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.rank_state import RankState
from fsdp_jobs.run.tail import read_json_lines

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
LIGHTNING = "Epoch 1:  50%|█████     | 50/100 [00:05<00:05, 9.80it/s, v_num=0, train_loss=2.310, val_loss=4.0]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (TORCHTITAN, Reading(10, None, 8.1234)),
        (LINGUA, Reading(20, None, 9.87)),
        (MEGATRON, Reading(30, 500, 10.94782)),
        (LIGHTNING, Reading(150, None, 2.31)),
        (DIFFUSERS, Reading(50, 500, 0.12)),
        (LITGPT, Reading(110, None, 2.34)),
        (DETECTRON, Reading(19, None, 1.5)),
        ("Training steps:  10%|█         | 50/500 [00:10<01:30,  4.91it/s, loss=0.12]", Reading(50, 500, 0.12)),
        ("step 10, loss 2.3", Reading(10, None, 2.3)),
        ("Step 10. Loss 2.3.", Reading(10, None, 2.3)),
        ("10% of steps 10% loss 2.3", None),
        ("step 0.52s, loss 2.3", None),
        ("step 300ms loss 2.3", None),
        ("Validation steps:  10%|█         | 5/50 [00:10<01:30,  4.91it/s, loss=0.12]", None),
        ("Epoch 0:  10%|█         | 10/100 [00:01<00:09, 9.80it/s, v_num=0]", Reading(10)),
        ("iter 40: loss 3.2100, time 123.45ms, mfu 12.34%", Reading(40, None, 3.21)),  # nanoGPT
        ("step 250: train loss 2.1000, val loss 2.5000", Reading(250, None, 2.1)),  # its evaluation
        ("step 00019/05000 | loss 10.98 | lr 3.0e-04", Reading(19, 5000, 10.98)),  # llm.c and its like
        ("{'step': 3, 'loss': 1.5}", Reading(3, None, 1.5)),
        ("step=1,000 loss=1e-3", Reading(1000, None, 0.001)),
        ("step 2 loss 1,234.5", Reading(2, None, 1234.5)),
        ("Saving checkpoint at step 100", None),
        (f"step {'9' * 400} loss 1", None),
        (f" 5%|▌| {'9' * 5000}/{'9' * 5000} [00:01<00:00]", None),
        ("step 3 loss tensor(2.3450, grad_fn=<MeanBackward0>)", Reading(3, None, 2.345)),  # of print(..., loss)
        ("step 100 val loss 2.5", None),
        ("Validation step 500/800: loss 2.9", None),
        ("training for 1000 steps with loss scale 128", None),
        ("Map: 100%|██████████| 1000/20000 [00:01<00:00, 9000 examples/s]", None),
        ("  5%|▌         | 5/100 [00:01<00:19,  5.0it/s]", None),  # a bar of no one knows what
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
        "{'train_runtime': 9.9, 'train_loss': 2.2, 'epoch': 1.0}",
    ]
    assert [r for line in lines if (r := reader.read(line))] == [Reading(10, 100, 2.3404)]


def test_a_pattern_of_the_users_own() -> None:
    assert Reader(r"u(?P<step>\d+) of (?P<steps>\d+)").read("u7 of 9") == Reading(7, 9)
    assert Reader(r"update (\d+).*nll ([\d.]+)").read("update 12: nll 0.5 bits") == Reading(12, None, 0.5)
    assert Reader(r"(?P<step>\w+)").read("none") is None


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


def test_what_a_program_prints_last_is_read_however_much_it_is_and_without_an_end_of_line(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), RunDir(tmp_path).rank_log(0, 0, 0)
    log.parent.mkdir(parents=True)
    output = OutputMetrics(None, run, 0, 0, [])
    output.begin_round(ALONE)
    log.write_text("step 1 loss 3.0\n" + "x" * 5_000_000 + "\nstep 2 loss 2.0\rstep 3 loss 1.0")
    output.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3]


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
