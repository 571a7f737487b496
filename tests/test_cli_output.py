"""What the commands do when a run is cut short, and when output cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import ROOT, mpk, refusal

ENDLESS = ("generate", "--prompt", "Once upon a time", "--max-new-tokens", "8000", "--ignore-eos")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "mpk", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **environment})


def shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "mpk", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=100)


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose last norm is not a number, with a tokenizer of single words."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tests.support.models import tiny_model

    folder = tmp_path_factory.mktemp("broken")
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 3, "\u2581b": 4, "?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# ---- runs that are cut short

def test_logits_that_are_not_numbers_are_told_and_end_with_code_1(broken_folder: Path) -> None:
    done = mpk("generate", "--model", str(broken_folder), "--prompt", "a b", "--max-new-tokens", "4", "--json")
    assert done.returncode == 1 and done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["finish_reason"] == "error" and report["first_token_ms"] is None and report["ms_per_token"] is None
    assert "mpk: the logits behind token 2 were not numbers" in done.stderr
    done = mpk("generate", "--model", str(broken_folder), "--prompt", "a b", "--max-new-tokens", "4")
    assert done.returncode == 1
    assert "[0 tokens, error]" in done.stderr and "mpk: the logits behind token 2 were not numbers" in done.stderr


def test_a_single_token_has_no_time_between_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    from mpk.commands import generate
    from mpk.frontend import load
    from mpk.runtime.request import GenerateResult

    loaded, one = load("smollm2-135m-instruct"), GenerateResult([[5]], ["length"], 12.0, 0.0, 1, [3], [[12.0]])
    report = generate._report("cpp", loaded, [1, 2, 3], one)
    assert report["first_token_ms"] == 12.0 and report["ms_per_token"] is None
    generate._print_summary(one)
    assert capsys.readouterr().err == "[1 tokens, first after 12 ms]\n"


def test_an_interrupt_while_generating_prints_what_there_is() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None
    first = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first + rest == first + rest.rstrip("\n") + "\n" and len(first) == 8
    summary = errors.strip().splitlines()[-1]
    assert " tokens, cancelled, first after " in summary and "Traceback" not in errors


def test_an_interrupt_while_generating_json_prints_the_object() -> None:
    """The process interrupts itself once tokens come, as nothing is printed before the end."""
    program = ("import os, signal, threading\n"
               "from mpk.runtime import instance\n"
               "plain, sent = instance._Stream.deliver, threading.Lock()\n"
               "def deliver(self):\n"
               "    plain(self)\n"
               "    if max(self.length) > 5 and sent.acquire(blocking=False): os.kill(os.getpid(), signal.SIGINT)\n"
               "instance._Stream.deliver = deliver\n"
               "from mpk.cli import main\n"
               "main()\n")
    done = subprocess.run([sys.executable, "-c", program, *ENDLESS, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130, done.stderr
    report = json.loads(done.stdout)
    assert report["finish_reason"] == "cancelled" and len(report["tokens"]) < 8000
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["typer", "jinja2", "rich"])
def test_an_interrupt_while_importing_ends_with_code_130_and_no_words(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    process = start("inspect", "SmolLM2-135M", "--workers", "2", PYTHONPATH=f"{tmp_path}:{ROOT}")
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "")


def test_an_interrupt_while_measuring_ends_with_code_130() -> None:
    program = ("import os, signal\n"
               "from mpk.runtime.engine import ThreadExecutor\n"
               "plain = ThreadExecutor.start\n"
               "def start(self, *given):\n"
               "    plain(self, *given)\n"
               "    import threading\n"
               "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
               "ThreadExecutor.start = start\n"
               "from mpk.cli import main\n"
               "main()\n")
    done = subprocess.run([sys.executable, "-c", program, "trace", "--context", "2048", "--output", "/dev/null"], cwd=ROOT, capture_output=True,
                          text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# ---- output that cannot be written

def test_a_full_standard_output_is_told_in_one_line() -> None:
    for arguments in (("targets",), ("targets", "--json"), ("--help",), ("inspect", "SmolLM2-135M")):
        done = shell("> /dev/full", *arguments)
        assert (done.returncode, done.stderr) == (1, "mpk: standard output cannot be written (No space left on device)\n"), arguments


def test_a_full_standard_output_stops_a_generation() -> None:
    done = shell("> /dev/full", *ENDLESS)
    assert (done.returncode, done.stderr) == (1, "mpk: standard output cannot be written (No space left on device)\n")


def test_a_closed_standard_output_is_refused() -> None:
    done = shell(">&-", "targets")
    assert (done.returncode, done.stderr) == (1, "mpk: standard output is closed; redirect it to a file or to /dev/null\n")


def test_a_closed_standard_error_mixes_nothing_into_the_output() -> None:
    done = shell("2>&-", "generate", "--model", "/no/such/model")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_reader_that_leaves_early_causes_no_words() -> None:
    done = subprocess.run(["sh", "-c", '"$@" | head -n 1', "sh", sys.executable, "-m", "mpk", "inspect", "SmolLM2-135M", "--text"], cwd=ROOT,
                          capture_output=True, text=True, timeout=100)
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_a_pipe_without_a_reader_ends_with_code_141_and_no_words() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "mpk", "targets"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_characters_that_the_output_cannot_show_are_replaced(tmp_path: Path) -> None:
    graph = tmp_path / "g\u00e9.mpk"
    assert mpk("inspect", "SmolLM2-135M", "--save", str(graph)).returncode == 0
    done = mpk("verify", str(graph), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "/g\\xe9.mpk: valid" in done.stdout


def test_a_dump_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert f"MPK_DUMP {file} cannot be written" in refusal("inspect", "SmolLM2-135M", MPK_DUMP=str(file))
    (tmp_path / "00_model.txt").mkdir()
    assert f"MPK_DUMP {tmp_path} cannot be written (Is a directory)" in refusal("inspect", "SmolLM2-135M", MPK_DUMP=str(tmp_path))


def test_checking_that_a_file_can_be_written_leaves_none_behind(tmp_path: Path) -> None:
    from mpk.commands.common import check_writable

    check_writable("--output", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    check_writable("--output", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


# ---- the rest

def test_the_version_is_printed() -> None:
    import mpk as package

    assert mpk("--version").stdout == f"mpk {package.__version__}\n"


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    from mpk.commands.generate import _prompt_text
    from mpk.frontend import load

    tokenizer = load("smollm2-135m-instruct").tokenizer
    assert tokenizer is not None
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert _prompt_text(None, tmp_path / "prompt.txt", False, tokenizer) == ("Hello", False)


def test_a_gpu_target_without_a_gpu_says_what_is_needed() -> None:
    from mpk.runtime.cuda_device import device_count

    if device_count():
        pytest.skip("this machine has a GPU")
    for command in ("generate", "trace"):
        line = refusal(command, "--target", "h200")
        assert "target h200, expected a CUDA device, got none on this machine" in line and "the target cpp runs here" in line


def test_stopping_after_an_unknown_pass_or_one_without_tasks_is_refused() -> None:
    line = refusal("inspect", "SmolLM2-135M", MPK_STOP_AFTER="nonsense")
    assert "MPK_STOP_AFTER nonsense, expected one of partition, dependencies, schedule, event_fusion, memory, verify" in line
    line = refusal("inspect", "SmolLM2-135M", MPK_STOP_AFTER="fuse")
    assert "MPK_STOP_AFTER fuse, expected one of partition" in line and "MPK_DUMP=<folder> writes what such a pass leaves" in line


def test_stopping_after_partition_leaves_tasks_without_events(tmp_path: Path) -> None:
    done = mpk("inspect", "SmolLM2-135M", "--json", MPK_STOP_AFTER="partition", MPK_DUMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tasks"] > 100 and report["events"] == 0
    assert max(p.name for p in tmp_path.iterdir()) == "04_partition.txt"


def test_generate_with_lowering_stopped_early_is_refused() -> None:
    assert "MPK_STOP_AFTER" not in os.environ
    refusal("generate", "--prompt", "a", MPK_STOP_AFTER="schedule")


def test_the_frontend_is_reachable_from_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", "import mpk; print(mpk.frontend.load.__name__, 'frontend' in mpk.__all__)"], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == "load True\n", done.stderr
