"""Advantages, losses, KL, aggregation: pure functions of tensors."""
