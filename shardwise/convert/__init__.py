"""Checkpoints into other checkpoints: whatever can be read in, indexed safetensors out. Runs no model."""
