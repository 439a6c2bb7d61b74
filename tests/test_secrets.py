"""Protects secrets of the environment in texts of others: a library's error, log or traceback shows none.

python -m pytest -q tests/test_secrets.py
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment
from curves import write_chats

from cookbook.system import status
from cookbook.system.console import page, say
from cookbook.system.masking import mask_secrets
from cookbook.training.metrics import RunLog

PASSWORD, TOKEN = "s3cr:t/pw%21", "hf_canaryXq7Lk2"
ENVIRONMENT = {
    "MLFLOW_TRACKING_URI": f"http://bob:{PASSWORD}@host:9",
    "HF_TOKEN": TOKEN,
    "MY_PASSWORD": "short",
    "DB_SECRET": "a b+c/d=e.f[g]",
    "TOKENIZERS_PARALLELISM": "false",
    "SOME_KEY": "true",
    "OTHER_KEY": "12",
    "HOME": "/home/short",
    "https_proxy": "http://only-a-token@proxy:1",
    "TRACKIO_SERVER_URL": "https://space.example/?write_token=w4rite&sig=a%2Fbcdefghijkl&mode=require",
    "SLACK_WEBHOOK_URL": "https://hooks.example/services/T1/B2/x3Yz",
    "DB_PASS": "hunter2hunter2",
    "GH_PAT": "ghp_canary12",
    "PROXY_AUTH": "bob:canary34",
    "GIT_AUTHOR_NAME": "Author Name",
    "OLDPWD": "/srv/work",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"request to http://bob:{PASSWORD}@host:9/api failed", "request to http://***@host:9/api failed"),
        (f"401 for bob:{PASSWORD}", "401 for ***"),
        (f"password {PASSWORD} refused", "password *** refused"),
        ("password s3cr:t/pw! refused", "password *** refused"),
        (f"Bearer {TOKEN}, {TOKEN}x", "Bearer ***, ***x"),
        ("is short, not shorter", "is ***, not shorter"),
        ("key a b+c/d=e.f[g].", "key ***."),
        ("key a%20b%2Bc%2Fd%3De.f%5Bg%5D", "key ***"),
        ("https://any:body@elsewhere/x?a=b@c", "https://***@elsewhere/x?a=b@c"),
        ("https://hf_other@hub.example/x", "https://***@hub.example/x"),
        ("user only-a-token is unknown", "user *** is unknown"),
        ("url: /?write_token=w4rite&sig=a%2Fbcdefghijkl&mode=require", "url: /?write_token=***&sig=***&mode=require"),
        ("url: /services/T1/B2/x3Yz (refused)", "url: /*** (refused)"),
        ("pass hunter2hunter2, ghp_canary12 and bob:canary34", "pass ***, *** and ***"),
        ("in /srv/work of Author Name, as some require", "as it is"),
        ("true, false and 12 stay, and a@b.c, hf://datasets/a/b@main/c", "as it is"),
    ],
)
def test_a_text_shows_no_secret(text: str, shown: str):
    assert mask_secrets(text, ENVIRONMENT) == (text if shown == "as it is" else shown)


@pytest.fixture
def environment(monkeypatch) -> None:
    for name, value in ENVIRONMENT.items():
        if name not in ("HOME", "TOKENIZERS_PARALLELISM"):
            monkeypatch.setenv(name, value)


def test_what_we_say_and_keep_of_an_error_has_no_secret(environment, tmp_path: Path, capsys):
    error = OSError(f"http://bob:{PASSWORD}@host:9 refused {TOKEN}")
    say(error)
    say(page(("a cell", str(error))), file=sys.stderr)
    log = RunLog(tmp_path / "run", is_main=True, max_steps=1)
    log.say(str(error))
    log.say(str(error), "bold")
    log.event("note", 1, reason=str(error), texts=[str(error)])
    log.write_record("run.json", {"a": [{"b": str(error)}]})
    status.Status(tmp_path / "run", is_main=True)
    status.fail(tmp_path / "run", error)
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir())
    said = "".join(capsys.readouterr())
    assert said.count("http://***@host:9 refused ***") == 4 and written.count("http://***@host:9 refused ***") == 4
    assert not any(secret in said + written for secret in (PASSWORD, TOKEN, "s3cr"))


LIBRARY = """
import logging, sys, warnings
sys.path.insert(0, sys.argv[1])
from cookbook.system import masking, signals
signals.install() if sys.argv[2] == "run" else masking.mask_streams()
text = "http://bob:" + sys.argv[3] + "@host failed"
logging.basicConfig()
logging.getLogger("library").warning(text)
handler = logging.StreamHandler()
logging.getLogger("other").addHandler(handler)
logging.getLogger("other").error("%s", text)
warnings.warn(text)
print(text); print(text, file=sys.stderr); sys.stderr.writelines([text])
from tqdm import tqdm; tqdm.write(text, file=sys.stderr)
raise RuntimeError(text)
"""


@pytest.mark.parametrize("kind", ["run", "command"])
def test_what_libraries_print_log_warn_of_and_raise_has_no_secret(kind: str, tmp_path: Path):
    (tmp_path / "x.py").write_text(LIBRARY)
    words = [sys.executable, "x.py", str(ROOT), kind, PASSWORD]
    environment = clean_environment(DB_PASSWORD=PASSWORD)
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    shown = done.stdout + done.stderr
    assert shown.count("***@host failed") >= 9 and PASSWORD not in shown, shown
    assert "Traceback" in shown


REFUSING = {
    "HF_TOKEN": "hf_canary1Xq7Lk2",
    "WANDB_API_KEY": "canary2Xq7Lk2" + "0" * 27,
    "WANDB_BASE_URL": "http://bob:canary3Xq7Lk2@127.0.0.1:PORT",
    "MLFLOW_TRACKING_URI": "http://bob:canary4Xq7Lk2@127.0.0.1:PORT",
    "MLFLOW_TRACKING_PASSWORD": "canary5Xq7Lk2",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "HF_ENDPOINT": "http://bob:canary6Xq7Lk2@127.0.0.1:PORT",
    "HTTP_PROXY": "http://bob:canary7Xq7Lk2@127.0.0.1:PORT",
    "HTTPS_PROXY": "http://bob:canary8Xq7Lk2@127.0.0.1:PORT",
    "VLLM_API_KEY": "canary9Xq7Lk2",
}
"""Each documented credential, for a port where nothing answers."""
RUN = """\
strategy: single
mixed_precision: 'no'
model:
  from_scratch: {vocab_size: 320, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
                 num_attention_heads: 2, num_key_value_heads: 1}
