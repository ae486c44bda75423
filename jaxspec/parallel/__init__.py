"""Meshes, sharding, several processes, stopping."""
