"""The examples as a user runs them, on two CPU ranks: what they print and what they leave behind.

The cluster's script is started with torchrun itself. The others run as `__main__` in the harness's processes, with the
variables that torchrun sets: torch and transformers are then imported once and not for each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate_state import forget
from ranks import run_processes
from safetensors.torch import load_file

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.commands.train import read_options
from zeroshard.train.data.corpus import shakespeare
from zeroshard.utils.stored_tensor import StoredTensor

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = EXAMPLES / "cluster"
LIMIT = 120  # seconds a command may take: a hang is a failure, not a wait


def environment(**extra: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"  # of torchrun
    offline = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}  # CPUs also where there are GPUs; nothing downloaded
    return {**kept, **offline, "PATH": path, "OMP_NUM_THREADS": "1", **extra}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def be_rank(rank: int, port: str, *command: str) -> str:
    """Run an example as torchrun would start it, and return what it printed."""
    dist.destroy_process_group()  # the harness's: an example makes its own
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=port)
    before, sys.argv = sys.argv, list(command)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv = before
        if "accelerate" in sys.modules:
            forget()
    return printed.getvalue()


def run(name: str, *arguments: object) -> str:
    """Run an example on two ranks, and return what it printed."""
    offline = {"HF_HUB_OFFLINE": "1"}
    first, second = run_processes(
        2, be_rank, free_port(), str(EXAMPLES / name), *map(str, arguments), timeout=LIMIT, env=offline
    )
    assert second == ""  # the first rank speaks for all
    return first


def series(output: str, what: str) -> list[float]:
    """The values of a quantity over the steps that were shown."""
    return [float(value) for value in re.findall(rf"^step +\d+  {what} +([\d.]+)", output, re.M)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------- in one file


def test_the_plain_loop_learns_reports_and_leaves_checkpoints_that_it_goes_on_from(tmp_path: Path) -> None:
    options = f"--layers 2 --width 32 --context 32 --checkpoints {tmp_path / 'kept'} --steps".split()
    output = run("plain_loop.py", *options, 40)
    losses = series(output, "loss")
    assert losses[-1] < losses[0] - 1
    assert "stage 3, fp32, 512 characters per step" in output  # 2 ranks × 8 sequences × 32
    assert re.search(r"^rank 0 of 2, [\d,]+ parameters$", output, re.M)

    model = GPT(GPTConfig(vocab_size=128, context=32, layers=2, heads=1, width=32))
    zeroshard.load(tmp_path / "kept", model)
    text = torch.frombuffer(bytearray(shakespeare()[: 33 * 64].encode()), dtype=torch.uint8).long().view(64, 33)
    assert abs(model(text[:, :-1], text[:, 1:]).item() - losses[-1]) < 0.4  # other pages, the same language

    output = run("plain_loop.py", "--stage", 1, *options, 60)
    assert re.findall(r"^step +(\d+)", output, re.M) == ["60"] and series(output, "loss")[0] < losses[-1] + 0.1


def test_the_convnet_learns_to_see() -> None:
    output = run("convnet.py", "--steps", 40)
    shares = series(output, "accuracy")
    assert shares[0] < 40 and shares[-1] > 70  # per cent; guessing gives 12.5
    assert re.search(r"^rank 0 of 2, [\d,]+ parameters$", output, re.M)


# --------------------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What huggingface.py saves, and what it prints."""
    path = tmp_path_factory.mktemp("models") / "base"
    return path, run("huggingface.py", "--steps", 20, "--context", 32, "--save", path)


def plain(path: Path) -> Any:
    """The model as transformers loads it, which must find every tensor and no other."""
    import transformers

    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def pages(path: Path) -> torch.Tensor:
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(path).encode(shakespeare()[:2048], add_special_tokens=False)
    return torch.tensor(tokens).view(-1, 32)


def test_a_transformers_model_learns_and_says_what_the_saved_one_says(base: tuple[Path, str]) -> None:
    import transformers

    path, output = base
    losses = series(output, "loss")
    assert losses[-1] < losses[0] - 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = tokenizer("ROMEO. ", return_tensors="pt", add_special_tokens=False)
    said = tokenizer.decode(plain(path).generate(**prompt, max_new_tokens=40, do_sample=False)[0])
    assert f"\n{said!r}\n" in output
    assert len(said) > len("ROMEO. ")


def test_a_stored_transformers_model_is_streamed_into_its_partitions(base: tuple[Path, str]) -> None:
    model, init_fn, _ = load("huggingface").build(base[0])
    assert all(isinstance(parameter, StoredTensor) for parameter in model.parameters())
    zeroshard.shard(model, stage=3, init_fn=init_fn)
    tokens = pages(base[0])
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, plain(base[0])(input_ids=tokens).logits)


