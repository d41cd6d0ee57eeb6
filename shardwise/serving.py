"""The two ends of a server on the command line: serve and chat. Only reads options; the work is elsewhere."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.config import EngineConfig
from shardwise.options import (
    BatchTokensOption,
    CacheOption,
    ChunkOption,
    CompileModeOption,
    CompileOption,
    CompileOptionsOption,
    ContextOption,
    DeviceOption,
    DtypeOption,
    KernelsOption,
    LayoutOption,
    MemoryOption,
    ModelOption,
    OffloadOption,
    PrefixOption,
    QuantizeOption,
    SequencesOption,
    SpeculateOption,
    SplitOption,
    StagesOption,
    ThreadsOption,
    engine_settings,
    given_in,
)
from shardwise.params import MAX_N
from shardwise.world import find_world

OF_STORES = ("models", "management_port", "management_host", "metrics_port", "trust_handlers")
"""Options of a server of a model store."""
OF_MODELS = ("model", "layout", "split", "stages", "speculate", "served_model_names")
"""Options of a server of one model that each model of a store says for itself."""
KEYS = "SHARDWISE_API_KEY"
"""Environment variable: API keys of the server, several with spaces between them."""


def serve(
    context: typer.Context,
    model: ModelOption = "smollm2",
    layout: LayoutOption = "1",
    host: Annotated[str, typer.Option(help="Address to listen on, and no other.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_names: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Name the model is asked for by, * for any; several times."),
    ] = None,
    api_keys: Annotated[
        list[str] | None,
        typer.Option("--api-key", envvar=KEYS, help="Asked for on every route but health; several times."),
    ] = None,
    allow_no_key: Annotated[
        bool, typer.Option("--allow-no-key", help="Listen beyond this machine without one.")
    ] = False,
    allowed_origins: Annotated[
        list[str] | None, typer.Option("--allowed-origin", help="Browser origin that may call; several times.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Name that clients may know us by; several times.")
    ] = None,
    max_queue_requests: Annotated[int, typer.Option(help="Most continuations queued or running; then 429.")] = 1024,
    max_queue_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens that all of them may need; then 429. Default: what --max-num-seqs contexts hold."
        ),
    ] = None,
    queue_timeout: Annotated[float, typer.Option(help="Seconds that a request may wait for its turn.")] = 120.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take in all.")] = 3600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests may go on after SIGTERM.")] = 30.0,
    header_timeout: Annotated[float, typer.Option(help="Seconds for a request's headers to come.")] = 30.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a request's body to come.")] = 60.0,
    write_timeout: Annotated[float, typer.Option(help="Seconds that a client may take nothing.")] = 30.0,
    max_body: Annotated[int, typer.Option(help="Longest body in bytes.")] = 8 * 2**20,
    max_header: Annotated[int, typer.Option(help="Longest block of headers in bytes.")] = 16 * 2**10,
    max_headers: Annotated[int, typer.Option(help="Most headers of a request.")] = 64,
    max_connections: Annotated[int, typer.Option(help="Most clients connected at once.")] = 10_000,
    max_n: Annotated[int, typer.Option(help="Most continuations of a prompt.")] = MAX_N,
    max_prompts: Annotated[int, typer.Option(help="Most prompts in a request.")] = 64,
    max_logprobs: Annotated[int, typer.Option(help="Most likely tokens told for each.")] = 20,
    tool_parser: Annotated[str | None, typer.Option(help="How the model writes tool calls.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="How the model marks its reasoning.")] = None,
    chat_template_kwargs: Annotated[
        list[str] | None,
        typer.Option("--chat-template-kwarg", help="Template variable that requests may set; several times."),
    ] = None,
    trust_request_chat_template: Annotated[bool, typer.Option(help="Let requests bring chat templates.")] = False,
    allow_special_tokens: Annotated[bool, typer.Option(help="Read special tokens out of prompts' texts.")] = False,
    share_prefix_cache: Annotated[bool, typer.Option(help="Share cached KV between API keys.")] = False,
    generation_config: Annotated[bool, typer.Option(help="Take defaults from generation_config.json.")] = True,
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    kernels: KernelsOption = "auto",
    transport: Annotated[str, typer.Option(help="Between ranks: auto, shm, gloo or nccl.")] = "auto",
    threads: ThreadsOption = None,
    split: SplitOption = None,
    stages: StagesOption = None,
    max_model_len: ContextOption = None,
    kv_tokens: CacheOption = None,
    max_batch_tokens: BatchTokensOption = 512,
    max_chunk: ChunkOption = 512,
    max_num_seqs: SequencesOption = 256,
    prefix_cache: PrefixOption = True,
    speculate: SpeculateOption = None,
    compile: CompileOption = None,
    compile_mode: CompileModeOption = None,
    compile_options: CompileOptionsOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds for ranks to become ready.")] = 300.0,
    step_timeout: Annotated[float, typer.Option(help="Seconds for ranks to finish a step.")] = 300.0,
    restart_timeout: Annotated[
        float | None, typer.Option(help="Seconds in which ranks that don't start are tried again; default: five times.")
    ] = None,
    device_ids: Annotated[str | None, typer.Option(help="GPUs of a host that ranks take, such as 2,3.")] = None,
    log_prompts: Annotated[bool, typer.Option(help="Write the bodies of requests into the log.")] = False,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    model_store: Annotated[
        Path | None, typer.Option(help="Serve the models in this directory, as TorchServe does, instead of one model.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--models", help="Of the store: all (as by default), none, NAME or NAME=ARCHIVE; several times."),
    ] = None,
    management_port: Annotated[int, typer.Option(help="Port on which a store's models are managed.")] = 8081,
    management_host: Annotated[str, typer.Option(help="Address of that port, and no other.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None, typer.Option(help="One more port, at the same address, for a store's /metrics alone.")
    ] = None,
    trust_handlers: Annotated[
        bool, typer.Option("--trust-handlers", help="Run the code of handlers that a store's models bring.")
    ] = False,
) -> None:
    """Serve a model over HTTP, the way OpenAI's API does; or a model store, the way TorchServe does."""
    from shardwise.server.config import ServerConfig
    from shardwise.server.serve import Job, run

    os.environ.pop(KEYS, None)  # ranks are not to know them
    given = given_in(context)
    _check_store(given)
    asked: dict[str, Any] = {item.name: given[item.name] for item in fields(ServerConfig) if item.name in given}
    asked |= {name: tuple(value) for name, value in asked.items() if isinstance(value, list)}
    server = ServerConfig(**asked)
    if model_store is not None:
        from shardwise.server.store.serve import StoreJob
        from shardwise.server.store.serve import run as run_store

        said = engine_settings(given, layout, split, stages, speculate)
        run_store(
            StoreJob(
                model_store,
                tuple(models or ("all",)),
                server,
                {name: value for name, value in said.items() if name in given},
                management_host,
                management_port,
                metrics_port,
                trust_handlers,
                generation_config,
                allow_no_key,
                log_format,
                log_level,
            )
        )
    engine = EngineConfig(isolate=True, **engine_settings(given, layout, split, stages, speculate))
    run(Job(model, engine, server, generation_config, allow_no_key, log_format, log_level))


