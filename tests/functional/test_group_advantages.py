from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.errors import FlowError
from flowrl.functional.group_advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    normalize,
    opo_advantages,
    pass_at_k_advantages,
)

NAN = float("nan")

#: Prompt 7: rewards 1, 2, 6 (mean 3, std √7). Prompt 3: 0, 4 (mean 2, std √8). Of the batch: mean 2.6, std √5.8.
PROMPT = torch.tensor([7, 3, 7, 3, 7])
REWARDS = torch.tensor([1.0, 0.0, 2.0, 4.0, 6.0])
TOKENS = torch.tensor([2, 1, 1, 3, 1])
MEAN_OF_TOKENS = {7: (2 * 1 + 2 + 6) / 4, 3: (0 + 3 * 4) / 4}  # 2.5 and 3

#: Every estimator of one number a row, as a function of (rewards, prompt_id, num_tokens).
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda r, p, n: group_advantages(r, p),
    "dr_grpo": lambda r, p, n: group_advantages(r, p, normalize_by_std=False),
    "rloo": lambda r, p, n: group_advantages(r, p, normalize_by_std=False, leave_one_out=True),
    "opo": opo_advantages,
    "gpg": lambda r, p, n: gpg_advantages(r, p),
    "pass_at_k": lambda r, p, n: pass_at_k_advantages(r, p),
    "pass_at_k_std": lambda r, p, n: pass_at_k_advantages(r, p, normalize_by_std=True),
    "gdpo": lambda r, p, n: gdpo_advantages({"a": r, "b": r**2, "length": n.float()}, p),
}


def composed(mean: str, std: str, leave_one_out: bool) -> Estimator:
    return lambda r, p, n: normalize(r, p, mean=mean, std=std, leave_one_out=leave_one_out, num_tokens=n)  # type: ignore[arg-type]


for _mean in ("token", "group", "batch", "none"):
    for _std in ("group", "batch", "none"):
        ESTIMATORS[f"{_mean}/{_std}"] = composed(_mean, _std, False)
    if _mean != "none":
        ESTIMATORS[f"{_mean}, leave one out"] = composed(_mean, "none", True)

#: Those in which a group tells nothing but by its own differences.
OF_GROUPS = [
    n for n in ESTIMATORS if n not in ("batch/batch", "batch/none", "batch, leave one out", "none/batch", "none/none")
]

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=list(ESTIMATORS))


def close(got: Tensor, want: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, torch.tensor(want), rtol=tolerance, atol=tolerance)


class TestGroupAdvantages:
    def test_by_hand(self) -> None:
        assert group_advantages(REWARDS, PROMPT, normalize_by_std=False).tolist() == [-2.0, -2.0, -1.0, 2.0, 3.0]
        left_out = group_advantages(REWARDS, PROMPT, normalize_by_std=False, leave_one_out=True)
        assert left_out.tolist() == [-3.0, -4.0, -1.5, 4.0, 4.5]  # against the mean of the others: 1 − 4 = −3, …
        close(group_advantages(REWARDS, PROMPT), [-2 / 7**0.5, -2 / 8**0.5, -1 / 7**0.5, 2 / 8**0.5, 3 / 7**0.5])


