"""Losses of preference learning: DPO and its kin, KTO, ORPO, SimPO, and Bradley–Terry for reward models.

All take one number a sequence: ``log π(y|x)``, the sum of the log-probs of its tokens, or its mean where a loss is
length-normalised. A sequence without a token has log-prob 0 either way: saying nothing is certain. All give one loss a
pair (or a row) and reduce nothing, so that an empty batch gives an empty tensor, and one row's NaN stays its own.
Everything is computed in the dtype that comes in, through ``logsigmoid``: log-probs of ±10⁴ give finite losses and gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: What :func:`dpo_loss` makes of the margin of a pair.
DPO_LOSSES = ("sigmoid", "ipo", "hinge", "robust")
#: A sequence at least as likely as this a token counts as this likely where odds are taken: p/(1−p) has no end at 1.
MAX_MEAN_LOGPROB = -1e-6


def implicit_reward(logprobs: Tensor, ref_logprobs: Tensor | None, *, beta: float) -> Tensor:
    """β (log π(y|x) − log π_ref(y|x)): the reward for which π is the optimal policy (DPO, arXiv 2305.18290, eq. 5, but for
    a number that depends on the prompt alone).

    Args:
        logprobs: float ``[n]``.
        ref_logprobs: float ``[n]``; None is a uniform reference, whose log-probs cancel within a pair.
        beta: β > 0.

    Returns:
        float ``[n]``.
    """
    return beta * (logprobs if ref_logprobs is None else logprobs - ref_logprobs)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290) and its variants, a loss a pair.

    With h = log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l), where y_w is chosen and y_l rejected:

    * ``sigmoid``: −log σ(βh).
    * ``ipo``: (h − 1/(2β))² (Azar et al., arXiv 2310.12036, eq. 17, whose τ is β): h is drawn to a finite margin.
    * ``hinge``: max(0, 1 − βh) (SLiC-HF, arXiv 2305.10425; normalised by a reference: RSO, arXiv 2309.06657).
    * ``robust``: ((1−ε) ℓ(h) − ε ℓ(−h)) / (1−2ε) with ℓ of ``sigmoid`` (Chowdhury et al., arXiv 2403.00409): the unbiased
      estimate of the loss on clean labels, where each was flipped with probability ε. It may be negative.

    With a label smoothing of ε the first three become (1−ε) ℓ(h) + ε ℓ(−h): the expectation over labels that are wrong with
    probability ε (of ``sigmoid`` the conservative DPO).

    Args:
        chosen: float ``[num_pairs]``: log π(y_w|x), with gradient. Give means over tokens, here and below, for the
            length-normalised variant.
        rejected: float ``[num_pairs]``: log π(y_l|x), with gradient.
        ref_chosen, ref_rejected: float ``[num_pairs]``, of the reference. Both None: reference-free, h is the difference of
            the policy's own log-probs.
        beta: β > 0.
        loss: one of :data:`DPO_LOSSES`.
        label_smoothing: ε, 0 ≤ ε < ½.

    Returns:
        float ``[num_pairs]``. Where chosen and rejected are one sequence the loss is that of h = 0, without a gradient into
        the policy.

    Raises:
        FlowError: an unknown ``loss``, or one of the two reference columns alone.
    """
    import torch
    from torch.nn.functional import logsigmoid

    if (ref_chosen is None) != (ref_rejected is None):
        raise FlowError("dpo_loss has half a reference", expected="ref_chosen and ref_rejected, or neither")
    margin = chosen - rejected
    if (
        ref_chosen is not None and ref_rejected is not None
    ):  # each against its own reference first: these are of one size
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    of_margin: dict[str, Callable[[Tensor], Tensor]] = {
        "sigmoid": lambda h: -logsigmoid(beta * h),
        "ipo": lambda h: (h - 1 / (2 * beta)) ** 2,
        "hinge": lambda h: torch.relu(1 - beta * h),
        "robust": lambda h: -logsigmoid(beta * h),
    }
    if loss not in of_margin:
        raise FlowError(
            f"There is no DPO loss {loss!r}",
            expected=f"one of {', '.join(DPO_LOSSES)}",
            received=repr(loss),
            do=nearest(loss, DPO_LOSSES),
        )
    if loss == "robust":
        return _smoothed(of_margin[loss], margin, -label_smoothing) / (1 - 2 * label_smoothing)
    return _smoothed(of_margin[loss], margin, label_smoothing)


