"""A stand-in for vLLM's server, where vLLM is not installed: transformers samples, and says how probable that was.

As a program it takes `serve FOLDER --host H --port P`, or `--uds PATH`, and loads adapters as vLLM does with
`--enable-lora` and its variable, and weights as in vLLM's development mode; other options it leaves alone. With
`--keeps-its-weights`, which is no option of vLLM, it says that it loaded an adapter and did not.
"""

import copy
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig


class StandIn(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, path: str | None = None, host: str = "127.0.0.1") -> None:
        """
        Args:
            path: of a socket to listen at instead of a port.
        """
        self.address_family = socket.AF_INET if path is None else socket.AF_UNIX
        super().__init__((host, port) if path is None else path, _Handler)  # type: ignore[arg-type]
        self.folder, self.model = "", None
        self.fields: dict[str, Any] | None = None
        """Fields of a request, as /openapi.json describes them."""
        self.loads = False
        """True if adapters may be loaded by a request."""
        self.reloads = False
        """True if it has the requests of vLLM's development mode."""
        self.prefixes: dict[tuple[int, ...], Any] = {}
        """The prefix cache: which model computed keys and values of a prompt."""
        self.adapters: dict[str, Any] = {}
        self.told: list[tuple[str, str]] = []
        """Paths, and adapters or folders, of what it was told to load and to drop."""
        self.open_adapter: Callable[[str], Any] = self._open_adapter
        self.asked: list[dict[str, Any]] = []
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        """Change of an answer before it is sent."""
        self.lock = threading.Lock()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET:
            super().server_bind()
        else:
            TCPServer.server_bind(self)  # HTTPServer's looks for a name of the host

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, folder: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.folder = folder

    def _open_adapter(self, folder: str) -> Any:
        return PeftModel.from_pretrained(copy.deepcopy(self.model), folder).merge_and_unload()

    def reload(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def empty_cache(self) -> bool:
        self.prefixes.clear()
        return True

    def tell(self, path: str, asked: dict[str, Any]) -> tuple[int, str]:
        """Answer a request about adapters or weights as vLLM 0.32.0 does."""
        if self.reloads and path == "/collective_rpc":
            assert asked["method"] == "reload_weights"
            self.told.append((path, asked["kwargs"]["weights_path"]))
            self.reload(asked["kwargs"]["weights_path"])
            return 200, json.dumps({"results": [None]})
        if self.reloads and path == "/reset_prefix_cache":
            return 200, json.dumps({"success": self.empty_cache()})
        if not self.loads or path not in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return 404, json.dumps({"detail": "Not Found"})
        if "lora_name" not in asked:
            return 400, json.dumps({"error": {"message": "1 validation errors"}})
        name = asked["lora_name"]
        self.told.append((path, name))
        if (name in self.adapters) == (path == "/v1/load_lora_adapter"):
            return 400, json.dumps({"error": {"message": f"The lora adapter '{name}' is there, or not."}})
        if path == "/v1/unload_lora_adapter":
            del self.adapters[name]
        else:
            self.adapters[name] = self.open_adapter(asked["lora_path"])
        return 200, f"Success: LoRA adapter '{name}' ..."

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([asked["prompt"]])
        settings = GenerationConfig(
            do_sample=True,
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            top_k=asked["top_k"],
            max_new_tokens=asked["max_tokens"],
            eos_token_id=asked["stop_token_ids"],
            pad_token_id=asked["stop_token_ids"][0],
            output_logits=True,
            return_dict_in_generate=True,
        )
        with self.lock, torch.inference_mode():
            self.asked.append(asked)
            torch.manual_seed(asked["seed"])
            model = self.adapters.get(asked["model"], self.model)
            model.generation_config = GenerationConfig()
            before = self.prefixes.setdefault(tuple(asked["prompt"]), model) if self.reloads else model
            # Of a prompt that other weights have read: their keys and values, but for its last token's.
            past = (
                {} if before is model else {"past_key_values": before(prompt[:, :-1], use_cache=True).past_key_values}
            )
            generated = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, **past
            )
        ids = generated.sequences[0, prompt.shape[1] :].tolist()
        logps = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(generated.logits, ids, strict=True)]
        reason = "stop" if ids[-1] in asked["stop_token_ids"] else "length"
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason, "seed": asked["seed"]}
        return {"choices": [choice | {"logprobs": {"token_logprobs": logps}}]}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/openapi.json":
            request = {"CompletionRequest": {"properties": self.server.fields}}
            paths = {"/collective_rpc": {}, "/reset_prefix_cache": {}} if self.server.reloads else {}
            is_silent = self.server.fields is None and not self.server.reloads
            self._send(404 if is_silent else 200, {"components": {"schemas": request}, "paths": paths})
            return
        adapters = [{"id": name, "root": name, "parent": "a model"} for name in self.server.adapters]
        self._send(200, {"data": [{"id": "a model", "root": self.server.folder, "parent": None}, *adapters]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._send(*self.server.tell(self.path, asked))
        elif asked["model"] not in ("a model", *self.server.adapters):
            self._send(404, {"error": {"message": f"The model `{asked['model']}` does not exist."}})
        elif (answer := self.server.spoil(self.server.complete(asked))) is None:
            self.close_connection = True
        else:
            self._send(500 if "error" in answer else 200, answer)

    def _send(self, status: int, values: dict[str, Any] | str) -> None:
        content = (values if isinstance(values, str) else json.dumps(values)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    _, verb, folder, *options = sys.argv
    assert verb == "serve"
    if "--uds" in options:
        started = StandIn(path=options[options.index("--uds") + 1])
    else:
        started = StandIn(int(options[options.index("--port") + 1]), host=options[options.index("--host") + 1])
    started.reloads = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    started.loads = "--enable-lora" in options and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True"
    started.serve(folder)
    if "--keeps-its-weights" in options:
        started.open_adapter = lambda folder: started.model
    print("ready", flush=True)
    started.serve_forever()
