"""The mathematics of a decoder: tensors in, tensors out."""
