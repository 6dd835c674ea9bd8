"""Simulators trained on measured plans to rank others (AutoSync's linear, RNN and GAT models)."""
