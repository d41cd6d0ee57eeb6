"""Text to token ids and back, in the front process."""

from shardwise.tokenizer.detokenizer import Detokenizer
from shardwise.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