class TestNormalize:
    @pytest.mark.parametrize(
        ("mean", "want"),
        [
            ("group", [-2.0, -2.0, -1.0, 2.0, 3.0]),
            ("token", [-1.5, -3.0, -0.5, 1.0, 3.5]),
            ("batch", [-1.6, -2.6, -0.6, 1.4, 3.4]),
            ("none", [1.0, 0.0, 2.0, 4.0, 6.0]),
        ],
    )
    def test_means_and_deviations_by_hand(self, mean, want: list[float]) -> None:
        close(normalize(REWARDS, PROMPT, mean=mean, std="none", num_tokens=TOKENS), want)
        by_batch = normalize(REWARDS, PROMPT, mean=mean, std="batch", num_tokens=TOKENS)
        close(by_batch, [x / 5.8**0.5 for x in want])
        by_group = normalize(REWARDS, PROMPT, mean=mean, std="group", num_tokens=TOKENS)
        std = [8**0.5 if p == 3 else 7**0.5 for p in PROMPT.tolist()]
        close(by_group, [x / s for x, s in zip(want, std, strict=True)])

    @pytest.mark.parametrize("mean", ["group", "token", "batch"])
    def test_leave_one_out_compares_with_the_others_alone(self, mean) -> None:
        got = normalize(REWARDS, PROMPT, mean=mean, std="none", leave_one_out=True, num_tokens=TOKENS)
        want: list[float] = []
        for i, prompt in enumerate(PROMPT.tolist()):
            others = [j for j in range(5) if j != i and (mean == "batch" or int(PROMPT[j]) == prompt)]
            weights = [float(TOKENS[j]) if mean == "token" else 1.0 for j in others]
            mean_of_others = sum(w * float(REWARDS[j]) for w, j in zip(weights, others, strict=True)) / sum(weights)
            want.append(float(REWARDS[i]) - mean_of_others)
        close(got, want)

    def test_the_simple_estimators_are_compositions_bit_for_bit(self) -> None:
        def same(a: Tensor, b: Tensor) -> bool:
            return torch.equal(a, b) and bool(a.any())

        pick = {"num_tokens": TOKENS}
        assert same(group_advantages(REWARDS, PROMPT), normalize(REWARDS, PROMPT))
        dr_grpo = group_advantages(REWARDS, PROMPT, normalize_by_std=False)
        assert same(dr_grpo, normalize(REWARDS, PROMPT, std="none"))
        rloo = group_advantages(REWARDS, PROMPT, normalize_by_std=False, leave_one_out=True)
        assert same(rloo, normalize(REWARDS, PROMPT, std="none", leave_one_out=True))
        opo = normalize(REWARDS, PROMPT, mean="token", std="none", **pick)  # type: ignore[arg-type]
        assert same(opo_advantages(REWARDS, PROMPT, TOKENS), opo)
        assert same(gpg_advantages(REWARDS, PROMPT), 1.25 * normalize(REWARDS, PROMPT, std="none"))
        # with equal lengths a mean over tokens is one over rows
        equal = torch.full((5,), 4)
        assert same(opo_advantages(REWARDS, PROMPT, equal), dr_grpo)

    def test_a_batch_mean_needs_no_groups(self) -> None:
        alone = torch.arange(5)
        close(normalize(REWARDS, alone, mean="batch", std="none"), [-1.6, -2.6, -0.6, 1.4, 3.4])
        assert normalize(REWARDS, alone, mean="batch", std="group").tolist() == [0.0] * 5  # of one there is no std

    def test_errors(self) -> None:
        with pytest.raises(FlowError, match=r"mean='groop'.*did you mean 'group'"):
            normalize(REWARDS, PROMPT, mean="groop")  # type: ignore[arg-type]
        with pytest.raises(FlowError, match="std='token'"):
            normalize(REWARDS, PROMPT, std="token")  # type: ignore[arg-type]
        with pytest.raises(FlowError, match="leave_one_out"):
            normalize(REWARDS, PROMPT, mean="none", leave_one_out=True)
        with pytest.raises(FlowError, match="num_tokens"):
            normalize(REWARDS, PROMPT, mean="token")


class TestOpo:
    def test_by_hand(self) -> None:
        want = [float(r) - MEAN_OF_TOKENS[p] for r, p in zip(REWARDS, PROMPT.tolist(), strict=True)]
        close(opo_advantages(REWARDS, PROMPT, TOKENS), want)

    def test_a_response_without_a_token_weighs_nothing(self) -> None:
        """Rewards 0.1, 0.1 and, without a token, 5: what has tokens does not vary. With 0.3: mean 0.25."""
        prompt, tokens = torch.zeros(3, dtype=torch.int64), torch.tensor([3, 1, 0])
        assert opo_advantages(torch.tensor([0.1, 0.1, 5.0]), prompt, tokens).tolist() == [0.0] * 3
        close(opo_advantages(torch.tensor([0.1, 0.7, 5.0]), prompt, tokens)[:2], [-0.15, 0.45])
        assert opo_advantages(torch.tensor([1.0, 2.0, 5.0]), prompt, 0 * tokens).tolist() == [0.0] * 3
        assert opo_advantages(torch.tensor([1.0, 2.0, 5.0]), prompt, torch.tensor([0, 0, 4])).tolist() == [0.0] * 3


class TestGpg:
    def test_by_hand(self) -> None:
        """Four of five rows have a reward: α = 5/4."""
        close(gpg_advantages(REWARDS, PROMPT), [1.25 * x for x in (-2.0, -2.0, -1.0, 2.0, 3.0)])

    def test_no_row_with_a_reward(self) -> None:
        assert gpg_advantages(torch.zeros(4), torch.tensor([0, 0, 1, 1])).tolist() == [0.0] * 4


class TestPassAtK:
    def test_by_hand(self) -> None:
        """Prompt 7: 6 leads 2 by 4. Prompt 3: 4 leads 0 by 4."""
        assert pass_at_k_advantages(REWARDS, PROMPT).tolist() == [0.0, 0.0, 0.0, 4.0, 4.0]
        close(pass_at_k_advantages(REWARDS, PROMPT, normalize_by_std=True), [0, 0, 0, 4 / 8**0.5, 4 / 7**0.5])

    @pytest.mark.parametrize("by_std", [True, False])
    def test_where_two_share_the_best_reward_neither_adds_anything(self, by_std: bool) -> None:
        prompt = torch.tensor([0, 0, 0, 1, 1])
        got = pass_at_k_advantages(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]), prompt, normalize_by_std=by_std)
        assert got[:3].tolist() == [0.0] * 3 and float(got[3]) > 0.5


