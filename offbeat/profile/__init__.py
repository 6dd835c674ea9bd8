"""A running job → aligned Timeline and cost fits."""
