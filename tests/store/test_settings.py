"""model-config.yaml, read strictly, and MAR-INF/MANIFEST.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.store.archive import ArchiveError, Folder
from shardwise.store.manifest import Manifest, read_manifest
from shardwise.store.settings import REFUSED, HandlerKeys, read_settings
from shardwise.store.stored import open_stored
from tests.store.folders import make_folder

EVERY = """
minWorkers: 2
maxWorkers: 3
batchSize: 4
maxBatchDelay: 200
responseTimeout: 300
startupTimeout: 60
deviceType: "gpu"
deviceIds: [2, 3]
parallelType: "tp"
torchrun:
    nnodes: 1
    nproc-per-node: 2
    node-rank: 0
    rdzv-backend: c10d
    monitor-interval: 5
    OMP_NUMBER_THREADS: 2
jobQueueSize: 10
useJobTicket: true
clientTimeoutInMills: 1500
continuousBatching: true
maxRetryTimeoutInSec: 100
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    """Guards each of the frontend's keys against being dropped, as rdzv-conf and others are in TorchServe (c12)."""
    (tmp_path / "model-config.yaml").write_text(EVERY)
    said = read_settings(tmp_path / "model-config.yaml").frontend
    assert (said.min_workers, said.max_workers, said.batch_size, said.max_batch_delay) == (2, 3, 4, 200)
    assert (said.response_timeout, said.startup_timeout, said.device_type, said.device_ids) == (300, 60, "gpu", (2, 3))
    assert (said.parallel_type, said.num_ranks, said.job_queue_size, said.use_job_ticket) == ("tp", 2, 10, True)
    assert (said.client_timeout, said.continuous_batching, said.max_retry_timeout) == (1500, True, 100)
    run = said.torchrun
    assert (run.nnodes, run.nproc_per_node, run.node_rank, run.rdzv_backend) == (1, 2, 0, "c10d")
    assert (run.monitor_interval, run.omp_number_threads) == (5, 2)


WRONG = {
    "minWorkers: two": r"yaml:1: minWorkers must be a whole number, not 'two'",
    "batchSize: 0": r"yaml:1: batchSize must be above 0",
    "batchSize: true": r"yaml:1: batchSize must be a whole number",
    "minWorker: 1": r"yaml:1: unknown key 'minWorker'; did you mean 'minWorkers'",
    "minWorkers: 1\nresponseTimeOut: 3": r"yaml:2: unknown key 'responseTimeOut'; did you mean 'responseTimeout'",
    "minWorkers: 2\nmaxWorkers: 1": r"yaml:2: maxWorkers 1 is less",
    "deviceType: tpu": r"yaml:1: deviceType must be one of cpu, gpu",
    "deviceIds: [1, 1]": r"yaml:1: deviceIds must be different",
    "deviceType: cpu\ndeviceIds: [0]": r"yaml:2: deviceIds are numbers of GPUs",
    "parallelType: dp": r"yaml:1: parallelType must be one of",
    "parallelLevel: 2": r"parallelType must be tp, pp or pptp",
    "parallelType: tp\nparallelLevel: 2\ntorchrun:\n  nproc-per-node: 2": r"yaml:2: parallelLevel 2 and torchrun.nproc",
    "torchrun:\n  nproc: 2": r"yaml:2: unknown key 'nproc'",
    "torchrun:\n  max-restarts: 2": r"yaml:2: torchrun.max-restarts is not taken: .*maxRetryTimeoutInSec",
    "torchrun:\n  node-rank: 1": r"yaml:2: node-rank must be from 0 to 0",
    "sequenceBatching: true": r"yaml:1: sequenceBatching is not taken: sequences that a worker keeps",
    "handler:\n  speculate: 3": r"yaml:2: unknown key 'speculate'; did you mean 'speculate_k'",
    "handler:\n  compile: 1": r"yaml:2: compile must be true or false",
    "handler:\n  speculate_k: 3": r"yaml:2: speculate_k is for drafts",
    "handler:\n  trust_remote_code: true": r"yaml:2: handler.trust_remote_code is not taken",
    "handler:\n  model_path: a\n  converted_ckpt_dir: b": r"converted_ckpt_dir and model_path say the same",
    "handler:\n  low_cpu_mem_usage: false": r"yaml:2: low_cpu_mem_usage false",
    "handler:\n  do_sample: false\n  top_p: 0.5": r"yaml:2: do_sample false",
    "handler:\n  style: gpt-fast": r"yaml:2: handler: style must be one of gpt_fast",
    "handler:\n  temperature: -1": r"yaml:2: handler: temperature must be a number",
    "handler: 3": r"yaml:1: handler must be a section",
    "max_length: 80": r"yaml:1: unknown key 'max_length'; ",
    "pippy:\n  model_type: TV": r"yaml:2: model_type must be HF",
    "pippy:\n  input_names: [pixels]": r"yaml:2: input_names must be \[input_ids\]",
    "minWorkers: 1\nminWorkers: 2": r"yaml:2: 'minWorkers' is given twice",
}


@pytest.mark.parametrize("yaml", WRONG)
def test_what_cannot_be_honoured_is_an_error(tmp_path: Path, yaml: str) -> None:
    """Guards against silent misconfiguration (c8, c18): the error has the line, and the nearest key or the remedy."""
    folder = make_folder(tmp_path / "m", yaml)
    with pytest.raises(ValueError, match=WRONG[yaml]):
        open_stored(folder)


def test_refused_keys_are_not_taken_elsewhere() -> None:
    """Guards against a key that is both refused and read."""
    keys = set(HandlerKeys.__dataclass_fields__)
    assert not keys & {name.rpartition(".")[2] for name in REFUSED if name.startswith("handler.")}


def test_manifest(tmp_path: Path) -> None:
    """Guards against a manifest's lies: unknown keys, wrong types, keys given twice, files outside of the folder."""
    folder = Folder(tmp_path)
    assert read_manifest(folder) == Manifest()
    (tmp_path / "MAR-INF").mkdir()
    file = tmp_path / "MAR-INF" / "MANIFEST.json"
    model = {"modelName": "m", "modelVersion": "2.0", "handler": "gpt_fast", "configFile": "../x.yaml"}
    file.write_text(json.dumps({"createdOn": "today", "runtime": "python3", "model": model, "archiverVersion": "0.12"}))
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.version, manifest.handler) == ("m", "2.0", "gpt_fast")
    assert manifest.document["model"] == model
    with pytest.raises(ArchiveError, match="leads out"):
        open_stored(tmp_path)
    wrong = {
        '{"model": {"modelName": "m", "modelName": "n"}}': "given twice",
        '{"model": {"modelname": "m"}}': "unknown key 'modelname'; did you mean 'modelName'",
        '{"model": {"modelName": 3}}': "model.modelName must be a text",
        '{"model": {}, "runtime": "LSP"}': "runtime 'LSP'",
        '{"model": {"envelope": "json"}}': "envelope",
        '{"model": []}': "object model",
        "[": "not valid JSON",
        '{"model": {}, "description": NaN}': "NaN is no JSON",
        '{"model": ' + "[" * 100_000: "nested too deeply|not valid JSON",
    }
    for text, error in wrong.items():
        file.write_text(text)
        with pytest.raises(ArchiveError, match=f"MANIFEST.json: .*({error})"):
            read_manifest(folder)