data: {train: chats.jsonl, max_length: 64}
batch: {global_batch_size: 4, micro_batch_size: 2}
optim: {learning_rate: 1e-3}
run: {max_steps: 2, output_dir: outputs/run, trackers: [mlflow, wandb, trackio]}
"""


def test_each_documented_credential_is_tried():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    words = {word for page in pages for word in re.findall(r"\b[A-Z]+_[A-Z_]+\b", page.read_text(encoding="utf-8"))}
    named = {word for word in words if re.search(r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD|ENDPOINT|PROXY|_UR[IL]$", word)}
    assert {"HF_TOKEN", "WANDB_API_KEY"} <= named <= REFUSING.keys()


@pytest.mark.slow
@pytest.mark.thorough(turn=(0, 20))  # minutes, of retries
def test_a_server_that_refuses_makes_no_library_tell_a_credential(tmp_path: Path):
    write_chats(tmp_path / "chats.jsonl", 12)
    (tmp_path / "r.yaml").write_text(RUN)
    rounds = {"objective": "{name: distill, teacher: org/teacher, kd_ratio: 1, beta: 1}"}
    (tmp_path / "rounds.yaml").write_text(
        RUN.replace("max_steps: 2", "num_epochs: 1").replace(", trackers: [mlflow, wandb, trackio]", "")
        + f"objective: {rounds['objective']}\n"
        + "rounds: {num_rounds: 1, prompts_per_round: 2, sampler: 'http://127.0.0.1:PORT'}\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name in ("rounds.yaml",):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace("PORT", port))
    values = {name: value.replace("PORT", port) for name, value in REFUSING.items()}
    environment = clean_environment(**values, HF_HOME=str(tmp_path / "hf"), HOME=str(tmp_path))
    environment.pop("HF_HUB_OFFLINE", None)
    hub = ["--set", "data.train={path: org/rows}"]
    printed = []
    for words in (
        ["launch", "r.yaml"],
        ["preview", "r.yaml", *hub],
        ["check", "r.yaml", "--data", *hub],
        ["doctor", "r.yaml", *hub],
        ["rounds", "rounds.yaml", "--set", "model={name_or_path: org/model}"],
        ["export", "outputs/run", "--push", "org/model"],
        ["report", "outputs/run"],
        ["submit", "r.yaml", "--to", "slurm"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "cookbook", *words],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        printed.append(f"{words}: {done.returncode}\n{done.stdout}{done.stderr}")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    told = [str(path) for path in files if re.search(rb"canary\dXq7Lk2", path.read_bytes())]
    assert not told, told
    shown = "\n".join(printed)
    assert not re.search(r"canary\dXq7Lk2", shown), re.findall(r".*canary\dXq7Lk2.*", shown)
    assert "mlflow failed" in shown, shown
    assert os.path.isfile(tmp_path / "outputs/run/metrics.jsonl")
    assert "***" not in json.dumps([path.name for path in files])
