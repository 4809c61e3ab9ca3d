"""Advantages of one number a row: what a response earned beside what others did. See ``docs/advantages.md``.

All take ``rewards`` float ``[num_rows]`` (finite) and ``prompt_id`` int64 ``[num_rows]``, equal for the responses to
one prompt, which may stand anywhere; all give float32 ``[num_rows]``, computed in float64 and equivariant to the order
of rows, bit for bit. No rows give no rows. A group that tells nothing (one response, rewards all equal) gets exactly 0:
what is left of 0.1 − mean(0.1, 0.1, 0.1) must not be divided by a standard deviation and trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from flowrl.errors import FlowError, nearest
from flowrl.functional.grouping import Groups

if TYPE_CHECKING:
    from torch import Tensor

#: Over what the mean that is subtracted is taken; see :func:`normalize`.
Mean = Literal["token", "group", "batch", "none"]
#: Over what the standard deviation that is divided by is taken.
Std = Literal["group", "batch", "none"]


def normalize(
    rewards: Tensor,
    prompt_id: Tensor,
    *,
    mean: Mean = "group",
    std: Std = "group",
    leave_one_out: bool = False,
    num_tokens: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """(R − mean) / (std + eps), with the mean and the standard deviation that are asked for.

    ===================  =======  ==========  ===============
    estimator            mean     std         leave_one_out
    ===================  =======  ==========  ===============
    GRPO                 group    group       no
    Dr.GRPO              group    none        no
    RLOO                 group    none        yes
    OPO                  token    none        no
    Lite PPO             group    batch       no
    REINFORCE with one   batch    batch       either
    baseline for all
    ===================  =======  ==========  ===============

    (arXiv 2402.03300, 2503.20783, 2402.14740, 2505.23585, 2508.08221, 2501.03262.)

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.
        mean: "group": of the responses to the prompt. "token": of the prompt's policy tokens, each of which counts
            the reward of its response, so a response counts by its length, Σ l·R / Σ l. "batch": of all rows.
            "none": 0.
        std: the unbiased standard deviation of the rewards of the prompt ("group") or of all rows ("batch"), around
            their own mean; "none" does not divide.
        leave_one_out: the mean is that of the others alone: R_i − mean of j ≠ i, which is W/(W − w_i)·(R_i − mean)
            with the weights w (1, or l) and their sum W. It keeps a response out of its own baseline and does not
            touch the standard deviation.
        num_tokens: int64 ``[num_rows]``, the policy tokens l of each row; needed by mean="token".
        eps: added to the standard deviation.

    Returns:
        float32 ``[num_rows]``. Exactly 0 where what is compared does not vary: in a group of one or of equal rewards
        if the mean or the standard deviation is the group's ("token": among its responses with a token), everywhere
        in a batch of one or of equal rewards if one of them is the batch's.

    Raises:
        FlowError: an unknown mean or std, "token" without ``num_tokens``, or ``leave_one_out`` without a mean.
    """
    _check(mean, std, leave_one_out, num_tokens)
    return _normalize(rewards, prompt_id, mean, std, leave_one_out, num_tokens, eps).float()


def _normalize(
    rewards: Tensor,
    prompt_id: Tensor,
    mean: Mean,
    std: Std,
    leave_one_out: bool = False,
    num_tokens: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`normalize` in float64."""
    import torch

    groups = Groups.of(prompt_id)
    batch = Groups.of(torch.zeros_like(prompt_id))
    result = rewards.to(torch.float64)
    varied = torch.ones(len(rewards), dtype=torch.bool)
    if mean != "none":
        scope = batch if mean == "batch" else groups
        result, told = _centered(result, scope, num_tokens if mean == "token" else None, leave_one_out)
        varied = varied & told
    if std != "none":
        scope = batch if std == "batch" else groups
        result = result / (scope.std(rewards) + eps)[scope.index]
        varied = varied & scope.varied(rewards)[scope.index]
    return torch.where(varied, result, torch.zeros((), dtype=torch.float64))


