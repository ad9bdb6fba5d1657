"""Scores for episodes: a served reward model, verifiers, and functions of the user's own."""
