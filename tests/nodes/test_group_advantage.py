import pytest
import torch

from flowrl.errors import AlignmentError, FlowError, GraphError, GroupSizeError, RewardError
from flowrl.functional.grouping import Groups
from flowrl.nodes import GroupAdvantage, rewards_like
from flowrl.nodes.group_advantage import (
    GDPOAdvantage,
    GPGAdvantage,
    NormalizedAdvantage,
    OPOAdvantage,
    PassKAdvantage,
)
from flowrl.nodes.row_advantage import FunctionAdvantage, RowAdvantage, ScoredRows
from flowrl.ragged import Ragged
from tests.nodes.advantage_cases import first_values, run, with_invalid
from tests.tiny import recorded_rollouts


class TestGroupAdvantage:
    rollouts = recorded_rollouts(2, 3, response_lengths=(2, 1, 3))
    rewards = rewards_like(rollouts, score=[0.0, 1.0, 2.0, 5.0, 5.0, 5.0])

    def test_by_hand(self) -> None:
        advantages, reported = run(GroupAdvantage(eps=1e-9), self.rollouts, self.rewards)
        want = [[-1.0, -1.0], [0.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.0], [0.0, 0.0, 0.0]]
        assert advantages.advantages.to_lists() == want
        assert first_values(advantages.returns) == [0.0, 1.0, 2.0, 5.0, 5.0, 5.0]
        assert reported["degenerate_groups"] == 1 and reported["dropped_rows"] == 0

    def test_settings_choose_the_estimator(self) -> None:
        rewards = rewards_like(self.rollouts, score=[0.0, 1.0, 5.0, 0.0, 0.0, 0.0])
        plain, _ = run(GroupAdvantage(normalize_by_std=False), self.rollouts, rewards)
        assert first_values(plain.advantages)[:3] == [-2.0, -1.0, 3.0]
        left_out, _ = run(GroupAdvantage(normalize_by_std=False, leave_one_out=True), self.rollouts, rewards)
        assert first_values(left_out.advantages)[:3] == [-3.0, -1.5, 4.5]

    def test_degenerate_groups_may_be_dropped(self) -> None:
        advantages, reported = run(GroupAdvantage(degenerate="drop"), self.rollouts, self.rewards)
        assert advantages.prompt_id.tolist() == [0, 0, 0]
        assert reported["dropped_rows_degenerate"] == 3

    @pytest.mark.parametrize(
        ("invalid", "rows", "kept", "too_small"),
        [
            ("drop_row", (1,), [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)], 0),
            ("drop_row", (1, 2), [(1, 0), (1, 1), (1, 2)], 1),  # one is left of prompt 0: nothing to compare it with
            ("drop_group", (1,), [(1, 0), (1, 1), (1, 2)], 0),
            ("drop_row", (0, 1, 2, 3, 4, 5), [], 0),
        ],
    )
    def test_invalid_rewards(self, invalid, rows, kept, too_small) -> None:
        advantages, reported = run(GroupAdvantage(invalid=invalid), self.rollouts, with_invalid(self.rewards, *rows))
        assert list(map(tuple, advantages.row_ids.tolist())) == kept
        assert reported["dropped_rows"] == 6 - len(kept)
        assert reported["dropped_rows_invalid"] == len(rows)
        assert reported["dropped_rows_group_too_small"] == too_small
        assert bool(advantages.advantages.values.isfinite().all())

    def test_an_invalid_reward_may_fail_the_step(self) -> None:
        with pytest.raises(RewardError, match=r"2 of 6 .*timed out"):
            GroupAdvantage(invalid="fail")(self.rollouts, with_invalid(self.rewards, 1, 4))

    def test_groups_of_one_are_refused(self) -> None:
        with pytest.raises(GroupSizeError, match=r"at least 2 rollouts.* 1 of prompt_id 1\b"):
            GroupAdvantage()(self.rollouts.select([0, 1, 5]), self.rewards)

    def test_a_filter_may_have_taken_rollouts_away_but_not_rewards(self) -> None:
        kept = self.rollouts.select([0, 1, 2])
        assert GroupAdvantage()(kept, self.rewards).num_rows == 3
        with pytest.raises(AlignmentError):
            GroupAdvantage()(self.rollouts, self.rewards.select([0, 1, 2]))

    def test_observations_get_no_advantage(self) -> None:
        rollouts = recorded_rollouts(1, 2, response_lengths=(5, 2), observations=True)
        advantages = GroupAdvantage(normalize_by_std=False)(rollouts, rewards_like(rollouts, s=[0.0, 2.0]))
        assert advantages.advantages.to_lists() == [[-1.0, -1.0, 0.0, 0.0, -1.0], [1.0, 1.0]]


