"""Meshes, sharding, several processes, preemption."""