class TestGdpo:
    def test_by_hand(self) -> None:
        """One prompt; a = 1, 0, 0 (mean 1/3, std 1/√3) gives 2, −1, −1 over √3; b = 0, 0, 3 gives √3·(−1, −1, 2)/3.
        With weights 1 and ½: A·√3 = 1.5, −1.5, 0, of mean 0 and std 1.5."""
        components = {"a": torch.tensor([1.0, 0.0, 0.0]), "b": torch.tensor([0.0, 0.0, 3.0])}
        got = gdpo_advantages(components, torch.zeros(3, dtype=torch.int64), weights={"b": 0.5}, eps=1e-12)
        close(got, [1.0, -1.0, 0.0])

    def test_against_float64(self) -> None:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.arange(4).repeat_interleave(3)
        components = {n: torch.rand(12, generator=generator).double() for n in "abc"}
        weights = {"a": 2.0, "c": -0.5}
        total = torch.zeros(12, dtype=torch.float64)
        for name, column in components.items():
            groups = column.view(4, 3)
            part = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
            total += weights.get(name, 1.0) * part.flatten()
        want = (total - total.mean()) / (total.std() + 1e-6)
        close(gdpo_advantages(components, prompt, weights=weights), want.float().tolist())

    def test_two_rewards_count_for_more_than_one(self) -> None:
        """Of prompt 0 the second response earns one reward more, of prompt 1 two. GRPO says ±1/√2 of both; here it is
        ±1/√2 and ±√2, over the batch's std √(5/3)."""
        components = {"a": torch.tensor([0.0, 1.0, 0.0, 1.0]), "b": torch.tensor([0.0, 0.0, 0.0, 1.0])}
        prompt = torch.tensor([0, 0, 1, 1])
        half, scale = 0.5**0.5, (5 / 3) ** 0.5
        close(group_advantages(components["a"] + components["b"], prompt), [-half, half, -half, half])
        want = [-half / scale, half / scale, -2 * half / scale, 2 * half / scale]
        close(gdpo_advantages(components, prompt), want)

    def test_groups_in_which_no_component_varies_are_exactly_zero(self) -> None:
        components = {
            "a": torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 0.0]),
            "b": torch.tensor([0.7, 0.7, 0.7, 2.0, 0.1, 0.3]),
        }
        got = gdpo_advantages(components, torch.tensor([0, 0, 0, 1, 2, 2]), weights={"a": 3.0})
        assert got[:4].tolist() == [0.0] * 4
        assert bool((got[4:] != 0).all())

    def test_no_components_and_unknown_weights(self) -> None:
        assert gdpo_advantages({}, PROMPT).tolist() == [0.0] * 5
        with pytest.raises(FlowError, match=r"'lenght'.*did you mean 'length'"):
            gdpo_advantages({"length": REWARDS}, PROMPT, weights={"lenght": 1.0})


class TestEveryEstimator:
    """Laws that all of them keep."""

    @every_estimator
    def test_no_rows(self, estimator: Estimator) -> None:
        got = estimator(REWARDS[:0], PROMPT[:0], TOKENS[:0])
        assert got.tolist() == [] and got.dtype == torch.float32

    @every_estimator
    def test_finite_where_groups_are_degenerate(self, estimator: Estimator) -> None:
        """A group of one, one of equal rewards, one with a response of no token, one of no tokens at all."""
        prompt = torch.tensor([0, 1, 1, 1, 2, 2, 3, 3])
        rewards = torch.tensor([5.0, 0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 2.0])
        tokens = torch.tensor([2, 1, 1, 1, 3, 0, 0, 0])
        got = estimator(rewards, prompt, tokens)
        assert bool(got.isfinite().all()) and float(got.abs().max()) < 1e3

    @pytest.mark.parametrize("name", OF_GROUPS)
    def test_groups_of_one_or_of_equal_rewards_are_exactly_zero(self, name: str) -> None:
        """0.1 three times has a mean that is not 0.1 in float64; that must not become an advantage."""
        rewards, prompt = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 1, 2, 2])
        got = ESTIMATORS[name](rewards, prompt, torch.tensor([2, 2, 2, 1, 4, 4]))
        assert got[:4].tolist() == [0.0] * 4
        assert bool(got[4:].any())

    @pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "none/none"])
    def test_where_the_whole_batch_is_equal_everything_is_zero(self, name: str) -> None:
        same, prompt = torch.full((7,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1, 2])
        assert ESTIMATORS[name](same, prompt, torch.full((7,), 3)).tolist() == [0.0] * 7
        assert torch.equal(ESTIMATORS["none/none"](same, prompt, prompt), same)

    @every_estimator
    @settings(max_examples=10, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3, width=32), st.integers(0, 5)), min_size=1, max_size=12),
        st.randoms(use_true_random=False),
    )
    def test_law_9_equivariant_to_row_order_bit_for_bit(self, estimator: Estimator, rows, random) -> None:
        prompt = torch.tensor([p for p, _, _ in rows])
        rewards = torch.tensor([r for _, r, _ in rows])
        tokens = torch.tensor([n for _, _, n in rows])
        order = torch.tensor(random.sample(range(len(rows)), len(rows)))
        got = estimator(rewards[order], prompt[order], tokens[order])
        assert torch.equal(got, estimator(rewards, prompt, tokens)[order])
