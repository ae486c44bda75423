"""Clients of the OpenAI interface, each as its users run it, against a server with a tiny model: make clients."""
