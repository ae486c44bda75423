"""Comparing, measuring and reporting what the methods do."""
