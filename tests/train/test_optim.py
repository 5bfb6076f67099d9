"""The learning rate's shape."""

from hypothesis import given
from hypothesis import strategies as st

from fsdp_jobs.config.schema import OptimConfig
from fsdp_jobs.train.optim import learning_rate


@given(warmup=st.integers(0, 50), steps=st.integers(60, 500))
def test_up_then_down_within_bounds(warmup: int, steps: int) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=warmup, min_lr_ratio=0.1)
    rates = [learning_rate(s, config, steps) for s in range(steps + 10)]
    assert all(0 < r <= 1.0 for r in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert abs(rates[steps] - 0.1) < 1e-9 and rates[-1] == rates[steps]


def test_constant_stays() -> None:
    config = OptimConfig(lr=0.5, warmup_steps=2, schedule="constant")
    assert [learning_rate(s, config, 100) for s in (0, 1, 2, 99)] == [0.25, 0.5, 0.5, 0.5]
