"""Train by a Plan on torch.distributed."""