def _smoothed(of_margin: Callable[[Tensor], Tensor], margin: Tensor, share: float) -> Tensor:
    """(1−|share|) ℓ(h) + share ℓ(−h); without the second half where it counts nothing, so that it cannot be 0 · inf."""
    if not share:
        return of_margin(margin)
    return (1 - abs(share)) * of_margin(margin) + share * of_margin(-margin)


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO (Meng et al., arXiv 2405.14734): no reference, and a margin γ that the chosen must win by.

    −log σ(β log π(y_w)/|y_w| − β log π(y_l)/|y_l| − γ). Others state the margin as the ratio γ/β.

    Args:
        chosen: float ``[num_pairs]``: mean log-prob of the tokens of the chosen sequence, with gradient.
        rejected: float ``[num_pairs]``: the same of the rejected one.
        beta: β > 0.
        gamma: γ ≥ 0, in units of the reward.
        label_smoothing: ε: the loss becomes (1−ε) ℓ(z) + ε ℓ(−z) of the argument z of σ.

    Returns:
        float ``[num_pairs]``.
    """
    from torch.nn.functional import logsigmoid

    return _smoothed(lambda z: -logsigmoid(z), beta * (chosen - rejected) - gamma, label_smoothing)


def log_odds(logprobs: Tensor) -> Tensor:
    """log p/(1−p) of p = exp(``logprobs``), float ``[n]``.

    ``logprobs`` (≤ 0) above :data:`MAX_MEAN_LOGPROB` count as that and have no gradient: p = 1, which float32 rounds to soon,
    would have infinite odds. 1 − p is taken by ``expm1`` or ``log1p``, whichever is exact there.
    """
    import torch

    logprobs = logprobs.clamp(max=MAX_MEAN_LOGPROB)
    near_one = logprobs > -0.6931471805599453  # −log 2
    # Both branches are differentiated: each sees arguments that it can take.
    inner = torch.where(near_one, logprobs, torch.full_like(logprobs, -0.5))
    outer = torch.where(near_one, torch.full_like(logprobs, -1.0), logprobs)
    log_complement = torch.where(near_one, torch.log(-torch.expm1(inner)), torch.log1p(-torch.exp(outer)))
    return logprobs - log_complement


def orpo_loss(chosen: Tensor, rejected: Tensor, *, lam: float = 0.1) -> tuple[Tensor, Tensor]:
    """ORPO (Hong et al., arXiv 2403.07691, eqs. 6 and 7): imitation of the chosen, and the odds ratio to the rejected.

    −log p_w + λ · −log σ(log odds(p_w) − log odds(p_l)), odds(p) = p/(1−p), where p = exp(mean log-prob of the tokens).

    Args:
        chosen: float ``[num_pairs]``: mean log-prob of the tokens of the chosen sequence, with gradient.
        rejected: float ``[num_pairs]``: the same of the rejected one.
        lam: λ ≥ 0.

    Returns:
        losses float ``[num_pairs]`` with gradient, and the log odds ratio ``[num_pairs]``. Both are finite where a mean
        log-prob is 0 (every token certain): see :func:`log_odds`.
    """
    from torch.nn.functional import logsigmoid

    ratio = log_odds(chosen) - log_odds(rejected)
    return -chosen - lam * logsigmoid(ratio), ratio


def kto_reference_point(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KTO's z₀ = max(0, mean of log π(y′|x) − log π_ref(y′|x)) over mismatched completions y′ (arXiv 2402.01306).

    It estimates KL(π ‖ π_ref), from below at 0 as a KL is, and has no gradient.

    Args:
        logprobs: float ``[n]``: log π(y′|x) of prompts with completions of other prompts.
        ref_logprobs: float ``[n]``: the same under the reference.

    Returns:
        float64 scalar; 0 for no completions. It does not depend on the order of rows.
    """
    import torch

    ratios = (logprobs.detach().to(torch.float64) - ref_logprobs.detach().to(torch.float64)).sort().values
    return (ratios.sum() / max(1, len(ratios))).clamp(min=0)


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (Ethayarajh et al., arXiv 2402.01306): the loss of a human who minds losses and gains around z₀.

    With r = log π(y|x) − log π_ref(y|x): λ_D (1 − σ(β(r − z₀))) for a desirable completion, λ_U (1 − σ(β(z₀ − r))) for an
    undesirable one. (The paper adds λ_y − λ_y σ; this is the same.)

    Args:
        logprobs: float ``[num_rows]``: log π(y|x), with gradient.
        ref_logprobs: float ``[num_rows]``: of the reference.
        desirable: ``[num_rows]``, not 0 where the completion is desirable.
        reference_point: z₀, a scalar; see :func:`kto_reference_point`.
        beta: β > 0.
        desirable_weight: λ_D. Where there are n_D and n_U rows, λ_D n_D and λ_U n_U should be of one size.
        undesirable_weight: λ_U.

    Returns:
        float ``[num_rows]``, between 0 and the weight.
    """
    import torch

    gain = logprobs - ref_logprobs - torch.as_tensor(reference_point, dtype=logprobs.dtype)
    liked = desirable != 0
    value = torch.sigmoid(torch.where(liked, -beta * gain, beta * gain))  # 1 − σ(x) is σ(−x)
    return torch.where(liked, desirable_weight * value, undesirable_weight * value)


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float = 0.0,
    *,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
) -> Tensor:
    """The negative log-likelihood of a preference under Bradley and Terry's model (1952), which trains reward models.

    −log σ(s_w − s_l − m) (InstructGPT, arXiv 2203.02155, eq. 1; the margin m of Llama 2, arXiv 2307.09288, eq. 2), and
    c (s_w + s_l)² (Eisenstein et al., arXiv 2312.09244), which holds the scores, known up to a number only, around 0.

    Args:
        chosen: float ``[num_pairs]``: scores of the chosen sequences, with gradient.
        rejected: float ``[num_pairs]``.
        margin: m, a number or ``[num_pairs]``: by how much the chosen must win.
        label_smoothing: ε: the likelihood becomes (1−ε) ℓ(z) + ε ℓ(−z) of the argument z of σ.
        center_coef: c ≥ 0.

    Returns:
        float ``[num_pairs]``.
    """
    from torch.nn.functional import logsigmoid

    losses = _smoothed(lambda z: -logsigmoid(z), chosen - rejected - margin, label_smoothing)
    return losses + center_coef * (chosen + rejected) ** 2 if center_coef else losses
