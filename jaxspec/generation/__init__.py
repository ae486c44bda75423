"""Generation: prompts to answers, whole or streamed, in batches; and where two answers part."""