#: Two prompts, three responses each, of 2, 1 and 3 tokens.
ROLLOUTS = recorded_rollouts(2, 3, response_lengths=(2, 1, 3))


def advantages_of(node: RowAdvantage, *scores: float) -> list[float]:
    """Of each row the advantage at its first token."""
    return first_values(node(ROLLOUTS, rewards_like(ROLLOUTS, score=list(scores))).advantages)


class TestNormalizedAdvantage:
    @pytest.mark.parametrize(
        ("composed", "simple"),
        [
            (NormalizedAdvantage(), GroupAdvantage()),
            (NormalizedAdvantage(std="none"), GroupAdvantage(normalize_by_std=False)),
            (
                NormalizedAdvantage(std="none", leave_one_out=True),
                GroupAdvantage(normalize_by_std=False, leave_one_out=True),
            ),
            (NormalizedAdvantage(mean="token", std="none"), OPOAdvantage()),
        ],
        ids=["grpo", "dr_grpo", "rloo", "opo"],
    )
    def test_the_simple_ones_are_compositions(self, composed: RowAdvantage, simple: RowAdvantage) -> None:
        rewards = rewards_like(ROLLOUTS, score=[0.0, 1.0, 5.0, 0.5, -2.0, 0.1])
        assert composed(ROLLOUTS, rewards) == simple(ROLLOUTS, rewards)

    def test_by_hand(self) -> None:
        """The batch has mean 1 and std √(36/5); its prompts token means (0·2 + 1 + 6·3)/6 and (1·2 − 2 + 0)/6."""
        scores = (0.0, 1.0, 6.0, 1.0, -2.0, 0.0)
        assert advantages_of(NormalizedAdvantage(mean="batch", std="none"), *scores) == [-1, 0, 5, 0, -3, -1]
        scaled = advantages_of(NormalizedAdvantage(mean="batch", std="batch"), *scores)
        assert scaled == pytest.approx([x / 7.2**0.5 for x in (-1, 0, 5, 0, -3, -1)], rel=1e-5)
        by_token = advantages_of(NormalizedAdvantage(mean="token", std="none"), *scores)
        assert by_token == pytest.approx([x - 19 / 6 for x in scores[:3]] + list(scores[3:]), rel=1e-6)

    def test_which_groups_it_needs_and_how_it_is_split(self) -> None:
        def kind(**settings) -> tuple[int, str]:
            node = NormalizedAdvantage(**settings)
            return node.needs_groups, node.split

        assert kind() == kind(mean="token") == kind(mean="none", std="group") == (2, "groups")
        assert kind(std="batch") == kind(mean="batch", std="group") == (2, "whole")
        assert kind(mean="batch", std="none") == kind(mean="none", std="batch") == (1, "whole")
        assert kind(mean="none", std="none") == (1, "rows")
        assert kind(mean="none", std="none", invalid="drop_group") == (1, "groups")

    def test_without_groups_a_lonely_row_is_kept(self) -> None:
        rewards = with_invalid(rewards_like(ROLLOUTS, score=[0.0, 1.0, 6.0, 1.0, -2.0, 0.0]), 1, 2)
        advantages, reported = run(NormalizedAdvantage(mean="batch", std="none"), ROLLOUTS, rewards)
        assert first_values(advantages.advantages) == [0.25, 1.25, -1.75, 0.25]
        assert reported == {"dropped_rows": 2, "dropped_rows_invalid": 2}


