"""Find the best strategy within a budget of real trials (AutoDist's Algorithm 1)."""
