"""Models as TorchServe keeps them: folders and archives with a manifest, a model-config.yaml and a handler. No HTTP."""
