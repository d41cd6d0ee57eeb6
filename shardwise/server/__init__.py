"""The OpenAI-compatible server: HTTP on one side, the service that runs the engines on the other."""
