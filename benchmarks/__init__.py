"""Measures linear cross entropy: time, peak memory and error of every provider, case by case."""
