"""Search for the best Strategy for a model on a cluster, or for the Frontier of good ones."""
