"""From prompts to answers: jobs and batches, whole or streamed, and where two answers part."""
