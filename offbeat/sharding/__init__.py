"""The axes along which operators can be split, and how tensors change their layout."""
