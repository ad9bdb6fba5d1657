"""Rollout engines that are HTTP servers."""
