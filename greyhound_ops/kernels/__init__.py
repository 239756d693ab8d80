"""Triton kernels and their launchers; no ``torch.library``, no autograd in here."""
