"""Record a running job: an aligned Timeline and fitted costs."""
