"""Finds or compiles the library of C kernels: knows compilers, flags and a cache, not what they compute.

torch is not imported, so the front process may build before it starts its ranks.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No flag here lets a compiler change a result: contraction is off and the two -fno- only drop errno and traps."""
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "armv8-a": {"asimd"},
}
"""What prebuilt libraries are made for, best first, and the CPU flags (as Linux names them) that each needs."""
TIMEOUT = 300.0


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why and what to do."""


def library() -> tuple[Path, str]:
    """Path of a library that runs on this machine, and how it came to be: prebuilt, else compiled once and cached.

    Many processes may call this at once. Raises BuildError.
    """
    flags = cpu_flags()
    for level, needed in LEVELS.items():
        prebuilt = HERE / prebuilt_name(level)
        if needed <= flags and prebuilt.is_file():
            return prebuilt, f"prebuilt for {level}"
    compiler = find_compiler()
    version = _run([*compiler, "--version"]).splitlines()[0]
    digest = _digest(" ".join(compiler), version, platform.machine(), *sorted(flags))
    target = cache_directory() / f"kernels-{digest}.so"
    if not target.is_file():
        compile_library(target, "native", compiler)
    return target, f"compiled for this CPU by {version}"


def load() -> tuple[ctypes.CDLL, str]:
    """The `library` in this process, and how it came to be; one that is damaged in the cache is compiled once more.

    Raises BuildError.
    """
    path, origin = library()
    try:
        return ctypes.CDLL(str(path)), origin
    except OSError as error:
        if path.parent != cache_directory():
            raise BuildError(f"the kernels can't be loaded: {error}") from error
    compile_library(path, "native")  # takes its place at once, for others may be loading it
    try:
        return ctypes.CDLL(str(path)), origin
    except OSError as error:
        raise BuildError(f"the kernels can't be loaded: {error}") from error


def have_library() -> bool:
    """Can a `library` be loaded here? Then it is there from now on."""
    try:
        loaded, _ = load()
    except BuildError:
        return False
    _ctypes.dlclose(loaded._handle)  # torch's OpenMP may not be in this process yet, which it must be linked to
    return True


def cache_directory() -> Path:
    """Where all that is made for this user and machine is kept; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def prebuilt_name(level: str) -> str:
    """File name, beside the sources, of the library built from exactly these sources for a level of ``LEVELS``."""
    return f"kernels-{level}-{_digest(level)}.so"


def compile_library(target: Path, march: str, compiler: list[str] | None = None) -> None:
    """Compile every C file of this room for ``-march=<march>`` into ``target``, which appears whole or not at all."""
    compiler = compiler or find_compiler()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
            objects = [Path(scratch, f"{source.stem}.o") for source in _sources(".c")]
            commands = [
                [*compiler, *FLAGS, f"-march={march}", "-c", str(source), "-o", str(made)]
                for source, made in zip(_sources(".c"), objects, strict=True)
            ]
            _run_all(commands)
            library = Path(scratch, "library.so")
            _run_all([[*compiler, *FLAGS, "-shared", *map(str, objects), "-o", str(library), "-lm"]])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"the kernels cannot be compiled into {target.parent}: {error}; set XDG_CACHE_HOME") from error


def _run_all(commands: list[list[str]]) -> None:
    """Run compilers side by side; whatever happens, none of them is left running. Raises BuildError, and OSError."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as messages:
        try:
            for command in commands:  # each in a group of its own, since a compiler starts others
                running.append(subprocess.Popen(command, stderr=messages, start_new_session=True))  # noqa: PERF401
            codes = [process.wait(TIMEOUT) for process in running]
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{commands[0][0]} took more than {TIMEOUT:.0f} s on the kernels") from error
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(codes):
            messages.seek(0)
            raise BuildError(f"{commands[0][0]} failed on the kernels: {messages.read(2000).strip()}")


def find_compiler() -> list[str]:
    """The command of a C compiler: $CC, or cc, gcc or clang. Raises BuildError."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        command = name.split()
        if shutil.which(command[0]):
            return command
    raise BuildError("there is no C compiler (cc, gcc or clang, or named by CC): install one, for example gcc")


def cpu_flags() -> set[str]:
    """Instruction sets of this CPU as Linux names them; elsewhere just the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {platform.machine(), platform.processor()}
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in HERE.iterdir() if path.suffix in suffixes)


def _digest(*facts: str) -> str:
    digest = hashlib.sha256("\0".join((*facts, *FLAGS)).encode())
    for path in _sources(".c", ".h"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr[:2000].strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