def _check_store(given: dict[str, Any]) -> None:
    """Raise ValueError for options that go only with a model store, or not with one."""
    if "model_store" not in given:
        if stray := [name for name in OF_STORES if name in given]:
            raise ValueError(f"--{stray[0].replace('_', '-')} is for model stores: it goes with --model-store DIR")
    elif find_world(os.environ) is not None:
        raise ValueError(
            "a model store starts the ranks of its models itself, on one host: start it without torchrun, or serve one "
            "model on all hosts with --model"
        )
    elif stray := [name for name in OF_MODELS if name in given]:
        name = stray[0].replace("_names", "_name").replace("_", "-")
        raise ValueError(
            f"--{name} doesn't go with --model-store: each model's "
            "model-config.yaml says that, and its name is the one that it is registered by"
        )


def chat(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="Of a server, such as http://127.0.0.1:8000/v1; none loads it here.")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar=KEYS, help="What the server asks for.")] = "",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The server's name for it, or what to load.")
    ] = None,
    system: Annotated[str, typer.Option(help="Tell the model who it is.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest that hold this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this likely relative to the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    generation_config: Annotated[bool, typer.Option(help="Take defaults from generation_config.json.")] = True,
    layout: LayoutOption = "1",
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    kernels: KernelsOption = "auto",
    threads: ThreadsOption = None,
    split: SplitOption = None,
    stages: StagesOption = None,
    max_model_len: ContextOption = None,
    kv_tokens: CacheOption = None,
    prefix_cache: PrefixOption = True,
    speculate: SpeculateOption = None,
    compile: CompileOption = None,
    compile_mode: CompileModeOption = None,
    compile_options: CompileOptionsOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
) -> None:
    """Talk with a model, of a server or loaded here; /help tells of commands."""
    from shardwise.chat import Job, run
    from shardwise.conversation import PARAMS

    given = given_in(context)
    settings = engine_settings(given, layout, split, stages, speculate)
    EngineConfig(**settings)
    settings = {name: value for name, value in settings.items() if name in given}
    params = {name: given[name] for name in PARAMS if name in given}
    key = [*api_key.split(), ""][0]  # the variable may hold several, as for the server
    sys.exit(run(Job(url, key, model, settings, generation_config, system, params)))
