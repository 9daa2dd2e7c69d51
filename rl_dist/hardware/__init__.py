"""This machine: host, memory, GPUs, plain files."""