class TestOpoAndGpg:
    def test_by_hand(self) -> None:
        """OPO: (0·2 + 1 + 6·3)/6 and (2 − 2 + 0)/6. GPG: α = 6 rows / 4 with a reward, group means 7/3 and −1/3."""
        scores = (0.0, 1.0, 6.0, 1.0, -2.0, 0.0)
        by_token = [x - 19 / 6 for x in scores[:3]] + list(scores[3:])
        assert advantages_of(OPOAdvantage(), *scores) == pytest.approx(by_token, rel=1e-6)
        centred = [x - 7 / 3 for x in scores[:3]] + [x + 1 / 3 for x in scores[3:]]
        assert advantages_of(GPGAdvantage(), *scores) == pytest.approx([1.5 * x for x in centred], rel=1e-6)

    def test_rows_that_were_dropped_do_not_count(self) -> None:
        """GPG over prompt 0 alone: 3 rows of which 2 have a reward; and with prompt 1 all equal and left out."""
        for scores, node, rows in (
            ((0.0, 1.0, 5.0, 1.0, 2.0, 3.0), GPGAdvantage(invalid="drop_group"), (3,)),
            ((0.0, 1.0, 5.0, 2.0, 2.0, 2.0), GPGAdvantage(degenerate="drop"), ()),
        ):
            advantages = node(ROLLOUTS, with_invalid(rewards_like(ROLLOUTS, score=list(scores)), *rows))
            assert first_values(advantages.advantages) == [-3.0, -1.5, 4.5]

    def test_observations_are_no_tokens_of_the_length(self) -> None:
        """The first response has 5 tokens, 3 of them the policy's."""
        rollouts = recorded_rollouts(1, 2, response_lengths=(5, 1), observations=True)
        assert rollouts.loss_mask.to_lists() == [[1, 1, 0, 0, 1], [1]]
        got = OPOAdvantage()(rollouts, rewards_like(rollouts, score=[0.0, 4.0]))
        assert first_values(got.advantages) == [-1.0, 3.0]  # the mean is 4·1/(3 + 1)


