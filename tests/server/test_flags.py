"""The command's options against the settings they stand for, and against their page in the docs."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from shardwise.config import EngineConfig
from shardwise.server.config import ServerConfig
from tests.flags import DOCS, page, parameters

PARSED = ("layout", "split", "stages", "speculate")
"""Said as text."""


def test_every_setting_has_an_option_with_its_default() -> None:
    """Guards against a setting that can't be said, and against an option whose default is another one."""
    said: dict[str, Any] = {each.name: each for each in parameters()}
    for config in (ServerConfig, EngineConfig):
        for field in fields(config):
            if field.name in ("isolate", "profile"):  # always, in the server; never
                continue
            option = said.pop(field.name)
            assert option.help
            if (
                field.name not in PARSED
                and field.default not in (MISSING, None)
                and not isinstance(field.default, tuple)
            ):
                assert option.default == field.default, field.name
    assert set(said) == {
        *("model", "allow_no_key", "generation_config", "log_format", "log_level", "compile_mode", "compile_options"),
        *("model_store", "models", "management_port", "management_host", "metrics_port", "trust_handlers"),
    }


def test_the_page_is_up_to_date() -> None:
    """Guards docs/server-flags.md from the code moving on; `python -m tests.flags` writes it anew."""
    assert DOCS.read_text() == page()
