"""From a flow and a cluster to a Plan: check, derive, estimate, place, reshard, schedule."""
