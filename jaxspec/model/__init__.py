"""The frozen decoder, its cache, and rows that it runs."""
