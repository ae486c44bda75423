"""Prefill, step, acceptance, sampling, the jitted loop, streaming."""
