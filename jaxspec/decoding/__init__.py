"""The step: drafts, the contract of methods, trees, noise, shapes, acceptance, the jitted loop."""
