"""The contract of methods: drafts, trees, noise, adapters. Knows neither decoding nor a method."""
