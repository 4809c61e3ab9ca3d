"""Pure math on ragged tensors: advantages, losses, KL estimators, aggregation. No node, no model, no state."""