class TestPassKAdvantage:
    def test_by_hand(self) -> None:
        assert advantages_of(PassKAdvantage(), 0.0, 1.0, 5.0, 2.0, 0.0, 1.0) == [0, 0, 4, 1, 0, 0]
        scaled = advantages_of(PassKAdvantage(normalize_by_std=True), 0.0, 1.0, 5.0, 2.0, 0.0, 1.0)
        assert scaled == pytest.approx([0, 0, 4 / 7**0.5, 1, 0, 0], rel=1e-5)

    def test_a_tie_for_the_best_is_degenerate(self) -> None:
        rewards = rewards_like(ROLLOUTS, score=[1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        advantages, reported = run(PassKAdvantage(), ROLLOUTS, rewards)
        assert first_values(advantages.advantages) == [0, 0, 0, 1, 0, 0] and reported["degenerate_groups"] == 1
        advantages, reported = run(PassKAdvantage(degenerate="drop"), ROLLOUTS, rewards)
        assert first_values(advantages.advantages) == [1, 0, 0] and reported["dropped_rows_degenerate"] == 3


class TestGdpoAdvantage:
    def test_components_are_normalised_on_their_own(self) -> None:
        """One prompt; a gives 2, −1, −1 over √3; b, a number a token that sums to 0, 0, 3, gives −1, −1, 2 over √3 with
        weight ½. The sum 1.5, −1.5, 0 over √3 has mean 0 and std 1.5/√3."""
        rollouts = recorded_rollouts(1, 3, response_lengths=(2, 1, 3))
        b = Ragged.from_rows([[1.0, -1.0], [0.0], [1.0, 1.0, 1.0]], torch.float32)
        rewards = rewards_like(rollouts, a=[1.0, 0.0, 0.0], b=b)
        advantages, reported = run(GDPOAdvantage(weights={"b": 0.5}), rollouts, rewards)
        assert first_values(advantages.advantages) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)
        assert first_values(advantages.returns) == [1.0, 0.0, 3.0]
        assert reported["degenerate_groups"] == 0
        assert GDPOAdvantage().split == "whole"

    def test_a_group_is_degenerate_where_no_component_varies(self) -> None:
        """In the first group the sum does not vary, the components do."""
        rewards = rewards_like(ROLLOUTS, a=[1.0, 0.0, 0.0, 0.1, 0.1, 0.1], b=[0.0, 1.0, 1.0, 0.7, 0.7, 0.7])
        node = GDPOAdvantage(weights={"b": 3.0})
        advantages, reported = run(node, ROLLOUTS, rewards)
        assert reported["degenerate_groups"] == 1
        numbers = first_values(advantages.advantages)
        assert numbers[3:] == [0.0] * 3 and all(x != 0 for x in numbers[:3])

    def test_unknown_components(self) -> None:
        rewards = rewards_like(ROLLOUTS, score=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        with pytest.raises(FlowError, match=r"'scores'.*did you mean 'score'"):
            GDPOAdvantage(weights={"scores": 1.0})(ROLLOUTS, rewards)


def lead(rewards: torch.Tensor, prompt_id: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    groups = Groups.of(prompt_id)
    return factor * (rewards - groups.min(rewards)[groups.index])


class AboveBest(RowAdvantage):
    margin: float = 0.0

    def row_advantages(self, rows: ScoredRows) -> torch.Tensor:
        groups = Groups.of(rows.prompt_id)
        return rows.rewards - groups.max(rows.rewards)[groups.index] + self.margin


class TestOnesOwn:
    def test_a_subclass_says_what_the_number_is(self) -> None:
        assert advantages_of(AboveBest(margin=1.0), 0, 1, 6, 1, -2, 0) == [-5, -4, 1, 1, -2, 0]
        with pytest.raises(NotImplementedError, match="row_advantages"):
            advantages_of(RowAdvantage(), 0, 1, 6, 1, -2, 0)

    def test_a_function_gets_what_it_names(self) -> None:
        assert advantages_of(FunctionAdvantage(lead), 0, 1, 6, 1, -2, 0) == [0, 2, 12, 6, 0, 4]
        assert advantages_of(FunctionAdvantage(lambda r: 2 * r, within_groups=False), 0, 1, 6, 1, -2, 0)[2] == 12
        assert advantages_of(FunctionAdvantage(torch.sign), 0, 1, 6, 1, -2, 0) == [0, 1, 1, 1, -1, 0]
        everything = FunctionAdvantage(lambda components, num_tokens: components["score"] * num_tokens)
        assert advantages_of(everything, 0, 1, 6, 1, -2, 0) == [0, 1, 18, 2, -2, 0]

    def test_it_sees_valid_rows_alone_and_is_not_called_without_any(self) -> None:
        seen: list[list[float]] = []

        def remember(rewards: torch.Tensor) -> torch.Tensor:
            seen.append(rewards.tolist())
            return rewards

        node = FunctionAdvantage(remember)
        rewards = rewards_like(ROLLOUTS, score=[0.0, 1.0, 6.0, 1.0, -2.0, 0.0])
        assert node(ROLLOUTS, with_invalid(rewards, 0, 3, 4)).num_rows == 2
        assert node(ROLLOUTS, with_invalid(rewards, *range(6))).num_rows == 0
        assert seen == [[1.0, 6.0]]

    def test_how_it_is_split(self) -> None:
        assert (FunctionAdvantage(lead).split, FunctionAdvantage(lead).needs_groups) == ("groups", 2)
        whole = FunctionAdvantage(lead, within_groups=False)
        assert (whole.split, whole.needs_groups) == ("whole", 1)

    def test_what_would_broadcast_or_poison_the_loss_is_refused(self) -> None:
        for wrong in (lambda r: r.mean(), lambda r: r[:2], lambda r: r[:, None], lambda r: r.tolist()):
            with pytest.raises(GraphError, match=r"FunctionAdvantage: its advantages have the wrong shape.*\[6\]"):
                advantages_of(FunctionAdvantage(wrong), 0, 1, 6, 1, -2, 0)
        with pytest.raises(GraphError, match=r"not finite.*nan.*prompt_id 1"):
            advantages_of(FunctionAdvantage(lambda r: r.abs().sqrt() * (r + 2) / (r + 2)), 0, 1, 6, 1, -2, 0)

    def test_problems(self) -> None:
        assert list(FunctionAdvantage(lead).problems()) == list(FunctionAdvantage(torch.sign).problems()) == []
        (found,) = FunctionAdvantage(lambda reward, prompt_id: reward).problems()
        assert "'reward'" in found and "did you mean 'rewards'" in found
        (found,) = FunctionAdvantage("lead").problems()  # type: ignore[arg-type]
        assert found.startswith("fn is 'lead'")


def test_problems() -> None:
    defaults = (
        GroupAdvantage(),
        NormalizedAdvantage(),
        OPOAdvantage(),
        GPGAdvantage(),
        PassKAdvantage(),
        GDPOAdvantage(),
    )
    assert [list(node.problems()) for node in defaults] == [[]] * 6
    wrong = {"eps": 0.0, "invalid": "?", "degenerate": "?"}
    for cls in (GroupAdvantage, NormalizedAdvantage, PassKAdvantage, GDPOAdvantage):
        assert [p.split(" ")[0] for p in cls(**wrong).problems()] == ["eps", "degenerate", "invalid"]
    found = list(NormalizedAdvantage(mean="mean", std="std").problems())  # type: ignore[arg-type]
    assert [p.split(" ")[0] for p in found] == ["mean", "std"]
    found = list(NormalizedAdvantage(mean="none", std="none", leave_one_out=True, degenerate="drop").problems())
    assert [p.split(" ")[0] for p in found] == ["leave_one_out", "degenerate"]
    (found,) = GDPOAdvantage(weights={"a": float("nan")}).problems()
    assert "'a'" in found
