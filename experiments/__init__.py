"""The papers' tables on the default model."""