def test_lora_learns_without_states_for_the_base_and_peft_loads_the_adapter(
    base: tuple[Path, str], tmp_path: Path
) -> None:
    import peft

    output = run("lora.py", "--model", base[0], "--steps", 40, "--context", 32, "--save", tmp_path)
    losses = series(output, "loss")
    assert losses[-1] < losses[0]
    told = re.search(r"^trained: ([\d,]+) of [\d,]+ parameters\noptimizer states: ([\d,]+) B per rank", output, re.M)
    assert told is not None
    trained, states = (int(number.replace(",", "")) for number in told.groups())
    assert 8 * trained / 2 <= states < 8 * trained / 2 * 1.1  # Adam's two fp32 numbers, over two ranks, and padding

    model, tokens = plain(base[0]), pages(base[0])
    with torch.no_grad():
        before = model(input_ids=tokens, labels=tokens).loss.item()
        tuned = peft.PeftModel.from_pretrained(model, str(tmp_path))
        after = tuned(input_ids=tokens, labels=tokens).loss.item()
    assert after < before - 0.1
    saved = load_file(tmp_path / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(tuned)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert sum(tensor.numel() for tensor in saved.values()) == trained


def test_accelerates_example_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    import transformers

    options = ("--cpu", "--project", tmp_path)
    first = run("accelerate_finetune.py", *options, "--epochs", 1)
    second = run("accelerate_finetune.py", *options, "--epochs", 3, "--resume", "--stage", 1)
    assert re.findall(r"^epoch (\d)", first + second, re.M) == ["1", "2", "3"]
    assert float(second.split()[-1]) > 0.75  # guessing gives 0.5
    _, told = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(told.values()), told


# --------------------------------------------------------------------------------------------------- several nodes


def rank_of(agent: int) -> int:
    """The process that torchrun has started."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{agent}\n" in status.read_text():
                return int(status.parent.name)
        except OSError:  # it ended meanwhile
            continue
    raise AssertionError(f"torchrun {agent} has no rank")


def test_two_nodes_meet_and_go_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    out, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text(shakespeare()[:40_000])
    options = (
        "--device cpu --plain --layers 2 --width 32 --sequence 16 --batch 12 --steps 30 --eval-every 0 "
        f"--eval-sequences 2 --checkpoint-every 10 --sample-tokens 0 --vocabulary 300 --data {text}"
    )
    loopback = {"HEAD": "127.0.0.1", "PORT": free_port(), "PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    place = {**loopback, "GPUS": "1", "OUT": str(out)}
    logs = [tmp_path / "node0", tmp_path / "node1"]
    nodes = []
    for log in logs:
        with log.open("w") as file:
            command = ["bash", str(CLUSTER / "torchrun.sh"), *options.split()]
            nodes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment(**place)))
    try:
        deadline = time.monotonic() + LIMIT
        while not (out / "checkpoints" / "step-000010" / "index.json").exists():
            told = "".join(log.read_text() for log in logs)
            assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), told
            time.sleep(0.01)
        os.kill(rank_of(nodes[1].pid), signal.SIGKILL)
        for node in nodes:
            node.wait(LIMIT)
    finally:
        for node in nodes:
            node.terminate()
    told = "".join(log.read_text() for log in logs)
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "2 on cpu over gloo" in told
    assert re.search(r"^resume +from step [12]0$", told, re.M), told
    steps = re.findall(r'"step": (\d+), "loss"', (out / "metrics.jsonl").read_text())
    assert [int(step) for step in steps] == list(range(1, 31))


def test_under_slurm_each_gpu_gets_a_rank_of_a_run_that_can_go_on(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    slurm = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NAME": "zeroshard", "OUT": "/shared/xl"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(CLUSTER / "slurm.sh"), "--model", "gpt2-xl", "--steps", "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**slurm) | {"PATH": path}, check=True
    )
    words = done.stdout.split()
    assert words[:4] == ["--kill-on-bad-exit=1", "--cpus-per-task=8", "zeroshard", "train"]
    options = read_options(words[4:])
    assert (options.run.out, options.run.resume, options.training.steps) == ("/shared/xl", True, 7)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (CLUSTER / "slurm.sh").read_text(), re.M))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


@pytest.mark.parametrize("page", [EXAMPLES / "README.md", CLUSTER / "README.md"])
def test_what_the_pages_point_at_is_there(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"examples/\w+\.py", text)
    assert targets
    for target in targets:
        assert (page.parent / target.removeprefix("examples/")).exists(), target


def test_the_piece_for_kubernetes_can_be_read() -> None:
    text = (CLUSTER / "README.md").read_text()
    (job,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (container,) = yaml.safe_load(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert read_options(container["command"][container["command"].index("train") + 1 :]).run.resume


@pytest.mark.timeout(600)  # Ray starts six processes, twice
def test_ray_goes_on_with_the_same_numbers_after_a_worker_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'zeroshard[ray]'")
    options = f"--steps 4 --checkpoint-every 2 --kill-at 3 --context 16 --batch 4 --storage {tmp_path}".split()
    extra = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "200"}  # seconds: on a busy machine too
    extra |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # by default 2 s
    extra["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**extra), timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists() and "step 4  loss" in done.stdout

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=128, context=16, layers=2, heads=2, width=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(shakespeare()[:200_000].encode()), dtype=torch.uint8).long()
    for step in range(1, 5):  # undisturbed, in one process
        drawn = [torch.Generator().manual_seed(2 * step + rank) for rank in range(2)]
        starts = torch.cat([torch.randint(len(text) - 17, (4, 1), generator=generator) for generator in drawn])
        batch = text[starts + torch.arange(17)]
        model(batch[:, :-1], batch[:, 1:]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    (found,) = re.findall(r"^step 4  loss [\d.]+  norm ([\d.]+)$", done.stdout, re.M)
    assert float(found) == pytest.approx(float(norm), rel=1e-2)
    resumed = GPT(model.config)
    zeroshard.load(tmp_path / "checkpoints", resumed)
    torch.testing.assert_close(dict(resumed.state_dict()), dict(model.state_dict()), rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------------------------- Lightning


def test_lightnings_trainer_starts_the_ranks_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'zeroshard[lightning]'")
    options = f"--samples 64 --context 16 --width 32 --out {tmp_path} --epochs".split()
    command = [sys.executable, str(EXAMPLES / "lightning_trainer.py"), *options]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.run([*command, "1"], capture_output=True, text=True, env=environment(**path), timeout=LIMIT)
    told = re.search(r"^validation loss ([\d.]+), checkpoint (.*)$", first.stdout, re.M)
    assert told is not None, first.stdout + first.stderr
    again = run("lightning_trainer.py", *options, 2, "--resume", told[2], "--strategy", "zeroshard_stage_1")
    (loss,) = re.findall(r"^validation loss ([\d.]+)", again, re.M)
    assert float(loss) < float(told[1]) < 5


def test_fabrics_loop_has_the_numbers_of_ddp_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'zeroshard[lightning]'")
    options = ["--context", "16", "--batch", "4", "--checkpoint"]
    plain = run("fabric_loop.py", *options, tmp_path / "ddp", "--steps", "20", "--strategy", "ddp")
    run("fabric_loop.py", *options, tmp_path / "zero", "--steps", "10", "--strategy", "zeroshard_stage_1")
    resumed = run("fabric_loop.py", *options, tmp_path / "zero", "--steps", "20")
    assert series(plain, "loss")[1:] == pytest.approx(series(resumed, "loss"), rel=1e-3)
    assert len(series(resumed, "loss")) == 1


# ------------------------------------------------------------------------------------------- Trainer and TRL


def test_the_trainer_learns_resumes_at_another_stage_and_leaves_a_model(tmp_path: Path) -> None:
    cpu = ["--use_cpu", "--ddp_backend", "gloo", "--disable_tqdm", "true", "--report_to", "none"]
    options = [*cpu, "--output_dir", tmp_path, "--context", 32, "--save_steps", 10, "--eval_steps", 10]
    first = run("hf_trainer.py", *options, "--max_steps", 10)
    second = run("hf_trainer.py", *options, "--max_steps", 30, "--stage", 1, "--resume_from_checkpoint", "true")
    perplexities = [float(re.findall(r"perplexity per character: ([\d.]+)", output)[0]) for output in (first, second)]
    assert perplexities[1] < perplexities[0] < 64 and "'epoch'" in second
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-20", "checkpoint-30"}
    plain(tmp_path)


def test_trl_fine_tunes_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import peft

    cpu = ["--use_cpu", "--ddp_backend", "gloo", "--bf16", "false", "--disable_tqdm", "true"]
    output = run("trl_sft.py", *cpu, "--output_dir", tmp_path, "--max_steps", 10, "--logging_steps", 5)
    accuracies = re.findall(r"accuracy of the next byte: ([\d.]+), then ([\d.]+)", output)
    assert len(accuracies) == 1 and float(accuracies[0][0]) < float(accuracies[0][1])
    assert peft.PeftConfig.from_pretrained(tmp_path).r == 8
    assert all(value.any() for value in load_file(tmp_path / "adapter_model.safetensors").values())
