"""Names of a checkpoint to slices of bytes."""
