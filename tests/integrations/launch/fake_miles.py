"""A checkout that stands for miles: the files that a launch looks at and runs, with nothing behind them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_TRAIN = '''\
"""Writes down how it was called, starts processes of its own, one of them a daemon, and then does as $PLAY says."""
import json, os, subprocess, sys, time

here = os.environ["SEEN"]
child = subprocess.Popen(["sleep", "1000.25"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1000.25"])
    os._exit(0)
os.wait()
with open(here + ".part", "w") as seen:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "script": sys.argv[0]}, seen)
os.rename(here + ".part", here)
print("step 1 of 1", flush=True)
play = os.environ.get("PLAY", "end")
if play == "stay":
    time.sleep(1000)
sys.exit(int(play) if play.isdigit() else 0)
'''
_MODEL_ARGS = """\
import sys
if sys.argv[1] == "no-such-model":
    sys.exit("no model args script")
print("--num-layers 4 --moe-layer-freq [0]*1+[1]*3")
"""
_CONVERT = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
folder.mkdir(parents=True)
(folder / "argv").write_text("\\n".join(sys.argv[1:]))
(folder / "latest_checkpointed_iteration.txt").write_text("release")
"""
_HF = """\
#!/bin/sh
mkdir -p "$4" && echo '{}' > "$4/config.json"
"""
_TORCHRUN = f"""\
#!/bin/sh
[ "$1" = --nproc-per-node ] && shift 2
exec {sys.executable} "$@"
"""
_TITO = "class TITOTokenizerType(StrEnum):\n    DEFAULT = 'default'\n    QWEN3 = 'qwen3'\n    GLM47 = 'glm47'\n"
_FLAGS = (
    *("--custom-generate-function-path", "--custom-agent-function-path", "--custom-rm-path"),
    *("--dynamic-sampling-filter-path", "--custom-rollout-log-function-path"),
    *("--custom-eval-rollout-log-function-path", "--use-session-server", "--session-server-port", "--tito-model"),
)


def fake_miles(folder: Path) -> Path:
    """Write the checkout, and beside it ``Megatron-LM`` and ``bin`` with ``hf`` and ``torchrun``."""
    root = folder / "miles-checkout"
    files = {
        "train.py": _TRAIN,
        "tools/convert_hf_to_torch_dist.py": _CONVERT,
        "miles/__init__.py": "",
        "miles/utils/external_utils/model_args_utils.py": _MODEL_ARGS,
        "miles/utils/arguments.py": "\n".join(f'add_argument("{flag}")' for flag in _FLAGS),
        "miles/utils/chat_template_utils/tito_tokenizer.py": _TITO,
        "miles/rollout/generate_hub/agentic_tool_call.py": "",
        "miles/rollout/filter_hub/dynamic_sampling_filters.py": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "Megatron-LM").mkdir()
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("hf", _HF), ("torchrun", _TORCHRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return root


def rows(path: Path, tasks: list[str]) -> Path:
    """A prompt file."""
    prompt = [{"role": "system", "content": "You are in a terminal."}]
    path.write_text("".join(json.dumps({"prompt": prompt, "metadata": {"task_id": name}}) + "\n" for name in tasks))
    return path


def settings(folder: Path, root: Path, prompt_data: Path) -> list[str]:
    """The ``--set`` words with which a launch runs on the fake checkout, on a machine without GPUs."""
    source = Path(__file__).parents[3] / "src"
    values = {
        "paths.miles": root,
        "paths.megatron": folder / "Megatron-LM",
        "paths.models": folder / "models",
        "paths.python": sys.executable,
        "paths.prompt_data": prompt_data,
        "env.PYTHONPATH": source,
        "env.SEEN": folder / "seen.json",
        "env.PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "preflight.disk_gb": "0",
        "rollout.rollout_batch_size": "2",
        "rollout.n_samples_per_prompt": "2",
        "rollout.global_batch_size": "4",
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
