"""Shared by tests of other folders: a package, which no installed one of its name can hide."""
