"""Prompts: sources, order, rendering."""
