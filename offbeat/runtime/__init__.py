"""Plan → training on torch.distributed."""
