"""An operator and layouts → the axes along which it can be split, and how tensors get from one layout to another."""
