"""Samples answers by vLLM's OpenAI-compatible servers, started here or found at addresses. Imports torch.

What is sampled is from the round's weights: a server is given a folder whose name has their digest, and must list it.
A server that loads adapters gets the folder of a round's adapter by a request, and one that reloads its weights the
folder of the model; any other is started with the folder.
"""

import contextlib
import copy
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers import GenerationConfig

from cookbook.commands.rounds import rounds_folder
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.sampling import Answer, answer_ends
from cookbook.commands.shared.find_model import ADAPTER
from cookbook.config.outside_words import VLLM, addresses, has_adapters, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.facts.language_part import open_config
from cookbook.facts.model_files import GENERATION, read_generation_config, read_tokenizer
from cookbook.start.in_rounds import KEY
from cookbook.system.console import say
from cookbook.system.files import RecipeError, first_line, make_folder
from cookbook.system.gpus import InstalledGpu, read_driver, visible_gpus
from cookbook.system.masking import may_have_secret
from cookbook.system.signals import die_with_parent
from cookbook.training.adapters.base_model import BASE_RECORD, Base

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3600.0
"""For one answer, which may wait for the others of its batch."""
START_SECONDS = 3600.0
"""For vLLM to read a model and to compile it."""
END_SECONDS = 60.0
LOG = "vllm.log"
INVARIANCE = "VLLM_BATCH_INVARIANT"
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
CALL, EMPTY_CACHE = "/collective_rpc", "/reset_prefix_cache"
"""Requests of vLLM's development mode (0.32.0, entrypoints/serve/dev), which a key does not guard."""
LEAST_RANK = 8
"""vLLM's --max-lora-rank is one of a few numbers, among which are the powers of two from 8 to 512 (0.32.0)."""
NUM_PROBED, PROBED_TOKENS = 8, 16
"""Prompts of a probe, and the most tokens of each answer."""
NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Written out, as a folder's generation_config.json fills in what is not. Others of a server are refused."""


def check(recipe: Recipe) -> None:
    """Check the sampler before anything is sampled; a server is not asked if the round to be resumed has its answers.

    Raises:
        RecipeError: vLLM is not installed, no server answers, or an adapter that cannot be merged.
    """
    rounds, adapter = recipe.rounds, recipe.adapter
    assert rounds is not None
    numbered = (Round(Path(recipe.run.output_dir), number) for number in range(1, rounds.num_rounds + 1))
    begun = next((current for current in numbered if not current.is_over), None)
    if not is_address(rounds.sampler):
        _executable()
    elif begun is not None and not begun.samples.is_file() and not begun.unscored.is_file():
        for address in addresses(rounds.sampler):
            Client(address, address).models()
    if adapter is not None and adapter.path is not None and not (Path(adapter.path) / BASE_RECORD).is_file():
        raise RecipeError(
            f"adapter.path is {adapter.path!r}, another project's, which does not say what its base was, and vLLM would"
            " sample with both as one model; write rounds.sampler: transformers"
        )


@contextmanager
def open_servers(current: Round, model: Path, recipe: Recipe) -> Iterator["Servers"]:
    """The samplers of a round: the server at each address of the recipe, or one that is started for the round.

    Args:
        model: a model's folder, or an adapter's.

    Raises:
        RecipeError: no server of this folder, or it does not start.
    """
    rounds = recipe.rounds
    assert rounds is not None
    with contextlib.ExitStack() as opened:
        clients = [Client(address, address) for address in addresses(rounds.sampler)]
        for client in clients:
            opened.callback(client.close)
        if all(client.loads_adapters() for client in clients) and clients and _goes_beside_base(model, recipe):
            yield Servers([_serve_beside_base(client, current, model, recipe, opened) for client in clients])
            return
        folder = _make_folder(current, model)
        if not clients:
            clients = [opened.enter_context(_start_server(folder, recipe, current.folder / LOG))]
        yield Servers([_serve_whole(client, current, folder, recipe) for client in clients])


