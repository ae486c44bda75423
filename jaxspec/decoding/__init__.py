"""Prefill, step, acceptance, the jitted loop, streaming."""
