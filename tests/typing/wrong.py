"""Flows that are wrong: type checkers must mark the lines with a red comment, and no others."""

from flowrl import GAE, FunctionReward, Model, PolicyLogprobs, PPOUpdater, Prompts, Rollout, ValueModel, source
from flowrl.nodes import Critic

actor, critic = Model("some/policy"), ValueModel("some/policy")
prompts = source(Prompts, name="prompts", batch_size=64)
rollouts = Rollout(actor, group_size=4)(prompts)
rewards = FunctionReward(len)(rollouts)
values = Critic(critic)(rollouts)
old_logprobs = PolicyLogprobs(actor)(rollouts)

GAE()(rollouts, values, rewards)  # red
GAE()(rollouts, rewards)  # red
Rollout(actor)(rewards)  # red
PPOUpdater(actor)(rollouts, rewards, old_logprobs)  # red
Rollout(actor, group_sise=4)  # red
Rollout("some/policy")  # red
print(rollouts.tokns)  # red
for row in rollouts:  # red
    print(row)
GAE(gamma="1")  # red
rollouts.tokens = rollouts.tokens  # red
if rewards:  # red, pyright only
    pass
