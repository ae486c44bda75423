"""The frozen decoder, its cache, and how weights and tokenizers get in."""