def _centered(rewards: Tensor, scope: Groups, weights: Tensor | None, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """float64 and bool ``[num_rows]``: rewards minus their (weighted) mean within each group of ``scope``, and where
    that says something."""
    import torch

    weight = torch.ones_like(rewards) if weights is None else weights.to(torch.float64)
    varied = scope.varied(rewards, weight > 0)
    total = scope.sum(weight)
    mean = scope.sum(weight * rewards) / torch.where(total > 0, total, torch.ones((), dtype=torch.float64))
    centered = rewards - mean[scope.index]
    if leave_one_out:
        others = total[scope.index] - weight
        centered = centered * torch.where(others > 0, total[scope.index] / others, torch.ones((), dtype=torch.float64))
    return centered, varied[scope.index]


def _check(mean: str, std: str, leave_one_out: bool, num_tokens: Tensor | None) -> None:
    for name, value, known in (("mean", mean, get_args(Mean)), ("std", std, get_args(Std))):
        if value not in known:
            raise FlowError(
                f"normalize has no {name}={value!r}",
                expected=f"one of {', '.join(known)}",
                received=repr(value),
                do=nearest(value, known),
            )
    if leave_one_out and mean == "none":
        raise FlowError("leave_one_out leaves a row out of a mean", expected="a mean", received="mean='none'")
    if mean == "token" and num_tokens is None:
        raise FlowError("A mean over tokens needs lengths", expected="num_tokens [num_rows]", received="None")


def group_advantages(
    rewards: Tensor,
    prompt_id: Tensor,
    *,
    normalize_by_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """How much better each response is than the others to its prompt.

    GRPO (Shao et al., arXiv 2402.03300): (R − mean) / (std + eps), std unbiased. Without the division Dr.GRPO
    (Liu et al., arXiv 2503.20783). With leave-one-out the mean is that of the others, n/(n−1)·(R − mean):
    RLOO (Ahmadian et al., arXiv 2402.14740).

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.

    Returns:
        float32 ``[num_rows]``. Exactly 0 in a group whose rewards are all equal, and in a group of one.
    """
    std: Std = "group" if normalize_by_std else "none"
    return normalize(rewards, prompt_id, mean="group", std=std, leave_one_out=leave_one_out, eps=eps)


def opo_advantages(rewards: Tensor, prompt_id: Tensor, num_tokens: Tensor) -> Tensor:
    """OPO (Hao et al., arXiv 2505.23585): R − Σ l·R / Σ l over the group, l the policy tokens of a response.

    The baseline of least variance, if every token's gradient is about as long as any other and orthogonal to them.

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.
        num_tokens: int64 ``[num_rows]``.

    Returns:
        float32 ``[num_rows]``. A response without a token weighs nothing. Exactly 0 in a group whose responses with
        a token have equal rewards, of which there is one, or none.
    """
    return normalize(rewards, prompt_id, mean="token", std="none", num_tokens=num_tokens)


def gpg_advantages(rewards: Tensor, prompt_id: Tensor) -> Tensor:
    """GPG (Chu et al., arXiv 2504.02546): α·(R − mean of the group), α = rows / max(1, rows with R ≠ 0).

    α makes up for the rows without a reward, whose gradient says little. It depends on the whole batch.

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.

    Returns:
        float32 ``[num_rows]``. Exactly 0 in a group whose rewards are all equal, and in a group of one.
    """
    alpha = len(rewards) / max(1, int((rewards != 0).sum()))
    return (alpha * _normalize(rewards, prompt_id, "group", "none")).float()


def pass_at_k_advantages(
    rewards: Tensor, prompt_id: Tensor, *, normalize_by_std: bool = False, eps: float = 1e-6
) -> Tensor:
    """What the best response adds to the best of its group: best − second best there, 0 elsewhere.

    The leave-one-out estimate of the gradient of E[max R] over k = group size samples (Tang et al., arXiv
    2503.19595); with 0/1 rewards that is pass@k.

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.
        normalize_by_std: divide by the group's unbiased standard deviation + ``eps``.

    Returns:
        float32 ``[num_rows]``. Where two responses share the best reward, neither adds anything: the whole group is
        exactly 0, as is one of equal rewards, and a group of one.
    """
    import torch

    groups = Groups.of(prompt_id)
    exact = rewards.to(torch.float64)
    gap = leads(exact, groups)
    if normalize_by_std:
        gap = gap / (groups.std(exact) + eps)
    is_best = exact == groups.max(exact)[groups.index]
    return torch.where(is_best, gap[groups.index], torch.zeros((), dtype=torch.float64)).float()


def leads(rewards: Tensor, groups: Groups) -> Tensor:
    """float64 ``[num_groups]``: by how much the best response leads the second best; 0 for a tie and a group of one.

    Args:
        rewards: float ``[num_rows]``.
    """
    import torch

    exact = rewards.to(torch.float64)
    best = groups.max(exact)
    is_best = exact == best[groups.index]
    second = groups.max(exact, ~is_best)
    alone = groups.sum(is_best.to(torch.float64)) == 1
    return torch.where(alone & (groups.sizes > 1), best - second, torch.zeros((), dtype=torch.float64))


def gdpo_advantages(
    components: Mapping[str, Tensor],
    prompt_id: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """GDPO (Liu et al., arXiv 2601.05242): each reward is normalised on its own before they are added up.

    1. within each group and for each reward k: A_k = (R_k − mean) / (std + eps), as GRPO does with the sum;
    2. A = Σ_k w_k·A_k;
    3. over all rows of the batch: (A − mean) / (std + eps), which keeps the scale whatever the number of rewards.

    Responses that earn different rewards keep different advantages where the sum of their rewards is equal.

    Args:
        components: by name, float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.
        weights: by name; a component that is not named has weight 1.
        eps: added to each standard deviation (unbiased).

    Returns:
        float32 ``[num_rows]``. A component that does not vary in a group adds nothing there. Exactly 0 in a group in
        which no component varies, in a group of one, without components, and where all A are equal.

    Raises:
        FlowError: a weight names no component.
    """
    import torch

    weights = weights or {}
    for name in weights:
        if name not in components:
            raise FlowError(
                f"There is a weight for {name!r}, which is no component of the reward",
                expected=f"one of {', '.join(components)}",
                received=repr(name),
                do=nearest(name, list(components)),
            )
    total = torch.zeros(len(prompt_id), dtype=torch.float64)
    for name, column in components.items():
        total = total + weights.get(name, 1.0) * _normalize(column, prompt_id, "group", "group", eps=eps)
    whitened = _normalize(total, prompt_id, "batch", "batch", eps=eps)
    return torch.where(any_varied(components, prompt_id), whitened, torch.zeros((), dtype=torch.float64)).float()


def any_varied(components: Mapping[str, Tensor], prompt_id: Tensor) -> Tensor:
    """bool ``[num_rows]``: whether some component varies in the row's group."""
    import torch

    groups = Groups.of(prompt_id)
    varied = torch.zeros(groups.num_groups, dtype=torch.bool)
    for column in components.values():
        varied = varied | groups.varied(column)
    return varied[groups.index]
