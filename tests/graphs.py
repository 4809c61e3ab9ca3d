"""Graphs to draw, made by hand."""

from __future__ import annotations

import networkx as nx


def ppo_graph(elided: bool = False) -> nx.MultiDiGraph:
    """The PPO flow of the design, as RLFlow.graph gives it."""
    graph = nx.MultiDiGraph()

    def add(label: str, kind: str, *models: str, **settings: str) -> None:
        graph.add_node(
            label,
            title=label.split("#")[0],
            kind=kind,
            settings={**{f"model{i}": m for i, m in enumerate(models)}, **settings},
            models=models,
            where=f"recipe.py:{len(graph) + 10}",
            elided=elided and label == "PolicyLogprobs#0",
        )

    add("prompts", "source", batch_size="64")
    add("Rollout#0", "rollout", "actor", group_size="4")
    add("MathReward#0", "reward")
    add("Critic#0", "critic", "critic")
    add("PolicyLogprobs#0", "logprobs", "actor")
    add("ReferenceLogprobs#0", "logprobs", "actor.frozen")
    add("GAE#0", "advantage", gamma="1.0", lam="0.95")
    add("PPOLoss#0", "loss", clip="0.2")
    add("Updater#0", "updater", "actor", epochs="2")
    add("ValueLoss#0", "loss")
    add("Updater#1", "updater", "critic")

    def edge(source: str, type_name: str, **targets: str) -> None:
        for argument, target in targets.items():
            key = f"data:{argument}:{target}"
            graph.add_edge(source, target, key=key, kind="data", argument=argument, type=type_name, path="")

    edge("prompts", "Prompts", prompts="Rollout#0")
    for target in ("MathReward#0", "Critic#0", "PolicyLogprobs#0", "ReferenceLogprobs#0", "GAE#0", "PPOLoss#0"):
        edge("Rollout#0", "Rollouts", rollouts=target)
    edge("Rollout#0", "Rollouts", rollouts="ValueLoss#0")
    edge("MathReward#0", "Rewards", rewards="GAE#0")
    edge("Critic#0", "Values", values="GAE#0")
    edge("Critic#0", "Values", values="ValueLoss#0")
    edge("PolicyLogprobs#0", "OldLogprobs", old_logprobs="GAE#0")
    edge("PolicyLogprobs#0", "OldLogprobs", old_logprobs="PPOLoss#0")
    edge("ReferenceLogprobs#0", "RefLogprobs", ref_logprobs="GAE#0")
    edge("GAE#0", "Advantages", advantages="PPOLoss#0")
    edge("GAE#0", "Advantages", advantages="ValueLoss#0")
    edge("PPOLoss#0", "LossTerm", terms="Updater#0")
    edge("ValueLoss#0", "LossTerm", terms="Updater#1")
    for writer, reader, model in (
        ("Updater#0", "Rollout#0", "actor"),
        ("Updater#0", "PolicyLogprobs#0", "actor"),
        ("Updater#1", "Critic#0", "critic"),
    ):
        graph.add_edge(writer, reader, key=f"weights:{model}", kind="weights", model=model, staleness=0)
    return graph
