"""The PPO loop and everything that it calls by name: data, advantages, losses, checkpoints, metrics, the command line."""
