import pytest

from feddip_core.schedules import lambda_at, learning_rate_at, reconfiguration_time, sparsity_at


@pytest.mark.parametrize(
    ("t", "s"),
    [(0, 0.5), (1, 0.5011988004), (5, 0.50597005), (250, 0.73125), (500, 0.85), (995, 0.89999995), (999, 0.8999999996)],
)
def test_sparsity_grows_from_a_half_to_nine_tenths(t, s):
    assert sparsity_at(t, T=1000, s_0=0.5, s_p=0.9) == pytest.approx(s, abs=1e-12)


def test_sparsity_ends_at_its_target_exactly():
    assert sparsity_at(1000, T=1000, s_0=0.5, s_p=0.9) == 0.9
    assert sparsity_at(7, T=7, s_0=0.05, s_p=0.8) == 0.8


def test_sparsity_of_resnet_and_the_mean_of_a_run():
    assert sparsity_at(250, T=1000, s_0=0.05, s_p=0.8) == pytest.approx(0.48359375, abs=1e-12)
    assert sparsity_at(500, T=1000, s_0=0.05, s_p=0.8) == pytest.approx(0.70625, abs=1e-12)
    assert sum(sparsity_at(t, T=1000, s_0=0.5, s_p=0.9) for t in range(1000)) / 1000 == pytest.approx(
        0.7997999, abs=1e-9
    )


@pytest.mark.parametrize(
    ("t", "lam"),
    [(0, 0), (99, 0), (100, 1e-4), (199, 1e-4), (200, 2e-4), (499, 4e-4), (500, 5e-4), (899, 8e-4), (900, 9e-4),
     (999, 9e-4), (1000, 9e-4)],
)  # fmt: skip
def test_lambda_grows_in_ten_steps(t, lam):
    assert lambda_at(t, T=1000, lambda_max=1e-3, Q=10) == pytest.approx(lam, rel=1e-12)


def test_lambda_steps_begin_on_time_where_floating_point_would_be_late():
    # 0.57 · 100 is 56.99999999999999 in floating point, one step short of the 57th.
    assert lambda_at(57, T=100, lambda_max=100, Q=100) == 57


def test_learning_rate_decays_by_the_round():
    assert learning_rate_at(0, eta_0=0.1, decay=0.998) == 0.1
    assert learning_rate_at(2, eta_0=0.1, decay=0.998) == pytest.approx(0.0996004, rel=1e-9)


def test_reconfiguration_times():
    assert [reconfiguration_time(t, R=5) for t in range(10)] == [None] * 4 + [5] + [None] * 4 + [10]
    assert reconfiguration_time(999, R=5) == 1000
