"""A model, a cluster and what is known of their speed → the best Strategy, or the Frontier of the good ones."""
