"""Many requests at once: continuous batching, the OpenAI interface, and a page to try it."""
