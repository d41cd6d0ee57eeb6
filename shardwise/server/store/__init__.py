"""TorchServe's HTTP world over a model store: predictions, management and metrics of several models in one server."""
