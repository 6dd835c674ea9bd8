"""A model, a cluster and a budget of trials → the best strategy that was measured (AutoDist's Algorithm 1)."""