@contextmanager
def start_once(model: str, recipe: Recipe, output_dir: Path) -> Iterator[str]:
    """Start a server of the model without an adapter, which loads the adapters of all rounds, or their whole weights;
    its address.

    Raises:
        RecipeError: it does not start, or does not load weights.
    """
    folder, log = Path(model).absolute(), output_dir / "rounds" / LOG
    assert recipe.rounds is not None
    if has_adapters(recipe.rounds.sampler):
        assert recipe.adapter is not None
        rank = max(LEAST_RANK, 1 << (recipe.adapter.rank - 1).bit_length())
        options = ["--max-lora-rank", str(rank), "--max-loras", "1"]
        with _start_server(folder, recipe, log, options, {UPDATING: "True"}) as client:
            yield client.url.geturl()
        return
    # In development mode a server does what anyone asks who reaches it: nobody else may open this folder.
    with tempfile.TemporaryDirectory(prefix="cookbook-") as private:
        path = f"{private}/{VLLM}"
        with _start_server(folder, recipe, log, variables={DEVELOPMENT: "1"}, path=path) as client:
            if not client.reloads():
                raise client.mistake(
                    f"has no {CALL}, by which it would load the weights of a round; take keep_server out"
                )
            yield client.address


@contextmanager
def _start_server(
    folder: Path,
    recipe: Recipe,
    log: Path,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    path: str | None = None,
) -> Iterator["Client"]:
    """A server of a folder that is started here, with the recipe's options.

    Args:
        path: of the socket that it listens at, instead of a port of this machine.
    """
    rounds = recipe.rounds
    assert rounds is not None
    if path is not None:
        address, where = f"unix:{path}", ["--uds", path]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address, where = f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]
    client = Client(address, rounds.sampler)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(recipe.compute_precision, "float32")
    command = [_executable(), "serve", str(folder), *where, "--dtype", dtype]
    command += ["--max-model-len", str(recipe.data.max_length), *options, *shlex.split(rounds.sampler)[1:]]
    set_here = {**invariance(visible_gpus(read_driver().gpus)), **(variables or {})}
    with _start(command, set_here, client, log), contextlib.closing(client):
        yield client


def _goes_beside_base(model: Path, recipe: Recipe) -> bool:
    """Return whether vLLM can have a round's weights as an adapter beside its base, as they are trained."""
    if recipe.adapter is None or recipe.adapter.name != "lora":
        return False
    if not (model / ADAPTER).is_file():
        return True  # the first round's
    base = Base.read(model)
    return not base.new_tokens and base.head is None


def _serve_beside_base(
    client: "Client", current: Round, model: Path, recipe: Recipe, opened: contextlib.ExitStack
) -> "ServedModel":
    """A server that has been told to load the round's adapter, which it drops in the end; of a round without one, its
    base. Whether it computes with this adapter, and this base, is for the proof."""
    assert recipe.rounds is not None
    if not (model / ADAPTER).is_file():
        return _make_served(model, recipe, client, current.number, name=client.base())
    folder = _make_link(current, model)
    if all(listed.get("id") != str(folder) for listed in client.models()):
        client.load(folder)
    opened.callback(client.unload, folder)
    return _make_served(folder, recipe, client, current.number)


def _serve_whole(client: "Client", current: Round, folder: Path, recipe: Recipe) -> "ServedModel":
    """A server that has been told to load the round's weights, if it does that, or has been started with them."""
    if not client.reloads():
        return _make_served(folder, recipe, client, current.number)
    name = client.base()
    client.reload(folder)
    return _make_served(folder, recipe, client, current.number, name=name)


def _make_served(
    folder: Path, recipe: Recipe, client: "Client", number: int, *, name: str | None = None
) -> "ServedModel":
    assert recipe.rounds is not None
    return ServedModel(folder, recipe.rounds, client, number, name=name, chat_template=recipe.data.chat_template)


def _make_link(current: Round, model: Path) -> Path:
    current.folder.mkdir(parents=True, exist_ok=True)
    folder = current.folder_for_server(rounds_folder.weights_digest(model))
    if not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)  # merged for a server of an earlier start
        folder.symlink_to(model.resolve(), target_is_directory=True)
    return folder


def _make_folder(current: Round, model: Path) -> Path:
    """Make the folder that a server reads: a link to the model's, or an adapter and its base merged into one model."""
    from cookbook.run.publish.merged import write_merged
    from cookbook.training.checkpoint.write_model import building

    if not (model / ADAPTER).is_file():
        return _make_link(current, model)
    current.folder.mkdir(parents=True, exist_ok=True)
    folder = current.folder_for_server(rounds_folder.weights_digest(model))
    if folder.is_symlink():
        folder.unlink()  # of a start whose server had the adapter beside its base
    if not folder.is_dir():
        say(f"  writes {folder}, the adapter and its base as one model", flush=True)
        with building(folder) as build:
            write_merged(model, build, None)
    return folder


