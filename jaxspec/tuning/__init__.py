"""What a machine's steps cost, and which tree is fastest on it."""
