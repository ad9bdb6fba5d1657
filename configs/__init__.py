"""Experiment configuration: Hydra YAML groups and the dataclasses that they are validated against."""
