"""Attention backends that read through the page table."""
