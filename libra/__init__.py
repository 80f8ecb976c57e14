"""The library under Libra's control plane: configuration, decisions, data, weights, trainer."""
