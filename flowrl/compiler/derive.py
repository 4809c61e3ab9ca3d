"""The derive pass: what a flow implies. Which calls need not run, because their result is known to equal another."""

from __future__ import annotations

from flowrl.flow import RLFlow
from flowrl.graph import Call, Ref
from flowrl.models import Model
from flowrl.nodes.logprobs import PolicyLogprobs
from flowrl.nodes.loss import Loss, TokenLoss
from flowrl.nodes.updater import Updater

Uses = dict[int, list[tuple[Call, Ref]]]


def elided_calls(flow: RLFlow) -> dict[str, str]:
    """Labels of calls to leave out, with the reason.

    ``PolicyLogprobs(actor)`` equals the current policy's own log-probs, detached, when only loss terms of the actor's
    updater read it, and that updater takes a single optimiser step on the batch: the first step sees the very weights
    that the old log-probs were computed with. The engine is the same, and so is the forward pass. ``TokenLoss.sums``
    then fills the values in, so no loss has to know.
    """
    uses: Uses = {}
    for call in flow.calls:
        for _, ref in call.inputs():
            uses.setdefault(id(ref._call), []).append((call, ref))
    outputs = {id(ref._call) for ref in flow.outputs}
    out: dict[str, str] = {}
    for call in flow.calls:
        updater = _only_updater(call, uses, outputs)
        if updater is not None and isinstance(updater.node, Updater) and _sees_same_weights(call, updater.node):
            out[flow.label(call)] = (
                f"it equals the current policy in the single optimiser step of {flow.label(updater)}; "
                "the loss takes the current log-probs, detached"
            )
    return out


def _only_updater(call: Call, uses: Uses, outputs: set[int]) -> Call | None:
    """The one call that takes all loss terms which read these old log-probs; None where somebody else reads them."""
    takers: dict[int, Call] = {}
    for loss, ref in uses.get(id(call), []):
        if not _fills_old_logprobs(loss) or ref._path or id(loss) in outputs:
            return None
        takers.update({id(taker): taker for taker, _ in uses.get(id(loss), [])})
    return next(iter(takers.values())) if len(takers) == 1 and id(call) not in outputs else None


def _fills_old_logprobs(call: Call) -> bool:
    """Whether this is a loss that is given the current log-probs where the old ones were left out, and looks at them
    nowhere else."""
    loss = type(call.node)
    return issubclass(loss, TokenLoss) and loss.sums is TokenLoss.sums and loss.prepare is Loss.prepare


def _sees_same_weights(call: Call, updater: Updater) -> bool:
    node = call.node
    return (
        isinstance(node, PolicyLogprobs)
        and isinstance(node.model, Model)
        and node.model is updater.model
        and node.temperature is None
        and updater.epochs == 1
        and updater.num_minibatches == 1
    )
