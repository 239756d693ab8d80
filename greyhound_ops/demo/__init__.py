"""A language model trained without and with the rewrite: ``python -m greyhound_ops.demo``."""
