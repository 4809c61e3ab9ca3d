"""The derive pass: what a flow implies. Which calls need not run, because their result is known to equal another."""

from __future__ import annotations

from flowrl.flow import RLFlow
from flowrl.graph import Call
from flowrl.models import Model
from flowrl.nodes.logprobs import PolicyLogprobs
from flowrl.nodes.loss import Loss
from flowrl.nodes.updater import Updater


def elided_calls(flow: RLFlow) -> dict[str, str]:
    """Labels of calls to leave out, with the reason.

    ``PolicyLogprobs(actor)`` equals the current policy's own log-probs, detached, when only loss terms of the actor's
    updater read it, and that updater takes a single optimiser step on the batch: the first step sees the very weights that
    the old log-probs were computed with. The engine is the same, and so is the forward pass.
    """
    users: dict[int, list[Call]] = {}
    for call in flow.calls:
        for _, ref in call.inputs():
            users.setdefault(id(ref._call), []).append(call)
    outputs = {id(ref._call) for ref in flow.outputs}
    out: dict[str, str] = {}
    for call in flow.calls:
        if not isinstance(call.node, PolicyLogprobs) or id(call) in outputs:
            continue
        updaters = {
            id(user): user
            for loss in users.get(id(call), [])
            for user in (users.get(id(loss), []) if isinstance(loss.node, Loss) and "old_logprobs" in loss.arguments else [loss])
        }
        if len(updaters) != 1:
            continue
        updater = next(iter(updaters.values())).node
        if (
            isinstance(updater, Updater)
            and isinstance(updater.model, Model)
            and updater.model is call.node.model
            and updater.epochs == 1
            and updater.num_minibatches == 1
            and call.node.temperature is None
        ):
            label = flow.label(next(iter(updaters.values())))
            out[flow.label(call)] = (
                f"it equals the current policy in the single optimiser step of {label}; "
                "the loss takes the current log-probs, detached"
            )
    return out
