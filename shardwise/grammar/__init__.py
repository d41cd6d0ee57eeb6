"""What a request's text must look like, as the tokens that may come next. Knows no model, no process and no torch."""

from shardwise.grammar.grammars import Grammars
from shardwise.grammar.matcher import Matcher

__all__ = ["Grammars", "Matcher"]
