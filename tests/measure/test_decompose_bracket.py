"""The bracket of the mismatch share and the damage, on tokens whose parts are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.measure.token_draws import SETS, STEPS, Setting, Tokens, cells, draw, histogram, strata, subsets
from verl_audit.measure.decompose.bracket import Bracket, Growth, growth, mismatch_bracket
from verl_audit.measure.decompose.damage import Damage, Mode, damage
from verl_audit.measure.decompose.tables import Refused
from verl_audit.measure.decompose.tails import Tails, tails

WIDE = (0, 1, 2, 4, 8, 16)
THREE = ("behave_logp", "prox_logp", "theta_logp")
TWO = ("behave_logp", "theta_logp")
RUNS: Mapping[str, Setting] = {
    "dense mismatch": Setting(mismatch=0.3),
    "dense mismatch, little staleness": Setting(mismatch=0.4, drift=0.08),
    "MoE mismatch": Setting(mismatch=1.5, flips=0.03, trajectories=2000),
    "staleness": Setting(drift=0.15, lags=WIDE, trajectories=3000),
    "staleness, straight on": Setting(drift=0.05, growth=1.0, lags=WIDE),
    "both": Setting(mismatch=0.3, drift=0.2),
    "both, straight on": Setting(mismatch=0.3, drift=0.12, growth=1.0),
    "both, correlated": Setting(mismatch=0.3, drift=0.2, correlation=-0.3),
    "both, four updates a version": Setting(mismatch=0.3, drift=0.1, k=4),
    "both, never at lag 0": Setting(mismatch=0.3, drift=0.2, lags=(2, 3, 4, 5, 6)),
    "both, MoE": Setting(mismatch=1.5, flips=0.03, drift=0.15, trajectories=2000),
}
WORDS = {
    "dense mismatch": ("mismatch dominates",),
    "dense mismatch, little staleness": ("mismatch dominates",),
    "MoE mismatch": ("mismatch dominates", "mixed"),
    "staleness": ("staleness dominates",),
    "staleness, straight on": ("staleness dominates",),
}


def bracket(tokens: Tokens, **changed: Any) -> Bracket | Refused:
    options: dict[str, Any] = {
        "later": "prox_logp",
        "trajectories": len(tokens.lag) // 24,
        "updates_per_version": tokens.updates_per_version,
    }
    return mismatch_bracket(strata(tokens), **options | changed)


def sure(found: Bracket | Refused) -> Bracket:
    assert isinstance(found, Bracket), found
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_share_lies_in_the_bracket(name: str) -> None:
    for seed in range(3):
        tokens = draw(replace(RUNS[name], seed=seed))
        found = sure(bracket(tokens))
        assert found.low <= min(tokens.second_share(), 1.0) <= found.high
        assert found.verdict in WORDS.get(name, ("mixed",))
        assert found.second.value == pytest.approx(np.mean(tokens.total(["S", "M"]) ** 2))


def test_bounds_are_no_narrower_than_the_model_error() -> None:
    found = sure(bracket(draw(RUNS["both"])))
    assert found.low <= found.fit_low - 0.15
    assert found.high >= found.fit_high + 0.15
    assert found.sampling_low <= found.fit_low <= found.value <= found.fit_high <= found.sampling_high
    assert found.random_walk <= found.fit_high <= found.ballistic


def test_powers_that_the_data_reject_are_left_out() -> None:
    walk, straight = (
        sure(bracket(draw(replace(RUNS[n], trajectories=4000)))) for n in ("staleness", "both, straight on")
    )
    assert 1.0 in walk.exponents and 2.0 not in walk.exponents
    assert 2.0 in straight.exponents and 1.0 not in straight.exponents
    slow = sure(bracket(draw(Setting(drift=0.3, growth=0.25, lags=WIDE, trajectories=4000))))
    assert 0.5 in slow.exponents


def test_lag_0_is_shown_beside() -> None:
    tokens = draw(RUNS["both"])
    found = sure(bracket(tokens))
    assert found.lag0 is not None
    zero = tokens.lag == 0
    assert found.lag0.tokens == zero.sum()
    assert found.lag0.mean_abs.value == pytest.approx(np.abs(tokens.parts["M"][zero]).mean())
    assert found.lag0.share.low < tokens.second_share() < found.lag0.share.high
    assert sure(bracket(draw(RUNS["both, never at lag 0"]))).lag0 is None


def test_nothing_stale_is_mismatch_exactly() -> None:
    found = sure(bracket(draw(Setting(mismatch=0.3, lags=(0,))), trajectories=4))
    assert (found.low, found.high, found.verdict) == (1, 1, "mismatch dominates")


@pytest.mark.parametrize(
    ("setting", "changed", "word"),
    [
        (Setting(mismatch=0.3, lags=(1, 2)), {}, "2 staleness values"),
        (Setting(mismatch=0.3, lags=(2,)), {}, "1 staleness values"),
        (Setting(mismatch=0.3, drift=0.1), {"trajectories": 127}, "127 trajectories, 128 needed"),
        (Setting(mismatch=0.3, drift=0.1), {"heavy_tailed": True}, "1000 needed with heavy tails"),
        (Setting(mismatch=0.3, drift=0.1, k=4), {"later": "theta_logp"}, "no baseline"),
        (Setting(mismatch=0.3), {"later": "theta_logp", "updates_per_version": None}, "not known"),
        (Setting(), {}, "equal"),
        (Setting(mismatch=0.3, drift=0.1, trajectories=16), {}, "clusters"),
    ],
)
def test_refused_with_the_reason(setting: Setting, changed: dict[str, Any], word: str) -> None:
    found = bracket(draw(setting), **changed)
    assert isinstance(found, Refused) and word in found.reason


def test_tokens_of_unknown_lag_do_not_count() -> None:
    tokens = draw(RUNS["both"])
    table = strata(tokens)
    none = mismatch_bracket(
        dict(table, lag=0 * table["lag"] - 1), later="prox_logp", trajectories=512, updates_per_version=1
    )
    assert isinstance(none, Refused) and "version" in none.reason
    extra = {name: np.append(values, values[:40]) for name, values in table.items()}
    extra["lag"][-40:] = -1
    options: dict[str, Any] = {"later": "prox_logp", "trajectories": 512, "updates_per_version": 1}
    assert mismatch_bracket(extra, **options) == mismatch_bracket(table, **options)


def test_between_versions_only_the_unit_depends_on_updates_per_version() -> None:
    tokens = draw(RUNS["both, four updates a version"])
    four, unknown = (sure(bracket(tokens, updates_per_version=k)) for k in (4, None))
    assert four.low == pytest.approx(unknown.low) and four.high == pytest.approx(unknown.high)


def test_over_the_cycle_a_baseline_takes_the_drift_away() -> None:
    setting = Setting(drift=0.1, k=4, lags=WIDE, trajectories=4000)
    calm = draw(replace(setting, lags=(0,), seed=9))
    base = growth(strata(calm, STEPS), later="theta_logp", updates_per_version=4)
    assert isinstance(base, Growth)
    for mismatch, words in ((0.0, "staleness dominates"), (1.2, "mismatch dominates")):
        tokens = draw(replace(setting, mismatch=mismatch))
        found = mismatch_bracket(
            strata(tokens, STEPS),
            later="theta_logp",
            trajectories=4000,
            updates_per_version=4,
            baseline_intercept=max(base.intercept.value, 0.0),
        )
        assert sure(found).verdict == words


def test_a_larger_baseline_leaves_less_mismatch() -> None:
    tokens = draw(RUNS["both"])
    some, more = (sure(bracket(tokens, baseline_intercept=x)) for x in (0.0, 0.005))
    second = np.mean(tokens.total(["S", "M"]) ** 2)
    assert some.random_walk - more.random_walk == pytest.approx(0.005 / second)


def _growth(setting: Setting) -> Growth:
    found = growth(strata(draw(setting)), later="prox_logp", updates_per_version=1)
    assert isinstance(found, Growth)
    return found


def test_growth_shows_what_is_at_work() -> None:
    expected = {"dense mismatch": (1, 0), "staleness": (0, 1), "both": (1, 1)}
    for name, (mismatch, stale) in expected.items():
        found = [_growth(replace(RUNS[name], trajectories=512, seed=seed)) for seed in range(10)]
        assert np.mean([g.intercept.low > 0 for g in found]) == pytest.approx(mismatch, abs=0.1)
        assert np.mean([g.intercept_slow.low > 0 for g in found]) == pytest.approx(mismatch, abs=0.1)
        assert np.mean([g.slope.low > 0 for g in found]) == pytest.approx(stale, abs=0.1)


def test_growth_that_slows_down_says_so() -> None:
    assert _growth(Setting(drift=0.3, growth=0.25, lags=WIDE, trajectories=4000)).bends_down
    assert not _growth(RUNS["staleness"]).bends_down
    one = draw(Setting(mismatch=0.3, lags=(2,)))
    assert isinstance(growth(strata(one), later="prox_logp", updates_per_version=1), Refused)


def test_twice_the_same() -> None:
    tokens = draw(RUNS["both"])
    assert bracket(tokens) == bracket(tokens)


# -- damage --------------------------------------------------------------------------------------------------


def hurt(tokens: Tokens, mode: Mode, recorded: tuple[str, ...] = SETS, **options: Any) -> Damage:
    found = damage(subsets(tokens, recorded), mode=mode, **options)
    assert isinstance(found, Damage), found
    return found


def known(found: Damage) -> tuple[float, float]:
    assert found.mismatch is not None and found.staleness is not None
    return found.mismatch.value, found.staleness.value


def test_bypass_loses_what_is_clipped_decoupled_what_the_weights_waste() -> None:
    tokens = draw(Setting(mismatch=0.2, drift=0.1, k=4, trajectories=1000))
    d = tokens.total()
    clip = np.mean(((d > math.log(1.28)) & (tokens.advantage > 0)) | ((d < math.log(0.8)) & (tokens.advantage < 0)))
    bypass = hurt(tokens, "bypass")
    assert (bypass.gauge, bypass.basis) == ("clip", "exact")
    assert bypass.loss.value == pytest.approx(clip)
    assert bypass.update is not None
    assert sum(known(bypass)) + bypass.update.value == pytest.approx(clip)
    w = np.exp(tokens.total(["S", "M"]))
    decoupled = hurt(tokens, "decoupled")
    assert (decoupled.gauge, decoupled.update) == ("ess", None)
    assert decoupled.loss.value == pytest.approx((1 - w.mean() ** 2 / (w**2).mean()) / 2)
    assert sum(known(decoupled)) == pytest.approx(decoupled.loss.value)


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_what_is_not_there_does_no_damage(mode: Mode) -> None:
    mismatch, staleness = known(hurt(draw(Setting(drift=0.3)), mode))
    assert mismatch == pytest.approx(0, abs=1e-9) and staleness > 0.01
    mismatch, staleness = known(hurt(draw(Setting(mismatch=0.5)), mode))
    assert staleness == pytest.approx(0, abs=1e-9) and mismatch > 0.01


def test_a_baseline_takes_off_what_is_nobodys() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2))
    plain, less = hurt(tokens, "bypass"), hurt(tokens, "bypass", baseline_clip=0.02, baseline_loss=0.02)
    assert sum(known(less)) == pytest.approx(plain.loss.value - 0.02)
    assert known(less)[0] / known(less)[1] == pytest.approx(known(plain)[0] / known(plain)[1])
    nothing = hurt(tokens, "bypass", baseline_clip=0.9, baseline_loss=0.9)
    assert known(nothing) == (0, 0)


@pytest.mark.parametrize("name", ["both", "dense mismatch", "staleness"])
@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_three_sets_bound_what_four_sets_say(name: str, mode: Mode) -> None:
    tokens = draw(RUNS[name])
    exact = known(hurt(tokens, mode))
    tail = tails(cells(tokens), histogram(tokens))
    assert isinstance(tail, Tails)
    found = hurt(tokens, mode, THREE, bracket=bracket(tokens), tails=tail)
    assert found.basis == "bracket"
    for truth, bounds in zip(exact, (found.mismatch, found.staleness), strict=True):
        assert bounds is not None
        assert bounds.low - 1e-12 <= truth <= bounds.high + 1e-12
    assert sum(known(found)) == pytest.approx(sum(exact))


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_heavy_tails_widen_what_is_carried_over_to_clip_and_weights(mode: Mode) -> None:
    tokens = draw(Setting(mismatch=1.2, flips=0.03, drift=0.22, trajectories=4000))
    exact, share = known(hurt(tokens, mode)), bracket(tokens)
    tail = tails(cells(tokens), histogram(tokens))
    assert isinstance(tail, Tails) and tail.far_square_share > 0.2
    wide, widest = (hurt(tokens, mode, THREE, bracket=share, tails=x) for x in (tail, None))
    for found in (wide, widest):
        assert found.mismatch is not None and found.mismatch.low <= exact[0] <= found.mismatch.high
    assert wide.mismatch is not None and widest.mismatch is not None
    assert widest.mismatch.high - widest.mismatch.low > wide.mismatch.high - wide.mismatch.low


def test_a_loss_that_a_few_tokens_make_says_so() -> None:
    assert "few tokens" in hurt(draw(Setting(mismatch=3.0, flips=0.01, drift=0.1)), "decoupled").note
    assert hurt(draw(RUNS["both"]), "decoupled").note == ""


def test_without_a_bracket_only_the_loss_is_known() -> None:
    tokens = draw(RUNS["both"])
    found = hurt(tokens, "decoupled", THREE, bracket=Refused("2 staleness values, 3 needed"))
    assert (found.mismatch, found.staleness, found.note) == (None, None, "2 staleness values, 3 needed")
    assert found.loss.value > 0


def test_two_sets_count_the_update_as_staleness() -> None:
    tokens = draw(RUNS["both"])
    found = hurt(tokens, "bypass", TWO, bracket=bracket(tokens))
    assert "update" in found.note
    assert found.staleness is not None and found.staleness.low == 0


def test_nothing_stale_is_all_mismatch() -> None:
    tokens = draw(Setting(mismatch=0.3, lags=(0,)))
    found = hurt(tokens, "decoupled", THREE, bracket=bracket(tokens))
    assert known(found)[0] == pytest.approx(found.loss.value)
    assert found.staleness is not None and found.staleness.high == 0


def test_update_drift_alone_says_nothing_of_either() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2, k=4))
    found = damage(subsets(tokens, ("prox_logp", "theta_logp")), mode="bypass")
    assert isinstance(found, Refused) and "neither" in found.reason