def _executable() -> str:
    beside = Path(sys.executable).with_name("vllm")
    path = str(beside) if beside.is_file() else shutil.which("vllm")
    if path is None:
        raise RecipeError(
            "rounds.sampler is vllm, and there is no vllm on the PATH; install it, in an environment of its own if its"
            " versions are others, and put that one's bin on the PATH; or write rounds.sampler: transformers"
        )
    return path


def invariance(gpus: list[InstalledGpu], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable by which vLLM's answers do not depend on what it computes beside them, where it can and none is set.

    So a round that was killed while it sampled gets the same answers again. Compute capability 8.0, vLLM 0.32.0,
    docs/features/batch_invariance.md; on a CPU each request would fail.
    """
    can = bool(gpus) and all(gpu.capability is not None and gpu.capability >= (8, 0) for gpu in gpus)
    return {INVARIANCE: "1"} if can and INVARIANCE not in environment else {}


@contextmanager
def _start(command: list[str], variables: dict[str, str], client: "Client", log: Path) -> Iterator[None]:
    """vLLM's server, until it answers; its processes end with the block, or with this process."""
    make_folder(log.parent)
    words = [*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)]
    say(f"  starts {' '.join(words)}; its log: {log}", flush=True)
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,  # Ctrl-C ends this process first, and by it the server
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        client.why_not = lambda: _why_ended(server, log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not client.is_up():
                if why := _why_ended(server, log):
                    raise RecipeError(why)
                if time.monotonic() > deadline:
                    raise RecipeError(f"vllm serve does not answer after {START_SECONDS:g} s; its log: {log}")
                time.sleep(0.5)
            yield
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # what is left of its session
            server.wait()


def _why_ended(server: "subprocess.Popen[bytes]", log: Path) -> str | None:
    if (code := server.poll()) is None:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it wrote nothing")
    return f"vllm serve ended with code {code}: {last.strip()[-300:]}; its log: {log}"


class Client:
    """Asks a server; `close` ends what is being asked."""

    def __init__(self, address: str, sampler: str) -> None:
        """
        Args:
            sampler: the recipe's word for it.
        """
        self.address, self.sampler = address, sampler
        self.url = urlsplit(address.rstrip("/").removesuffix("/v1"))
        self.why_not: Callable[[], str | None] = lambda: None
        """Why a server of ours does not answer."""
        self._open: set[HTTPConnection] = set()
        self._is_closed = False

    def is_up(self) -> bool:
        with contextlib.suppress(RecipeError):
            return bool(self.models())
        return False

    def models(self) -> list[dict[str, Any]]:
        """List the models of the server.

        Raises:
            RecipeError: as `ask`, or it lists nothing.
        """
        reply = self.ask("/v1/models", None, seconds=CONNECT_SECONDS)
        models = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
            raise self.mistake("lists no model at /v1/models; it is no server of OpenAI's form")
        return models

    def base(self) -> str:
        """The name of the one model of the server that is no adapter.

        Raises:
            RecipeError: as `models`, or it has several, or none.
        """
        bases = [listed for listed in self.models() if listed.get("parent") is None]
        if len(bases) != 1:
            raise self.mistake(f"lists {len(bases)} models that are no adapters; start it with one")
        return str(bases[0].get("id"))

    def ask(self, path: str, body: dict[str, Any] | None, *, seconds: float) -> Any:
        """The JSON that the server answers with.

        Args:
            body: for a POST.

        Raises:
            RecipeError: no answer within `seconds`, or another than 200, or none in JSON.
        """
        content = self._content(path, body, seconds=seconds)
        try:
            return json.loads(content)
        except ValueError:
            raise self.mistake(f"answered {path} with what is no JSON: {_words(content)}") from None

    def check_settings(self, given: Collection[str]) -> None:
        """Compare the settings of the server's requests, as it describes them, with those that are given.

        Raises:
            RecipeError: it might fill in another one, a penalty or what a model's folder proposes.
        """
        fields: dict[str, Any] = {}
        with contextlib.suppress(KeyError, TypeError):  # it does not describe them
            fields = self._description()["components"]["schemas"]["CompletionRequest"]["properties"] or {}
        proposed = GenerationConfig().to_dict()
        # A field with a default is not filled in from a model's folder.
        open_fields = {name for name, field in fields.items() if "default" not in field}
        unknown = sorted(name for name in open_fields - {*given} if name.endswith("_penalty") or name in proposed)
        if unknown:
            raise self.mistake(
                f"has requests with {', '.join(unknown)}, which this version does not know how to turn off, and it may"
                " change what is sampled; take a vLLM without"
            )

    def _description(self) -> Any:
        """The description that the server has of its requests; None if it has none."""
        status, content = self._reply("/openapi.json", None, seconds=CONNECT_SECONDS)
        with contextlib.suppress(ValueError):
            return json.loads(content) if status == 200 else None
        return None

    def reloads(self) -> bool:
        """Return whether the server loads weights on request; without its development mode it has no such path."""
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            return {CALL, EMPTY_CACHE} <= self._description()["paths"].keys()
        return False

    def reload(self, model: Path) -> None:
        """Have the server load a model's weights in place of its own, and forget what it computed with those.

        Raises:
            RecipeError: it does not.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        self._content(CALL, body, seconds=START_SECONDS)
        content = self._content(EMPTY_CACHE, {}, seconds=ANSWER_SECONDS)
        is_kept = False
        with contextlib.suppress(ValueError):  # it does not say
            is_kept = json.loads(content) == {"success": False}
        if is_kept:
            raise self.mistake("keeps keys and values of the weights before, as others ask it; ask it alone")

    def loads_adapters(self) -> bool:
        """Return whether the server loads adapters on request; without the variable it has no such path."""
        return self._reply(LOAD, {}, seconds=CONNECT_SECONDS)[0] != 404

    def load(self, adapter: Path) -> None:
        """Have the server load an adapter, under the folder's path as its name.

        Raises:
            RecipeError: it refuses.
        """
        self._content(LOAD, {"lora_name": str(adapter), "lora_path": str(adapter)}, seconds=START_SECONDS)

    def unload(self, adapter: Path) -> None:
        """Have the server drop an adapter, unless it has ended."""
        with contextlib.suppress(RecipeError):
            self._content(UNLOAD, {"lora_name": str(adapter)}, seconds=CONNECT_SECONDS)

    def _content(self, path: str, body: dict[str, Any] | None, *, seconds: float) -> bytes:
        status, content = self._reply(path, body, seconds=seconds)
        if status != 200:
            raise self.mistake(f"answered {status} to {path}: {_words(content)}")
        return content

    def _reply(self, path: str, body: dict[str, Any] | None, *, seconds: float) -> tuple[int, bytes]:
        connection: HTTPConnection
        if self.url.scheme == "unix":
            connection, prefix = _SocketConnection(self.url.path), ""
        else:
            kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
            connection, prefix = kind(self.url.netloc, timeout=CONNECT_SECONDS), self.url.path
        headers = {"Content-Type": "application/json"}
        if may_have_secret(self.url) and (key := os.environ.get(KEY)):
            headers["Authorization"] = f"Bearer {key}"
        self._open.add(connection)
        try:
            if self._is_closed:
                raise ConnectionAbortedError("ended")
            connection.connect()
            connection.sock.settimeout(seconds)
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", prefix + path, text, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, HTTPException) as error:
            why = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else first_line(error)
            raise RecipeError(self.why_not() or self._text(f"does not answer ({why})")) from None
        finally:
            self._open.discard(connection)
            connection.close()

    def mistake(self, what: str) -> RecipeError:
        return RecipeError(self._text(what))

    def _text(self, what: str) -> str:
        return f"rounds.sampler is {self.sampler}, and it {what}"

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


class _SocketConnection(HTTPConnection):
    """A connection to a socket of this machine that has a path."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _words(content: bytes) -> str:
    """The message of an error, in a line."""
    try:
        reply = json.loads(content)
        reply = reply.get("error", reply)
        text = str(reply["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        text = content.decode(errors="replace")
    return " ".join(text.split())[:300]


class ServedModel:
    """A model of a server that samples."""

    def __init__(
        self,
        folder: Path,
        rounds: RoundsSection,
        client: Client,
        number: int,
        *,
        name: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """
        Args:
            name: of the model at the server, where it is not the folder's.
            chat_template: `data.chat_template`.

        Raises:
            RecipeError: the server has not this folder.
        """
        self.rounds, self.client, self.number, self.tokenizer = rounds, client, number, read_tokenizer(folder)
        proposed = read_generation_config(folder) if (folder / GENERATION).is_file() else None
        settings = proposed or GenerationConfig.from_model_config(open_config(str(folder)))
        self.ends = answer_ends(settings, folder, chat_template)
        self.settings = {
            "model": name or self._name_of(folder),
            "max_tokens": rounds.max_completion_length,
            **rounds.sampling,
            **NO_PENALTY,
            "stop_token_ids": self.ends,
            "logprobs": 0,
            "return_token_ids": True,
        }
        client.check_settings(self.settings)

    def _name_of(self, folder: Path) -> str:
        models = self.client.models()
        for listed in models:
            if str(folder) in (listed.get("id"), listed.get("root")):
                return str(listed["id"])
        there = ", ".join(str(listed.get("root") or listed.get("id")) for listed in models)
        raise self.client.mistake(
            f"serves {there}; round {self.number} samples with other weights: start it as `vllm serve {folder}`, and"
            " write the command again"
        )

    def shorten(self) -> "ServedModel":
        """This server for the short answers of a probe."""
        probed = copy.copy(self)
        most = min(self.rounds.max_completion_length, PROBED_TOKENS)
        probed.rounds = self.rounds.model_copy(update={"max_completion_length": most})
        probed.settings = {**self.settings, "max_tokens": most}
        return probed

    def answer(self, prompt: list[int], seed: int) -> Answer:
        body = {**self.settings, "prompt": prompt, "seed": seed}
        reply = self.client.ask("/v1/completions", body, seconds=ANSWER_SECONDS)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self.client.mistake(f"returned {len(choices or [])} answers where one was asked for")
        ids = choices[0].get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise self.client.mistake(
                "returned no token_ids, and a text does not say which tokens were sampled; vLLM returns them"
            )
        most = self.rounds.max_completion_length
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        if len(ids) > most or (end is None and len(ids) < most) or (end is not None and end + 1 < len(ids)):
            raise self.client.mistake(
                f"ended an answer after {len(ids)} tokens (finish_reason {choices[0].get('finish_reason')!r}), neither"
                f" at one of its end tokens {self.ends} nor after {most}"
            )
        try:
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        except OverflowError:  # below 0, or above what a tokenizer counts in; `proof` compares with the model
            raise self.client.mistake(f"returned {ids!r:.200} as the ids of tokens") from None
        logps = self._logps(choices[0].get("logprobs"), len(ids))
        return Answer(ids, text, end is not None, logps, seed=seed)

    def _logps(self, logprobs: Any, count: int) -> list[float] | None:
        """None if the server returns none."""
        if logprobs is None:
            return None
        logps = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(logps, list) or len(logps) != count or not all(_is_log(logp) for logp in logps):
            raise self.client.mistake(f"returned {logps!r:.200} as the log-probabilities of {count} tokens")
        return [min(float(logp), 0.0) for logp in logps]  # rounding may leave one above


class Servers:
    """Servers of one model, which share the prompts."""

    def __init__(self, servers: Sequence[ServedModel]) -> None:
        self.servers, self.tokenizer = servers, servers[0].tokenizer

    def of(self, place: int) -> ServedModel:
        """The server of the prompt at a place of a round, whoever is faster."""
        return self.servers[(self.servers[0].number + place) % len(self.servers)]

    def answers(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        count: int | None = None,
        places: Sequence[int] | None = None,
    ) -> list[list[Answer]]:
        """`count` answers to each prompt, by default `num_generations`, each with a seed of its own.

        Args:
            places: of the prompts in the round, if they are not all of its prompts in order.

        Raises:
            RecipeError: a server fails, or answers otherwise than it was asked.
        """
        rounds = self.servers[0].rounds
        count, size = count or rounds.num_generations, rounds.generation_batch_size
        asked = [
            (self.of(place), ids)
            for place, ids in zip(places or range(len(prompts)), prompts, strict=True)
            for _ in range(count)
        ]
        with ThreadPoolExecutor(size) as pool:
            try:
                futures = [pool.submit(server.answer, ids, seed + i) for i, (server, ids) in enumerate(asked)]
                for done, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    if done % size == 0 or done == len(asked):
                        say(f"  {done:,} of {len(asked):,} answers", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for server in self.servers:
                    server.client.close()
                raise
        flat = [future.result() for future in futures]
        return [flat[start : start + count] for start in range(0, len(flat), count)]


def _is_log(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= 1e-3
