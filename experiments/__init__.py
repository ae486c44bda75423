"""The papers' tables on the embedded model."""
