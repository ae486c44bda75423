"""Costs of a machine's steps, and the fastest tree on it."""
