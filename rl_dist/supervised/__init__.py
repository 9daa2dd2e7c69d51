"""Supervised training and evaluation of any module over ranks."""
