"""Plans that were measured → a simulator that ranks others (AutoSync's linear, RNN and GAT models)."""
